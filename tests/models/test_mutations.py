"""What the parity tests are worth: an engine that is wrong in one detail must fail them, by far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_parity import bound

from quire.layers.attention_spec import AttentionSpec, BlockAttentionSpec, LatentAttentionSpec
from quire.layers.state_spec import LightningSpec
from quire.models import description
from support import mutations as m
from support.checkpoints import ALL_VARIANTS
from support.engines import make_llm, runner_of, teacher_forced_logits
from support.reference import LENGTHS, logits
from support.ways import FIRST

pytestmark = pytest.mark.texts

SPEC_MUTATIONS: list[tuple[str, str, m.SpecMutation]] = [
    # rotation
    ("llama", "theta", m.rotary(theta=lambda theta: theta * 1.1)),
    ("qwen3", "theta", m.rotary(theta=lambda theta: theta * 1.1)),
    ("dbrx", "theta", m.rotary(theta=lambda theta: theta * 1.5)),
    ("muse_glimmer_text", "no rotation", m.decoder(rotary=lambda r: (None,) * len(r))),
    ("llama", "no rotation", m.decoder(rotary=lambda r: (None,) * len(r))),
    ("llama", "interleaved", m.attention(interleaved_rotary=True)),
    ("llama-mqa-linear", "interleaved", m.attention(interleaved_rotary=True)),
    ("glm4_moe", "interleaved", m.attention(interleaved_rotary=True)),
    ("cohere", "not interleaved", m.attention(interleaved_rotary=False)),
    ("cohere2", "not interleaved", m.attention(interleaved_rotary=False)),
    ("glm", "not interleaved", m.attention(interleaved_rotary=False)),
    ("glm4", "not interleaved", m.attention(interleaved_rotary=False)),
    ("deepseek_v2", "not interleaved", m.attention(interleaved_rotary=False)),
    ("deepseek_v3", "not interleaved", m.attention(interleaved_rotary=False)),
    ("deepseek_v32", "indexer interleaved", m.indexer(interleaved_rotary=True)),
    ("glm_moe_dsa", "indexer not interleaved", m.indexer(interleaved_rotary=False)),
    ("deepseek_v32", "one token less selected", m.indexer(top_k=23)),
    ("glm_moe_dsa", "one token more selected", m.indexer(top_k=25)),
    ("phi", "whole head rotated", m.head_rotated_whole),
    ("glm", "whole head rotated", m.head_rotated_whole),
    ("glm4_moe", "whole head rotated", m.head_rotated_whole),
    ("gpt_neox", "whole head rotated", m.head_rotated_whole),
    ("stablelm", "whole head rotated", m.head_rotated_whole),
    ("llama-gqa2-tied-llama3", "not scaled", m.rotary(scaling={})),
    ("llama-biases-linear-old", "not scaled", m.rotary(scaling={})),
    ("gemma3", "not scaled", m.rotary(scaling={})),
    ("gpt_oss", "not scaled", m.rotary(scaling={})),
    ("phi3-longrope", "not scaled", m.rotary(scaling={})),
    ("llama-gqa4-llama3-old", "another factor", m.scaling(factor=4.4)),
    ("llama-mqa-linear", "another factor", m.scaling(factor=3.3)),
    ("gpt_oss", "another factor", m.scaling(factor=7.0)),
    ("llama-gqa4-llama3-old", "another original length", m.scaling(original_max_position_embeddings=40)),
    ("gpt_oss", "another original length", m.scaling(original_max_position_embeddings=64)),
    ("gpt_oss", "truncated", m.scaling(truncate=True)),
    ("gpt_oss-global-first", "not truncated", m.scaling(truncate=False)),
    ("gpt_oss", "beta_fast", m.scaling(beta_fast=32)),
    ("gpt_oss", "no attention factor", m.scaling(attention_factor=1.0)),
    ("olmo3", "no attention factor", m.scaling(attention_factor=1.0)),
    ("phi3-longrope", "no attention factor", m.scaling(attention_factor=1.0)),
    ("phi3-longrope", "short factors", lambda s: m.scaling(long_factor=s.rotary[0].scaling["short_factor"])(s)),
    ("deepseek_v3-without-groups", "mscale", m.scaling(mscale=0.5)),
    ("deepseek_v2", "scores not scaled by mscale", m.attention(scale=32**-0.5)),
    ("deepseek_v3", "scores not scaled by mscale", m.attention(scale=32**-0.5)),
    ("gemma3", "all layers rotated alike", m.rotated_alike),
    ("olmo3", "all layers rotated alike", m.rotated_alike),
    ("cohere2", "all layers rotated", m.rotated_alike),
    ("smollm3", "all layers rotated", m.rotated_alike),
    ("smollm3-windows", "all layers rotated", m.rotated_alike),
    ("ernie4_5", "not interleaved", m.attention(interleaved_rotary=False)),
    ("exaone4", "all layers rotated", m.rotated_alike),
    ("gemma4", "values without norms", m.attention(value_norm=None)),
    ("gemma4", "all of full attention rotated", m.scaling(partial_rotary_factor=1.0)),
    ("mellum", "all layers rotated alike", m.rotated_alike),
    ("cohere2_moe", "all layers rotated", m.rotated_alike),
    ("cwm", "none", m.windows(lambda w: None)),
    ("hyperclovax", "residual scale", m.decoder(residual_scale=None)),
    ("jais2", "GELU", m.mlp(activation="gelu")),
    ("gemma3n", "gates are not sparse", m.mlp(sparsity=0.0)),
    ("granite_swa", "all layers rotated alike", m.rotated_alike),
    ("granitemoe_swa", "all layers rotated alike", m.rotated_alike),
    ("exaone_moe", "all layers rotated", m.rotated_alike),
    ("afmoe", "all layers rotated", m.rotated_alike),
    ("minicpm3", "interleaved", m.attention(interleaved_rotary=True)),
    ("youtu", "not interleaved", m.attention(interleaved_rotary=False)),
    ("gptj", "not interleaved", m.attention(interleaved_rotary=False)),
    ("gptj", "whole head rotated", m.head_rotated_whole),
    ("persimmon", "whole head rotated", m.head_rotated_whole),
    # windows
    ("ministral", "none", m.windows(lambda w: None)),
    ("llama4", "no chunks", m.decoder(chunks=None)),
    ("llama4", "longer chunks", m.decoder(chunks=lambda chunks: tuple(chunk and 2 * chunk for chunk in chunks))),
    ("mistral-window-20", "none", m.windows(lambda w: None)),
    ("starcoder2", "none", m.windows(lambda w: None)),
    ("granite_swa", "none", m.windows(lambda w: None)),
    ("granitemoe_swa", "narrower by 1", m.windows(lambda w: w - 1)),
    ("afmoe", "none", m.windows(lambda w: None)),
    ("exaone_moe", "wider by 1", m.windows(lambda w: w + 1)),
    ("qwen2-windows-old", "none", m.windows(lambda w: None)),
    ("gemma2", "none", m.windows(lambda w: None)),
    ("mixtral-windows", "none", m.windows(lambda w: None)),
    ("phi3", "none", m.windows(lambda w: None)),
    ("qwen2-windows-old", "everywhere", m.windows_everywhere),
    ("qwen3-mixed-windows-biases", "everywhere", m.windows_everywhere),
    ("gemma3", "everywhere", m.windows_everywhere),
    ("gpt_oss", "everywhere", m.windows_everywhere),
    ("olmo3", "everywhere", m.windows_everywhere),
    ("qwen2-windows-in-upper-layers", "in other layers", m.decoder(windows=lambda w: w[::-1])),
    ("qwen3-mixed-windows-biases", "in other layers", m.decoder(windows=lambda w: w[::-1])),
    ("gemma2", "in other layers", m.decoder(windows=lambda w: w[::-1])),
    ("gpt_oss", "in other layers", m.decoder(windows=lambda w: w[::-1])),
    ("cohere2", "in other layers", m.decoder(windows=lambda w: w[::-1])),
    ("smollm3-windows", "in other layers", m.decoder(windows=lambda w: w[::-1])),
    ("mistral-window-20", "wider by 1", m.windows(lambda w: w + 1)),
    ("qwen2-windows-in-upper-layers", "wider by 1", m.windows(lambda w: w + 1)),
    ("gemma2", "wider by 1", m.windows(lambda w: w + 1)),
    ("mistral-window-32-tied", "narrower by 1", m.windows(lambda w: w - 1)),
    ("qwen3-mixed-windows-biases", "narrower by 1", m.windows(lambda w: w - 1)),
    ("gpt_oss", "narrower by 1", m.windows(lambda w: w - 1)),
    # scores
    ("gemma2", "no cap of scores", m.attention(soft_cap=None)),
    ("gemma2", "another cap of scores", m.attention(soft_cap=4.4)),
    ("gemma2", "usual scale", m.usual_scale),
    ("gemma3", "usual scale", m.usual_scale),
    ("granite", "usual scale", m.usual_scale),
    ("falcon-rw", "no slopes", m.attention(alibi=False)),
    ("bloom", "no slopes", m.attention(alibi=False)),
    ("bloom", "scaled slopes", m.attention(alibi_unscaled=False)),
    ("mpt", "no slopes", m.attention(alibi=False)),
    ("deepseek_v4", "one entry less selected", m.attention(entries=m.selecting(5))),
    ("deepseek_v4", "streams not balanced", m.decoder(hyper=lambda hyper: replace(hyper, balances=1))),
    ("deepseek_v4", "another window", m.windows(lambda window: window - 1)),
    ("deepseek_v4", "keys and gates of entries exchanged", m.exchanged("compress_kv", "compress_gate")),
    ("glm5_next", "one pool less selected", m.mixers(LatentAttentionSpec, indexer=lambda i: replace(i, top_k=20))),
    ("glm5_next", "streams not balanced", m.decoder(hyper=lambda hyper: replace(hyper, balances=1))),
    ("minimax_m3", "one block less selected", m.mixers(BlockAttentionSpec, top_blocks=2)),
    ("minimax_m3", "no last block", m.mixers(BlockAttentionSpec, local_blocks=0)),
    ("minimax_m3", "other blocks", m.mixers(BlockAttentionSpec, block_size=7)),
    ("bailing_moe_linear", "slower decay", m.mixers(LightningSpec, decay_rate=lambda rate: 0.9 * rate)),
    ("bailing_moe_linear", "normed as one", m.mixers(LightningSpec, norm_groups=1)),
    ("iquestloopcoder", "another window", m.windows(lambda window: window - 1)),
    ("iquestloopcoder", "no blend", m.mixers(AttentionSpec, blended=None)),
    ("step1", "no roots of distances", m.attention(root_reach=0)),
    ("step1", "roots of near distances only", m.attention(root_reach=20)),
    ("mpt-clipped", "usual scale", m.usual_scale),
    ("gpt2-scaled-by-layer", "same scale in all layers", m.decoder(score_scales=None)),
    ("ministral3", "no temperature", m.attention(temperature=None)),
    ("mistral4", "no temperature", m.attention(temperature=None)),
    ("llama4", "no temperature", m.attention(temperature=None)),
    ("olmo-clipped", "not clipped", m.attention(qkv_clip=None)),
    ("olmoe-clipped", "not clipped", m.attention(qkv_clip=None)),
    ("mpt-clipped", "not clipped", m.attention(qkv_clip=None)),
    # norms
    ("hunyuan_v1_dense", "before rotation", m.attention(norm_after_rotary=False)),
    ("nemotron", "no offset", m.norm(offset=0.0)),
    ("llama", "epsilon", m.norm(eps=lambda eps: eps * 1000)),
    ("qwen3", "epsilon", m.norm(eps=lambda eps: eps * 1000)),
    ("gpt2", "epsilon", m.norm(eps=lambda eps: eps * 1000)),
    ("gemma", "no offset", m.norm(offset=0.0)),
    ("gemma3", "no offset of q and k norms", m.attention(qk_norm=lambda norm: replace(norm, offset=0.0))),
    ("cohere", "RMS in place of layer norm", m.norm(kind="rms")),
    ("llama", "exchanged", m.exchanged("attention_norm", "mlp_norm")),
    ("gpt_neox", "exchanged", m.exchanged("attention_norm", "mlp_norm")),
    ("falcon-40b", "exchanged", m.exchanged("attention_norm", "mlp_norm")),
    ("gemma2", "exchanged", m.exchanged("attention_post_norm", "mlp_norm")),
    ("glm4", "exchanged", m.exchanged("attention_post_norm", "mlp_post_norm")),
    ("gemma3", "before in place of after", m.exchanged("attention_norm", "attention_post_norm")),
    ("olmo2", "attention's before in place of after", m.exchanged("attention_norm", "attention_post_norm")),
    ("olmo2", "MLP's before in place of after", m.exchanged("mlp_norm", "mlp_post_norm")),
    ("qwen3", "of q and k exchanged", m.exchanged("q_norm", "k_norm")),
    # branches
    ("gpt_neox", "sequential", m.decoder(residual="sequential")),
    ("falcon", "sequential", m.decoder(residual="sequential")),
    ("phi", "sequential", m.decoder(residual="sequential")),
    ("cohere", "sequential", m.decoder(residual="sequential")),
    ("gpt_neox-sequential", "parallel", m.decoder(residual="parallel")),
    ("opt", "norm after the sum", m.decoder(residual="post_norm")),
    ("opt-post-norm-projections", "norm before the branch", m.decoder(residual="sequential")),
    ("granite", "residual scale", m.decoder(residual_scale=None)),
    ("minicpm", "residual scale", m.decoder(residual_scale=None)),
    ("minicpm3", "residual scale", m.decoder(residual_scale=None)),
    ("granitemoe", "residual scale", m.decoder(residual_scale=None)),
    # ends
    ("gemma", "embedding scale", m.decoder(embedding_scale=None)),
    ("granite", "embedding scale", m.decoder(embedding_scale=None)),
    ("minicpm", "embedding scale", m.decoder(embedding_scale=None)),
    ("minicpm3", "embedding scale", m.decoder(embedding_scale=None)),
    ("afmoe", "embedding scale", m.decoder(embedding_scale=None)),
    # projections
    ("internlm2", "concatenated", m.attention(qkv_layout="concatenated")),
    ("gpt_neox", "concatenated", m.attention(qkv_layout="concatenated")),
    ("falcon-40b", "concatenated", m.attention(qkv_layout="concatenated")),
    ("phi3", "by head", m.attention(qkv_layout="by_kv_head")),
    ("gpt2", "by head", m.attention(qkv_layout="by_kv_head")),
    ("gpt_bigcode-heads", "concatenated", m.attention(qkv_layout="concatenated")),
    ("codegen", "concatenated", m.attention(qkv_layout="concatenated")),
    ("mistral-no-window", "gate and up exchanged", m.exchanged("gate", "up")),
    ("mixtral", "gate and up exchanged", m.exchanged("expert_gate", "expert_up")),
    # activations
    ("opt", "GELU", m.mlp(activation="gelu")),
    ("llama", "GELU", m.mlp(activation="gelu")),
    ("arcee", "GELU", m.mlp(activation="gelu")),
    ("bitnet", "SiLU", m.mlp(activation="silu")),
    # experts
    ("llama4", "results are weighed", m.experts(weigh_inputs=False)),
    ("hunyuan_v1_moe", "not normalized", m.experts(normalize=False)),
    ("olmoe", "normalized", m.experts(normalize=True)),
    ("phimoe", "softmax", m.experts(scoring="softmax")),
    ("dots1", "not scaled", m.experts(scale=1.0)),
    ("minimax_m2", "softmax", m.experts(scoring="softmax")),
    ("glm4_moe_lite", "not scaled", m.experts(scale=1.0)),
    ("mistral4", "sigmoid", m.experts(scoring="sigmoid")),
    ("mistral4-groups", "groups by their best", m.experts(group_score="best")),
    ("gemma4-experts", "one more", m.experts(top_k=4)),
    ("mellum", "not normalized", m.experts(normalize=False)),
    ("cohere2_moe", "sum of routed and shared experts", m.experts(scale=1.0)),
    ("cohere2_moe-sigmoid", "normalized", m.experts(normalize=True)),
    ("granitemoe", "not normalized", m.experts(normalize=False)),
    ("flex_olmo", "one more", m.experts(top_k=4)),
    ("exaone_moe", "no groups", m.experts(groups=1)),
    ("exaone_moe-dense-between", "not scaled", m.experts(scale=1.0)),
    ("mimo_v2_flash", "values are not scaled", m.attention(value_scale=1.0)),
    ("mimo_v2_flash", "none", m.windows(lambda w: None)),
    ("nemotron_h-experts", "not scaled", m.experts(scale=1.0)),
    ("nemotron_h-latent-experts", "SiLU", m.experts(activation="silu")),
    ("solar_open", "softmax", m.experts(scoring="softmax")),
    ("hy_v3", "not scaled", m.experts(scale=1.0)),
    ("afmoe-dense-layers", "not scaled", m.experts(scale=1.0)),
    ("mixtral", "not normalized", m.experts(normalize=False)),
    ("mixtral", "one more", m.experts(top_k=3)),
    ("qwen3_moe", "not normalized", m.experts(normalize=False)),
    ("qwen3_moe-dense-layers-between", "normalized", m.experts(normalize=True)),
    ("qwen2_moe", "normalized", m.experts(normalize=True)),
    ("gpt_oss", "not normalized", m.experts(normalize=False)),
    ("gpt_oss", "limit of SwiGLU", m.experts(swiglu=(1.702, 7.0))),
    ("gpt_oss-global-first", "alpha of SwiGLU", m.experts(swiglu=(1.702, 7.0))),
    ("deepseek_v2", "no groups", m.experts(groups=1)),
    ("deepseek_v2", "one group more", m.experts(topk_groups=3)),
    ("deepseek_v2", "groups by their two best", m.experts(group_score="two_best")),
    ("deepseek_v2", "normalized", m.experts(normalize=True)),
    ("deepseek_v2", "not scaled", m.experts(scale=1.0)),
    ("deepseek_v3", "no groups", m.experts(groups=1)),
    ("deepseek_v3", "groups by their best", m.experts(group_score="best")),
    ("deepseek_v3", "softmax", m.experts(scoring="softmax")),
    ("deepseek_v3", "not normalized", m.experts(normalize=False)),
    ("deepseek_v3", "not scaled", m.experts(scale=1.0)),
    ("deepseek_v3-without-groups", "normalized", m.experts(normalize=True)),
    ("glm4_moe", "not normalized", m.experts(normalize=False)),
    ("glm4_moe-query-key-norms", "not scaled", m.experts(scale=1.0)),
]
_ANOTHER_BASE = m.rotary(theta=lambda theta: theta * 1.1)
SPEC_MUTATIONS += [  # of families that transformers lacks
    *((name, "theta", _ANOTHER_BASE) for name in ("internlm3", "iquestcoder", "telechat3", "telechat", "rnj1")),
    *((name, "theta", _ANOTHER_BASE) for name in ("pangu_embedded", "nemotron-nas", "mistral_large3")),
    ("orion", "larger eps", m.norm(eps=0.1)),
    ("teleflm", "embedding scale", m.decoder(embedding_scale=None)),
    ("deepseek", "normalized", m.experts(normalize=True)),
    ("bailing_moe", "not normalized", m.experts(normalize=False)),
    ("bailing_moe_v2", "no groups", m.experts(groups=1)),
    ("bailing_moe_v2", "whole head rotated", m.head_rotated_whole),
    ("param2moe", "not scaled", m.experts(scale=1.0)),
    ("chatglm", "not interleaved", m.attention(interleaved_rotary=False)),
    ("chatglm", "whole head rotated", m.head_rotated_whole),
    ("solar", "no skips", m.decoder(skips=lambda skips: ())),
    ("solar", "another weight", m.decoder(skips=lambda skips: tuple(replace(s, weight=0.7) for s in skips))),
    ("plamo3", "one offset", m.decoder(norms=lambda norms: {})),
    ("plamo3", "one more", m.windows(lambda window: window + 1)),
    ("domyn_edge", "one less", m.windows(lambda window: window - 1)),
    ("domyn_edge", "all layers rotated", m.rotated_alike),
    ("pangu_ultra_moe", "not scaled", m.experts(scale=1.0)),
    ("mimo_v2", "values are not scaled", m.attention(value_scale=1.0)),
    ("step3_text", "not normalized", m.experts(normalize=False)),
    ("bailing_hybrid", "not scaled", m.experts(scale=1.0)),
]
TOKENS_KEPT: list[tuple[str, str, m.SpecMutation]] = [  # these show in probabilities, and in a token seldom or never
    ("cohere", "logit scale", m.decoder(logit_scale=None)),
    ("teleflm", "logit scale", m.decoder(logit_scale=None)),
    ("granite", "logit scale", m.decoder(logit_scale=None)),
    ("minicpm", "logit scale", m.decoder(logit_scale=None)),
    ("minicpm3", "logit scale", m.decoder(logit_scale=None)),
    ("gemma2", "no cap of logits", m.decoder(logit_soft_cap=None)),
    ("gemma2", "exact GELU", m.mlp(activation="gelu")),
    ("gpt2", "exact GELU", m.mlp(activation="gelu")),
    ("phi", "exact GELU", m.mlp(activation="gelu")),
    ("gpt_neox", "GELU by tanh", m.mlp(activation="gelu_tanh")),
    ("falcon", "GELU by tanh", m.mlp(activation="gelu_tanh")),
]
MODEL_MUTATIONS: list[tuple[str, str, m.ModelMutation]] = [
    ("bitnet", "no norm before the output", m.without("mixer.sub_norm")),
    ("bitnet", "no norm before the down projection", m.without("mlp.sub_norm")),
    # biases
    ("qwen2", "of q, k, v", m.zeroed(lambda layer: layer.mixer.qkv.bias)),
    ("qwen2", "of v", m.no_value_bias),
    ("llama-biases-linear-old", "of q, k, v", m.zeroed(lambda layer: layer.mixer.qkv.bias)),
    ("llama-biases-linear-old", "of o", m.zeroed(lambda layer: layer.mixer.out.bias)),
    ("qwen3-mixed-windows-biases", "of o", m.zeroed(lambda layer: layer.mixer.out.bias)),
    ("llama-biases-linear-old", "of up", m.zeroed(lambda layer: layer.mlp.up.bias)),
    ("llama-biases-linear-old", "of down", m.zeroed(lambda layer: layer.mlp.down.bias)),
    ("gpt2", "of up", m.zeroed(lambda layer: layer.mlp.up.bias)),
    ("stablelm", "of q, k, v", m.zeroed(lambda layer: layer.mixer.qkv.bias)),
    ("glm", "of q, k, v", m.zeroed(lambda layer: layer.mixer.qkv.bias)),
    ("glm4_moe", "of q, k, v", m.zeroed(lambda layer: layer.mixer.qkv.bias)),
    ("glm4_moe", "of the choice", m.in_experts(lambda moe: moe.correction_bias.zero_())),
    ("ernie4_5_moe", "of the choice", m.in_experts(lambda moe: moe.correction_bias.zero_())),
    ("seed_oss", "of q, k, v", m.zeroed(lambda layer: layer.mixer.qkv.bias)),
    ("mimo", "of q, k, v", m.zeroed(lambda layer: layer.mixer.qkv.bias)),
    ("stablelm", "of norms", m.zeroed(lambda layer: layer.mlp_norm.bias)),
    ("opt", "of norms", m.zeroed(lambda layer: layer.attention_norm.bias)),
    ("phi", "of the head", m.of_model(lambda model: model.lm_head.bias.zero_())),
    ("gpt_oss", "of the router", m.zeroed(lambda layer: layer.mlp.router.bias)),
    ("gpt_oss", "of the experts' down", m.zeroed(lambda layer: layer.mlp.down.bias)),
    ("deepseek_v3", "of the choice", m.in_experts(lambda moe: moe.correction_bias.zero_())),
    ("deepseek_v3-without-groups", "of kv_a", m.zeroed(lambda layer: layer.mixer.kv_a.bias)),
    # norms
    ("qwen3", "no q and k norms", m.no_qk_norm),
    ("apertus", "no q and k norms", m.no_qk_norm),
    ("gemma3", "no q and k norms", m.no_qk_norm),
    ("glm4_moe-query-key-norms", "no q and k norms", m.no_qk_norm),
    ("phi-query-key-norms", "no q and k norms", m.no_qk_norm),
    ("persimmon", "no q and k norms", m.no_qk_norm),
    ("stablelm-parallel-query-key-norms", "no q and k norms", m.no_qk_norm),
    ("qwen3", "q and k norms after rotation", m.qk_norm_after_rotary),
    ("olmo2", "q and k norms of each head", m.qk_norm_of_each_head),
    ("cohere-query-key-norms", "q and k norms keep the mean", m.qk_norm_of_each_head),
    ("cohere-query-key-norms", "one weight for all heads", m.qk_norm_weight_of_first_head),
    ("stablelm-parallel-query-key-norms", "one weight for all heads", m.qk_norm_weight_of_first_head),
    ("gemma2", "none after attention", m.without_norm("attention_post_norm")),
    ("glm4", "none after the MLP", m.without_norm("mlp_post_norm")),
    ("olmo3", "none after the MLP", m.without_norm("mlp_post_norm")),
    ("deepseek_v2", "none of compressed queries", m.without_norm("mixer.q_a_norm")),
    ("mistral-no-window", "final norm's weight", m.of_model(lambda model: model.final_norm.weight.fill_(1))),
    # attention
    ("llama-6-heads-over-2", "scale", m.another_scale),
    ("llama-6-heads-over-2", "heads in another order", m.heads_in_another_order),
    ("gpt_oss", "no sinks", m.without("mixer.sinks")),
    ("gemma4", "streams are not scaled", m.of_model(lambda model: [x.factors.fill_(1) for x in model.layers])),
    ("gemma4", "tables are not scaled", m.of_model(lambda model: model.per_layer.scale.fill_(1))),
    ("gemma4", "layers read the next layer's vectors", m.next_vectors),
    (
        "gemma4-experts",
        "norms of branches",
        m.of_model(lambda model: [x.experts.experts_norm.weight.fill_(1) for x in model.layers]),
    ),
    ("gemma3n", "no low-rank branch", m.of_model(lambda model: [x.laurel.norm.weight.zero_() for x in model.layers])),
    ("gemma3n", "corrections are not scaled", m.of_model(lambda model: [x.altup.scale.fill_(1) for x in model.layers])),
    ("granite_swa", "no sinks", m.without("mixer.sinks")),
    ("granitemoe_swa", "no sinks", m.without("mixer.sinks")),
    ("afmoe", "without gates", m.open_gates),
    ("step3p5", "without gates", m.open_gates),
    ("hrm_text", "without gates", m.open_gates),
    ("muse_glimmer_text", "without gates", m.open_gates),
    ("hy_v4", "no sinks", m.without("mixer.sinks")),
    ("dots3_note_text", "without gates", m.without("mixer.gate")),
    # experts
    ("qwen2_moe", "no gate of the shared expert", m.in_experts(lambda moe: setattr(moe, "shared_gate", None))),
    ("qwen2_moe", "no shared expert", m.in_experts(lambda moe: setattr(moe, "shared", None))),
    ("granitemoeshared", "no shared expert", m.in_experts(lambda moe: setattr(moe, "shared", None))),
    ("hy_v3", "of the choice", m.in_experts(lambda moe: moe.correction_bias.zero_())),
    ("solar_open", "of the choice", m.in_experts(lambda moe: moe.correction_bias.zero_())),
    ("deepseek_v2", "no shared expert", m.in_experts(lambda moe: setattr(moe, "shared", None))),
    # states
    ("mamba", "states live longer", m.in_states(lambda mixer: mixer.rate.mul_(0.7))),
    ("mamba", "no skip", m.in_states(lambda mixer: mixer.skip.zero_())),
    ("falcon_mamba", "no bias of time steps", m.in_states(lambda mixer: mixer.dt_bias.zero_())),
    ("falcon_mamba", "no norms inside", m.in_states(m.no_norms_inside)),
    ("jamba", "one decay for each channel", m.in_states(lambda mixer: mixer.rate.copy_(mixer.rate.mean(0)))),
    ("jamba", "no norms inside", m.in_states(m.no_norms_inside)),
    ("mamba2", "states live longer", m.in_states(lambda mixer: mixer.rate.sub_(0.3))),
    ("mamba2", "no skip", m.in_states(lambda mixer: mixer.skip.zero_())),
    ("mamba2", "no bias of the convolution", m.in_states(lambda mixer: mixer.conv_bias.zero_())),
    ("mamba2", "oldest input forgotten", m.in_states(lambda mixer: mixer.conv[0].zero_())),
    ("bamba", "no bias of time steps", m.in_states(lambda mixer: mixer.dt_bias.zero_())),
    ("granitemoehybrid", "norm's weight", m.in_states(lambda mixer: mixer.norm_weight.fill_(1))),
    ("nemotron_h", "states live longer", m.in_states(lambda mixer: mixer.rate.sub_(0.3))),
    ("zamba2", "no skip", m.in_states(lambda mixer: mixer.skip.zero_())),
    ("falcon_h1", "no multipliers", m.in_states(lambda mixer: mixer.factors.fill_(1))),
    ("qwen3_next", "states live longer", m.in_states(lambda mixer: mixer.rate.sub_(0.3))),
    ("qwen3_next", "norm's weight", m.in_states(lambda mixer: mixer.gate_weight.fill_(1))),
    ("qwen3_next", "attention without gates", m.open_gates),
    ("qwen3_5_text", "no bias of time steps", m.in_states(lambda mixer: mixer.dt_bias.zero_())),
    ("qwen3_5_moe_text", "oldest input forgotten", m.in_states(lambda mixer: mixer.conv[0].zero_())),
    ("kimi_linear", "one decay for each head", m.in_states(m.one_decay)),
    ("olmo_hybrid", "norm's weight", m.in_states(lambda mixer: mixer.gate_weight.fill_(1))),
    ("olmo_hybrid", "states keep their sign", m.in_states(m.smaller_steps)),
    ("lfm2", "oldest input forgotten", m.in_states(lambda mixer: mixer.conv[0].zero_())),
    ("lfm2-biases", "no bias of the convolution", m.in_states(lambda mixer: mixer.conv_bias.zero_())),
    ("lfm3", "without gates", m.open_gates),
    ("lfm2_moe", "of the choice", m.in_experts(lambda moe: moe.correction_bias.zero_())),
    ("rwkv7", "no norm's bias", m.in_states(lambda mixer: mixer.norm_bias.zero_())),
    ("rwkv7", "no bonus", m.in_states(lambda mixer: mixer.bonus.zero_())),
    ("rwkv7", "MLP forgets the token before", m.in_states(lambda mixer: mixer.mlp_mix.zero_())),
    ("rwkv7", "keys without their rate", m.in_states(lambda mixer: mixer.rate_scale.zero_())),
    ("rwkv7", "removal by the key itself", m.in_states(lambda mixer: mixer.removal_scale.fill_(1))),
    ("rwkv7", "each layer its own values", m.in_states(lambda mixer: setattr(mixer, "first_part", None))),
    (
        "bailing_hybrid",
        "decays without a bound",
        m.in_states(lambda mixer: setattr(mixer, "spec", replace(mixer.spec, decay_bound=None))),
    ),
    # ends
    ("llama", "tied", m.tied),
    ("qwen2", "untied", m.untied),
    ("gemma", "untied", m.untied),
    ("opt", "positions' offset", m.of_model(lambda model: setattr(model.positions, "offset", 1))),
    ("gpt2", "positions' offset", m.of_model(lambda model: setattr(model.positions, "offset", 1))),
]

Case = tuple[str, str, Any]


def each(cases: list[Case]) -> Any:
    return pytest.mark.parametrize(("variant", "mutate"), [pytest.param(v, f, id=f"{v}: {w}") for v, w, f in cases])


def wrongness(references: Any, variant: str, llm: Any) -> float:
    """How far the logits are from transformers', in multiples of what the parity test allows."""
    continuation = references.continuations(variant)[len(LENGTHS) - 1]
    text = continuation.prompt + continuation.token_ids
    expected = logits(references.model(variant), text)
    return float((teacher_forced_logits(llm, text) - expected).abs().max() / expected.std() / bound(variant))


def goes_another_way(llm: Any, continuation: Any) -> bool:
    """Whether some greedy token is not that of transformers. With the tokens before it given, one run shows it."""
    start = len(continuation.prompt)
    made = teacher_forced_logits(llm, continuation.prompt + continuation.token_ids)[start - 1 : -1].argmax(-1).tolist()
    return made[: continuation.certain] != continuation.token_ids[: continuation.certain]


def some_token_differs(references: Any, variant: str, llm: Any) -> bool:
    return any(goes_another_way(llm, continuation) for continuation in references.continuations(variant))


@pytest.fixture
def mutated(checkpoints, monkeypatch):
    """A function of (variant, mutation): an engine whose spec is wrong."""

    def make(variant: str, mutate: m.SpecMutation) -> Any:
        spec_of = description.spec_of
        spec = spec_of(description.hf_config(checkpoints.path(variant), {}))
        assert mutate(spec) != spec
        monkeypatch.setattr(description, "spec_of", lambda config: mutate(spec_of(config)))
        return make_llm(checkpoints.path(variant))

    return make


@pytest.mark.sampled(4)
@pytest.mark.slow
@each(SPEC_MUTATIONS)
def test_a_wrong_spec_is_found_out(mutated, references, variant, mutate):
    llm = mutated(variant, mutate)
    assert wrongness(references, variant, llm) > 20
    assert some_token_differs(references, variant, llm)


@pytest.mark.sampled(3)
@each(TOKENS_KEPT)
def test_a_wrong_spec_that_changes_hardly_a_token_is_found_out(mutated, references, variant, mutate):
    assert wrongness(references, variant, mutated(variant, mutate)) > 20


@pytest.mark.sampled(3)
@pytest.mark.slow
@each(MODEL_MUTATIONS)
def test_a_wrong_layer_is_found_out(checkpoints, references, variant, mutate):
    llm = make_llm(checkpoints.path(variant), "reference")  # whose weights are plain matrices
    assert wrongness(references, variant, llm) < 1
    mutate(runner_of(llm).model)
    assert wrongness(references, variant, llm) > 20
    assert some_token_differs(references, variant, llm)


def test_only_relative_positions_count(checkpoints, references):
    llm = make_llm(checkpoints.path("llama"))
    m.positions_from_one(runner_of(llm).model)
    assert wrongness(references, "llama", llm) < 10  # rounding


def test_every_family_has_mutations():
    mutated = {ALL_VARIANTS[variant][0] for variant, _, _ in [*SPEC_MUTATIONS, *MODEL_MUTATIONS]}
    assert {ALL_VARIANTS[variant][0] for variant in FIRST} == mutated
