"""The checks of sentences of the documents that are more than options or a request, by their names in
tests/data/document_claims.toml."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import quire.demo
from quire.checkpoints.formats.config import quantization_method
from quire.cli.main import build_parser
from quire.config.engine import ConfigError, EngineConfig
from quire.worker.disk_store import prepare_folder
from quire.worker.resident_memory import ResidentMemory
from support.claims import Checks, Parts
from support.engines import make_llm
from support.server import Host

CHECKS = Checks()
MODEL = Path(quire.demo.__file__).parent / "model"


@CHECKS.of("generation configs")
def _generation_configs(parts: Parts) -> None:
    folder = parts.folder / "with_beams"
    shutil.copytree(MODEL, folder)
    given = {"num_beams": 4, "no_repeat_ngram_size": 3, "forced_eos_token_id": 2, "min_length": 9, "top_k": 7}
    (folder / "generation_config.json").write_text(json.dumps(given))
    found = make_llm(folder).processor.default_sampling_params()
    plain = type(found)(top_k=7)
    assert found == plain


@CHECKS.of("new weights of a producer")
def _new_weights_of_a_producer(parts: Parts) -> None:
    secret = parts.folder / "secret_of_a_producer"
    secret.write_text("0" * 64)
    secret.chmod(0o600)
    transfer = {"kv_role": "kv_producer", "kv_ip": "127.0.0.1", "kv_port": 14579}
    resident_memory = ResidentMemory.__new__(ResidentMemory)
    resident_memory._directory = MODEL
    resident_memory._config = EngineConfig.create(kv_transfer_config=transfer, cluster_secret_file=str(secret))
    with pytest.raises(ValueError, match="other engines would not know of it"):
        resident_memory._check_replaceable()


@CHECKS.of("batches")
def _batches(parts: Parts) -> None:
    given = build_parser().parse_args(["run-batch", "-i", "a", "-o", "b", "--port", "1", "--host", "x"])
    assert given.option_port == 1


@CHECKS.of("activations")
def _activations(parts: Parts) -> None:
    plain = {"quant_method": "fp8"}
    schemes = [
        quantization_method({"quantization_config": {**plain, **more}})("model.layers.0.q_proj")
        for more in ({}, {"activation_scheme": "dynamic"}, {"activation_scheme": "static"})
    ]
    assert schemes[0] == schemes[1] == schemes[2]


@CHECKS.of("folders of others")
def _folders_of_others(parts: Parts) -> None:
    folder = parts.folder / "of_another"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        other = os.geteuid() + 1
        patch.setattr(os, "geteuid", lambda: other)
        with pytest.raises(PermissionError, match="belongs to another user"):
            prepare_folder(folder)


@CHECKS.of("adapters on experts")
def _adapters_on_experts(parts: Parts) -> None:
    with pytest.raises((ConfigError, ValueError), match="enable_lora"):
        make_llm(parts.checkpoint("mixtral"), enable_lora=True, enable_expert_parallel=True, enable_eplb=True)


@CHECKS.of("forms of forced calls")
def _forms_of_forced_calls(parts: Parts) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": {"const": "Rome"}}}
    for choice in ("required", {"type": "function", "function": {"name": "look_up"}}):
        asked = {"messages": [{"role": "user", "content": "Hello"}], "tools": [tool], "tool_choice": choice}
        asked |= {"parallel_tool_calls": False, "temperature": 0, "max_tokens": 100}
        answer = parts.server.post("/v1/chat/completions", {**asked, "response_format": form})
        [call] = answer.json["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "look_up"


def _strict_tool(**fields: Any) -> dict[str, Any]:
    """A chat with a strict tool whose schema no grammar can enforce."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "unheard-of"}}}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": schema, "strict": True}}
    return {"messages": [{"role": "user", "content": "Hello"}], "tools": [tool], "max_tokens": 4, **fields}


@CHECKS.of("strict tools in other formats")
def _strict_tools_in_other_formats(parts: Parts) -> None:
    server = parts.host.serve(tool_call_parser="pythonic")
    assert server.post("/v1/chat/completions", _strict_tool()).status == 200
    forced = server.post("/v1/chat/completions", _strict_tool(tool_choice="required"))
    assert (forced.status, forced.error["param"]) == (400, "tools"), "its calls are enforced, as JSON"


@CHECKS.of("strict tools beside a form")
def _strict_tools_beside_a_form(parts: Parts) -> None:
    path = "/v1/chat/completions"
    assert parts.server.post(path, _strict_tool()).status == 400
    assert parts.server.post(path, _strict_tool(response_format={"type": "json_object"})).status == 200
    assert parts.server.post(path, _strict_tool(structured_outputs={"regex": "[a-z]+"})).status == 200
    host = Host(dtype="float32", kv_cache_memory_bytes=16 << 20, structured_outputs_config={"backend": "outlines"})
    try:
        assert host.serve().post(path, _strict_tool()).status == 200
    finally:
        host.close()


@CHECKS.of("WebSockets")
def _websockets(parts: Parts) -> None:
    assert not [route for route in parts.server.app.routes if "websocket" in type(route).__name__.lower()]
