"""The checks of the reasons of vLLM's options that run an engine, by claim. Those about servers are in another file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import quire.demo
from quire.attention.states import StateBackend
from quire.checkpoints.formats.config import check_format
from quire.cli.main import build_parser
from quire.config.engine import ConfigError, EngineConfig, ServerConfig
from quire.config.speculative import METHODS, SpeculativeOptions
from quire.engine.lockstep import STEPS_TO_AGREE
from quire.engine.scoring import similarity
from quire.executor import ray_executor
from quire.kv.manager import KVCacheManager
from quire.layers.step_inputs import StepSize
from quire.lora.checkpoint import read_adapter
from quire.messages.outputs import CompletionOutput
from quire.messages.sampling_params import SamplingParams
from quire.models.registry import ARCHITECTURES
from quire.multimodal.content import split_content
from quire.multimodal.families.base import Frames
from quire.multimodal.pictures import MediaError
from quire.ops.reference.sampling import gumbel_noise
from quire.parallel.experts import ExpertRanks
from quire.parallel.mesh import Communicator
from quire.worker.worker import Worker
from support.adapters import write_adapter
from support.claims import Checks, Parts
from support.engines import make_llm, runner_of
from support.seeing import picture

CHECKS = Checks()
MODEL = Path(quire.demo.__file__).parent / "model"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def generate(llm, text: str = "Once upon a time", params: SamplingParams = GREEDY):
    return llm.generate([text], params, use_tqdm=False)[0].outputs[0]


# ---- models and their weights


@CHECKS.of("code of checkpoints")
def _code_of_checkpoints(parts: Parts) -> None:
    folder, mark = parts.folder / "with_code", parts.folder / "ran"
    shutil.copytree(MODEL, folder)
    (folder / "modeling.py").write_text(f"open({str(mark)!r}, 'w')\nclass Model: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "modeling.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    generate(llm_of(folder, trust_remote_code=True))
    assert not mark.exists()


def llm_of(path, backend="cpu", **options):
    return make_llm(path, backend, **{"max_model_len": 128, "max_num_seqs": 4, **options})


@CHECKS.of("no models with such layers")
def _no_models_with_such_layers(parts: Parts) -> None:
    assert not [name for name in ARCHITECTURES if "qwen4exp" in name.lower() or "engram" in name.lower()]


@CHECKS.of("token by token")
def _token_by_token(parts: Parts) -> None:
    scheduler = parts.llm.core.scheduler
    before = scheduler._num_steps
    generate(parts.llm)
    assert scheduler._num_steps - before == GREEDY.max_tokens
    assert not [name for name in ARCHITECTURES if "diffusion" in name.lower() or "llada" in name.lower()]


@CHECKS.of("config.json")
def _config_json(parts: Parts) -> None:
    folder = parts.folder / "of_mistral"
    folder.mkdir()
    (folder / "params.json").write_text("{}")
    with pytest.raises((ValueError, OSError), match=r"config\.json"):
        llm_of(folder)


@CHECKS.of("weights stay on the device")
def _weights_stay_on_the_device(parts: Parts) -> None:
    runner = runner_of(parts.llm)
    devices = {layer.mixer.qkv.weight.dense().device for layer in runner.model.layers}
    assert devices == {runner.staging.device.torch_device}


@CHECKS.of("workers", "layers are whole")
def _workers(parts: Parts) -> None:
    assert type(parts.llm.core.executor._worker) is Worker
    assert all(layer.mixer and layer.mlp for layer in runner_of(parts.llm).model.layers)


@CHECKS.of("quantization")
def _quantization(parts: Parts) -> None:
    for kind in ("gptq", "awq", "fbgemm_fp8"):
        check_format(kind, {"quantization_config": {"quant_method": kind}}, False)


# ---- steps


@CHECKS.of("layers of prompts")
def _layers_of_prompts(parts: Parts) -> None:
    llm = llm_of(MODEL, enforce_eager=True)
    layers, rows = runner_of(llm).model.layers, []
    for layer in layers:
        layer.mlp = _Counting(layer.mlp, rows)
    prompt = list(range(5, 25))
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert rows == [len(prompt)] * (len(layers) - 1) + [1]


class _Counting:
    """A layer that notes how many tokens it computes."""

    def __init__(self, inner, rows):
        self._inner, self._rows = inner, rows

    def __call__(self, x, *rest):
        self._rows.append(len(x))
        return self._inner(x, *rest)

    def __getattr__(self, name):
        return getattr(self._inner, name)


@CHECKS.of("noise")
def _noise(parts: Parts) -> None:
    seeds, positions = torch.tensor([1, 1, 2]), torch.tensor([0, 0, 0])
    noise = gumbel_noise(seeds, positions, 16)
    assert noise.dtype is torch.float32
    assert torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])


@CHECKS.of("kernels")
def _kernels(parts: Parts) -> None:
    chosen = runner_of(parts.llm).model.kernels.chosen
    pinned = runner_of(llm_of(MODEL, attention_backend="cpu", kernels={"rms_norm": "reference"})).model.kernels
    assert "reference" in pinned.chosen["rms_norm"]
    assert chosen["rms_norm"] != pinned.chosen["rms_norm"]
    assert not [op for op in chosen if "layer" in op and "norm" not in op]


@CHECKS.of("attention backends")
def _attention_backends(parts: Parts) -> None:
    for name in ("cpu", "reference"):
        llm = llm_of(MODEL, name)
        assert {backend.name for backend in runner_of(llm).forward.backends} == {name}


@CHECKS.of("graphs")
def _graphs(parts: Parts) -> None:
    assert StepSize._fields == ("tokens", "requests", "tokens_per_request", "adapted"), "no length of a text"


@CHECKS.of("levels of optimization")
def _levels(parts: Parts) -> None:
    assert EngineConfig.create(optimization_level=3, performance_mode="throughput") == EngineConfig.create()
    assert EngineConfig.create(optimization_level=0).model.enforce_eager


@CHECKS.of("outputs beside tokens")
def _outputs(parts: Parts) -> None:
    fields = set(
        CompletionOutput.__struct_fields__
        if hasattr(CompletionOutput, "__struct_fields__")
        else CompletionOutput.__dataclass_fields__
    )
    assert not {name for name in fields if "expert" in name or "mask" in name or "trace" in name}


@CHECKS.of("logprobs of drafts")
def _logprobs_of_drafts(parts: Parts) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    llm = llm_of(MODEL, speculative_config=drafts)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    made = generate(llm, "a b c a b c a b c a b c", params)
    assert len(made.logprobs) == len(made.token_ids) == 24
    assert all(list(of_token) == [token] for of_token, token in zip(made.logprobs, made.token_ids, strict=True))


# ---- the cache


@CHECKS.of("one KV cache manager")
def _one_manager(parts: Parts) -> None:
    assert type(parts.llm.core.scheduler.kv) is KVCacheManager


@CHECKS.of("type of the KV cache", "one-byte KV cache")
def _type_of_the_cache(parts: Parts) -> None:
    llm = llm_of(MODEL, kv_cache_dtype="fp8_per_token_head", dtype="bfloat16")
    [backend] = set(runner_of(llm).forward.backends)
    head_size, block_size = 64, 16
    assert backend.cache_dtype.itemsize == 1
    assert backend.block_shape[-1] == block_size * (head_size + 4), "each token of each head has a scale of four bytes"
    assert len(generate(llm).token_ids) == GREEDY.max_tokens


@CHECKS.of("tiers")
def _tiers(parts: Parts) -> None:
    llm = llm_of(MODEL, kv_offloading_size=0.01, kv_offloading_backend="native", num_gpu_blocks_override=12)
    assert llm.core.scheduler.transfers is not None
    assert parts.llm.core.scheduler.transfers is None
    with pytest.raises(ConfigError, match='supported: "native"'):
        EngineConfig.create(kv_offloading_size=1, kv_offloading_backend="lmcache")


@CHECKS.of("preemption")
def _preemption(parts: Parts) -> None:
    llm = llm_of(MODEL, num_gpu_blocks_override=12, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    together = [output.outputs[0].token_ids for output in llm.generate(["The", "A", "Once"], params, use_tqdm=False)]
    stats = llm.core.scheduler.stats
    assert stats.preemptions > 0
    assert stats.computed_tokens > sum(map(len, together)), "some tokens were computed again"
    assert together[0] == generate(llm, "The", params).token_ids


@CHECKS.of("recurrent states")
def _recurrent_states(parts: Parts) -> None:
    assert StateBackend.cache_dtype is torch.float32


@CHECKS.of("sleep")
def _sleep(parts: Parts) -> None:
    llm = llm_of(MODEL)
    before = generate(llm).token_ids
    for level in (1, 2):
        llm.sleep(level)
        with pytest.raises(Exception, match="sleep"):
            generate(llm)
        llm.wake_up()
        assert generate(llm).token_ids == before


# ---- ranks and replicas


@CHECKS.of("server per replica")
def _server_per_replica(parts: Parts) -> None:
    assert EngineConfig.create(data_parallel_size=2, data_parallel_rank=1).layout.served == range(1, 2)


@CHECKS.of("executor")
def _executor(parts: Parts) -> None:
    assert EngineConfig.create(distributed_executor_backend="ray").cluster.uses_ray


@CHECKS.of("shared experts")
def _shared_experts(parts: Parts) -> None:
    assert STEPS_TO_AGREE == 32


@CHECKS.of("expert placement")
def _expert_placement(parts: Parts) -> None:
    assert ExpertRanks(Communicator(0, 2), replicated=True).first_slots(6) == [0, 1, 2, 3, 4, 5]
    assert ExpertRanks(Communicator(0, 2), replicated=True, redundant=2).first_slots(6) == [0, 1, 2, 3, 4, 5, 0, 1]


@CHECKS.of("ranks of Ray")
def _ranks_of_ray(parts: Parts) -> None:
    assert "nsight" not in Path(ray_executor.__file__).read_text().lower()


@CHECKS.of("placement of processes")
def _placement(parts: Parts) -> None:
    allowed = os.sched_getaffinity(0)
    generate(parts.llm)
    assert os.sched_getaffinity(0) == allowed


# ---- adapters


@CHECKS.of("adapters")
def _adapters(parts: Parts) -> None:
    llm = llm_of(MODEL, enable_lora=True, lora_dtype="float16", fully_sharded_loras=True)
    assert {product.dtype for product in runner_of(llm).model.adapters.products} == {torch.float32}
    modules = {"model.layers.0.self_attn.q_proj": (4, 4)}
    for name, fields in (("bias", {"bias": "lora_only"}), ("saved", {"modules_to_save": ["score"]})):
        with pytest.raises(ValueError, match=r"bias|modules_to_save"):
            read_adapter(write_adapter(parts.folder / name, modules, **fields))


@CHECKS.of("no prompt adapters")
def _no_prompt_adapters(parts: Parts) -> None:
    folder = write_adapter(
        parts.folder / "prompt", {"model.layers.0.self_attn.q_proj": (4, 4)}, peft_type="PROMPT_TUNING"
    )
    with pytest.raises(ValueError, match="of type PROMPT_TUNING; only LORA is supported"):
        read_adapter(folder)


@CHECKS.of("adapters are named")
def _adapters_are_named(parts: Parts) -> None:
    assert parts.llm.frontend.adapter(None) is None


# ---- media


def chat_of(parts: Parts):
    content = [{"type": "image_pil", "image_pil": picture(1)}, {"type": "text", "text": "What do you see?"}]
    frontend = parts.seeing.frontend
    messages, media = parts.seeing.processor.media.split([{"role": "user", "content": content}])
    prompt = str(frontend.rendering(messages).here())
    data = {"prompt": prompt, "multi_modal_data": {"image": [picture(1)]}}
    return messages, media, parts.seeing.processor.process("a", data, GREEDY).core_requests[0]


@CHECKS.of("media in messages", "preprocessing", "keys of media")
def _media_in_messages(parts: Parts) -> None:
    _, _, request = chat_of(parts)
    [item] = request.media
    assert all(isinstance(buffer.data, bytes) for buffer in item.tensors.values())
    assert len(item.place.key) == 64, "the hexadecimal digits of SHA-256"
    prepared = parts.seeing.processor.media.family(None).image(picture(2))
    assert all(isinstance(tensor, np.ndarray) for tensor in prepared.tensors.values())


@CHECKS.of("media are encoded here")
def _media_are_encoded_here(parts: Parts) -> None:
    with pytest.raises(MediaError, match="an image must be"):
        parts.seeing.processor.media.expand("<image>", {"image": torch.zeros(4, 64)})


@CHECKS.of("places of media")
def _places_of_media(parts: Parts) -> None:
    parts_of = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": "data:,"},
        {"type": "text", "text": "b"},
    ]
    [message], media = split_content([{"role": "user", "content": parts_of}], {"image": "<image>"})
    assert [part.get("text", part.get("placeholder")) for part in message["content"]] == ["a", "<image>", "b"]
    assert len(media) == 1


@CHECKS.of("whole videos")
def _whole_videos(parts: Parts) -> None:
    family = parts.seeing.processor.media.family(None)
    video = family.video(Frames([picture(i, 64, 64) for i in range(4)], 2.0))
    time, height, width = video.grid
    assert video.num_embeds == time * height * width


@CHECKS.of("settings of requests")
def _settings_of_requests(parts: Parts) -> None:
    media = parts.seeing.processor.media
    assert media.family({"max_pixels": 1024})
    for given in ({"max_pixels": 10**9}, {"image_mean": [0, 0, 0]}):
        with pytest.raises(MediaError, match="mm_processor_kwargs"):
            media.family(given)


@CHECKS.of("encoders")
def _encoders(parts: Parts) -> None:
    tower = runner_of(parts.seeing).media.tower
    assert tower is not None
    assert {value.dtype for value in vars(tower).values() if isinstance(value, torch.Tensor)} <= {torch.float32}


@CHECKS.of("late interaction")
def _late_interaction(parts: Parts) -> None:
    assert similarity(np.eye(2, dtype=np.float32), np.eye(2, dtype=np.float32)) == 2.0


# ---- drafts


@CHECKS.of("adaptive drafts", "ranks of drafters")
def _adaptive(parts: Parts) -> None:
    options = SpeculativeOptions.read({"method": "ngram", "num_speculative_tokens": 3})
    assert options.adaptive
    assert hasattr(options, "draft_tensor_parallel_size")


@CHECKS.of("methods of drafters")
def _methods(parts: Parts) -> None:
    assert not {"dspark", "xpress"} & set(METHODS)
    with pytest.raises(ConfigError, match="method must be one of"):
        EngineConfig.create(speculative_config={"method": "dspark", "num_speculative_tokens": 2})


# ---- options


@CHECKS.of("halves of steps")
def _halves(parts: Parts) -> None:
    assert EngineConfig.create(data_parallel_size=2, enable_expert_parallel=True, enable_dbo=True).parallel.enable_dbo


@CHECKS.of("runner")
def _runner(parts: Parts) -> None:
    config = EngineConfig.create(task="embed")
    assert (config.model.runner, config.model.convert) == ("pooling", "embed")


@CHECKS.of("parsers", "plugins")
def _import_paths(parts: Parts) -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        llm_of(MODEL, reasoning_parser="no.such.FORMAT")
    with pytest.raises(ConfigError, match="cannot be imported"):
        llm_of(MODEL, logits_processors=["no.such:Class"])
    assert ServerConfig.create(middleware=["a.b"]).middleware == ["a.b"]


@CHECKS.of("logging")
def _logging(parts: Parts) -> None:
    given = build_parser().parse_args(["serve", "--log-level", "DEBUG", "--log-format", "json"])
    assert given.log_level == "DEBUG"


@CHECKS.of("device")
def _device(parts: Parts) -> None:
    with pytest.raises(ConfigError, match="device='neuron' is not supported"):
        EngineConfig.create(device="neuron")


@CHECKS.of("environment")
def _environment(parts: Parts) -> None:
    plain = EngineConfig.create()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("VLLM_ATTENTION_BACKEND", "QUIRE_ATTENTION_BACKEND", "VLLM_USE_V1", "QUIRE_DTYPE"):
            patch.setenv(name, "float16")
        assert EngineConfig.create() == plain
