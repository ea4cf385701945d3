"""Tiny encoder-decoder models of texts with random weights, and what transformers says about them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from support.checkpoints import EOS
from support.reference import Continuation
from support.seeing import TIE, tokenizer

UNK, BOS, EN, DE = 0, 1, 300, 301
NUM_TOKENS = 20
LONGEST = 120  # tokens that an encoder reads
SIZES: dict[str, Any] = {
    "vocab_size": 310, "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96,
    "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "max_position_embeddings": LONGEST,
    "init_std": 0.3, "pad_token_id": UNK, "bos_token_id": BOS, "eos_token_id": EOS,
}  # fmt: skip
T5_SIZES: dict[str, Any] = {  # d_kv is no part of d_model, and texts are longer than the farthest distance
    "vocab_size": 310, "d_model": 64, "d_kv": 24, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 12, "relative_attention_max_distance": 40, "n_positions": LONGEST,
    "pad_token_id": UNK, "eos_token_id": EOS,
}  # fmt: skip
TEXTS = (
    "A small engine read a whole book in one night.",
    "The cat sat on the mat with the hat, and the quick brown fox jumped over it. " * 2,
    "x",
    "Grüße aus Köln: naïve café, señor — 1234567890",
    "Once upon a time there was a lazy dog.",
)


@dataclass(frozen=True)
class Kind:
    """template: the special tokens around the encoder's text. generation: of generation_config.json. beginning: the
    decoder's first tokens."""

    architecture: str
    config: dict[str, Any]
    template: str
    generation: dict[str, Any]
    beginning: list[int]


KINDS = {
    "bart": Kind("Bart", SIZES, "<s> $A </s>", {"decoder_start_token_id": EOS, "forced_bos_token_id": BOS}, [EOS, BOS]),
    "mbart": Kind(
        "MBart",
        SIZES
        | {
            "scale_embedding": True,
            "activation_function": "relu",
            "encoder_attention_heads": 2,
            "encoder_layers": 3,
            "encoder_ffn_dim": 80,
        },
        "$A </s> <|en|>",
        {"decoder_start_token_id": DE},
        [DE],
    ),
    "t5": Kind("T5", T5_SIZES, "$A </s>", {"decoder_start_token_id": UNK}, [UNK]),
    "flan-t5": Kind(
        "T5",
        T5_SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 2},
        "$A </s>",
        {"decoder_start_token_id": UNK},
        [UNK],
    ),
    "mt5": Kind("MT5", T5_SIZES, "$A </s>", {"decoder_start_token_id": UNK}, [UNK]),
    "umt5": Kind("UMT5", T5_SIZES, "$A </s>", {"decoder_start_token_id": UNK}, [UNK]),
}


@cache
def written(folder: Path, kind: str) -> Path:
    """A checkpoint of a model below the folder."""
    import transformers
    from tokenizers.processors import TemplateProcessing

    transformers.utils.logging.disable_progress_bar()
    described, directory = KINDS[kind], folder / kind
    config = getattr(transformers, f"{described.architecture}Config")(**described.config)
    torch.manual_seed(4)
    model = getattr(transformers, f"{described.architecture}ForConditionalGeneration")(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(0, 0.2)
            elif "q_proj" in name or "k_proj" in name:
                tensor.mul_(2)
            elif "Attention.q" in name:
                tensor.mul_(3)
            elif "relative_attention_bias" in name:
                tensor.normal_(0, 2)
            elif "layer_norm.weight" in name:
                tensor.uniform_(0.5, 1.5)
            elif "shared" in name:
                tensor.mul_(0.3)
            elif name.endswith((".o.weight", ".wo.weight")):
                tensor.mul_(6)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(0, 0.3)
    if config.tie_word_embeddings and not described.config.get("tie_word_embeddings", True):  # which T5Config overrides
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.generation_config = transformers.GenerationConfig(**described.generation)
    model.save_pretrained(directory)
    made = tokenizer(("<|en|>", "<|de|>"))
    special = [(token, made.convert_tokens_to_ids(token)) for token in ("<s>", "</s>", "<|en|>")]
    made.backend_tokenizer.post_processor = TemplateProcessing(single=described.template, special_tokens=special)
    made.save_pretrained(directory)
    assert json.loads((directory / "config.json").read_text())["architectures"]
    return directory


@cache
def network(folder: Path, kind: str) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(
        written(folder, kind), dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.inference_mode()
def continuation(folder: Path, kind: str, token_ids: list[int], decoder: list[int]) -> Continuation:
    """What transformers says. token_ids: of the encoder."""
    return continuation_of(network(folder, kind), token_ids, decoder)


@torch.inference_mode()
def continuation_of(model: Any, token_ids: list[int], decoder: list[int]) -> Continuation:
    """What a model of transformers says."""
    tokens, certain = torch.tensor([decoder]), NUM_TOKENS
    encoded = model.get_encoder()(input_ids=torch.tensor([token_ids]))
    for count in range(NUM_TOKENS):
        scores = model(encoder_outputs=encoded, decoder_input_ids=tokens, use_cache=False).logits[:, -1]
        best = scores[0].topk(2).values
        if best[0] - best[1] < TIE:
            certain = min(certain, count)
        tokens = torch.cat([tokens, scores.argmax(-1, keepdim=True)], 1)
    return Continuation(decoder, tokens[0, len(decoder) :].tolist(), certain)
