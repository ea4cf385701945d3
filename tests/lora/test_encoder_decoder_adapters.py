"""Adapters of encoder-decoder models give the greedy tokens of transformers' model into which they are merged.

They change the encoder, the decoder, and the keys and values that the decoder makes of the encoder's results. So these
results are shared by requests with the same input only if they have the same adapter.
"""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.llm import LLM
from quire.lora import LoRARequest
from quire.messages.sampling_params import SamplingParams
from support import encoder_decoders as texts
from support import hearing as sounds
from support.adapters import OPTIONS, deltas, modules_of, write_adapter
from support.encoder_ways import WAYS, Encoded
from support.engines import make_llm
from support.server import Host

# The modules that each adapter changes: those of all layers, of the encoder, and those that make keys and values of its
# results.
PARTS = (r"\.(layers|block)\.", r"(^|\.)encoder\.(layers|block)\.", r"\.(encoder_attn|EncDecAttention)\.[kv]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("encoder-decoders")


def adapters_for(path: Path, directory: Path) -> list[Path | None]:
    """No adapter, and one for each of PARTS."""
    modules = modules_of(make_llm(path, max_model_len=100, max_num_seqs=8, **OPTIONS), embedding=False)
    parts = [{name: size for name, size in modules.items() if re.search(pattern, name)} for pattern in PARTS]
    return [None, *(write_adapter(directory / f"{i}", part, rank=4, seed=i) for i, part in enumerate(parts) if part)]


def merged(network: Any, adapter: Path | None) -> Any:
    network = copy.deepcopy(network)
    with torch.no_grad():
        for module, delta in ({} if adapter is None else deltas(adapter)).items():
            network.get_submodule(module).weight += delta
    return network


def check(params: SamplingParams, llm: LLM, expected: list[Any]) -> None:
    """expected: prompts, adapters, and what transformers says."""
    requests = [None if path is None else LoRARequest(path.name, 1, str(path)) for _, path, _ in expected]
    prompts = [prompt for prompt, _, _ in expected]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
    for (_, _, wanted), output in zip(expected, outputs, strict=True):
        wanted.check(output.outputs[0].token_ids)
    said = [wanted.token_ids for _, _, wanted in expected]
    assert len({tuple(tokens) for tokens in said}) > len(said) / 4, "the adapters change nothing"


def way_of(path: Path, params: SamplingParams, expected: list[Any], longest: int, few_blocks: int) -> Encoded:
    def make(backend: str = "cpu", **options: Any) -> LLM:
        return make_llm(path, backend, **{"max_model_len": 100, "max_num_seqs": 8, **OPTIONS, **options})

    return Encoded(make, partial(check, params), expected, longest, few_blocks)


@pytest.fixture(scope="module")
def of_texts(folder) -> Any:
    """By kind: the expected output of each text with each adapter."""
    from transformers import AutoTokenizer

    made: dict[str, list[Any]] = {}

    def make(kind: str) -> list[Any]:
        path = texts.written(folder, kind)
        tokenizer = AutoTokenizer.from_pretrained(path)
        found = []
        for adapter in adapters_for(path, folder / f"{kind} adapters"):
            network = merged(texts.network(folder, kind), adapter)
            for text in texts.TEXTS[:3]:
                wanted = texts.continuation_of(network, tokenizer(text)["input_ids"], texts.KINDS[kind].beginning)
                found.append((text, adapter, wanted))
        return found

    return lambda kind: made.get(kind) or made.setdefault(kind, make(kind))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", ["bart", "t5"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_of_texts(folder, of_texts, kind, way):
    params = SamplingParams(temperature=0, max_tokens=texts.NUM_TOKENS, ignore_eos=True)
    way(way_of(texts.written(folder, kind), params, of_texts(kind), texts.LONGEST, few_blocks=24))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_of_sounds(folder, way):
    path = sounds.written(folder)
    params = SamplingParams(temperature=0, max_tokens=sounds.NUM_TOKENS, ignore_eos=True)
    beginning = [sounds.SOT, sounds.EN, sounds.TRANSCRIBE, sounds.NO_TIMES]
    expected = []
    for adapter in adapters_for(path, folder / "whisper adapters"):
        network = merged(sounds.network(folder), adapter)
        for number in (1, 2):
            samples = sounds.sound(number)
            prompt = {"prompt_token_ids": beginning, "multi_modal_data": {"audio": (samples, sounds.RATE)}}
            expected.append((prompt, adapter, sounds.continuation_of(network, samples, beginning)))
    way(way_of(path, params, expected, sounds.POSITIONS, few_blocks=18))


def test_a_server_loads_an_adapter_of_a_model_that_needs_sounds(folder, tmp_path):
    path = sounds.written(folder)
    *_, adapter = adapters_for(path, tmp_path)
    host = Host(model=str(path), dtype="float32", max_model_len=100, max_num_seqs=4, **OPTIONS)
    try:
        assert host.run(host.llm.add_lora(LoRARequest("a", 1, str(adapter)))).name == "a"
        broken = write_adapter(tmp_path / "broken", {"model.encoder.layers.9.fc1": (8, 8)})
        with pytest.raises(ValueError, match=r"no linear layer for model\.encoder\.layers\.9\.fc1"):
            host.run(host.llm.add_lora(LoRARequest("b", 2, str(broken))))
    finally:
        host.close()
