"""The checks of sentences of the documents that are more than options or a request, by their names in
tests/data/document_claims.toml."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import quire.demo
from quire.config import ConfigError, EngineConfig
from quire.quantization.config import quantization_method
from quire.worker.disk_store import prepare_folder
from quire.worker.residence import Residence
from quire_cli.main import build_parser
from quire_multimodal.decoding import Encoded
from quire_multimodal.pictures import MediaError
from support.claims import Checks, Parts
from support.engines import make_llm

CHECKS = Checks()
MODEL = Path(quire.demo.__file__).parent / "model"
FORMATS = {  # beginnings of files
    "mp4": b"\x00\x00\x00\x18ftypmp42\x00\x00\x00\x00mp42isom",
    "m4a": b"\x00\x00\x00\x18ftypM4A \x00\x00\x00\x00M4A mp42",
    "webm": b"\x1a\x45\xdf\xa3\x9fB\x86\x81\x01B\xf7\x81\x01",
    "avi": b"RIFF\x24\x00\x00\x00AVI LIST",
}


@CHECKS.of("videos")
def _videos(parts: Parts) -> None:
    for name in ("mp4", "webm", "avi"):
        with pytest.raises(MediaError, match="no image in a known format"):
            Encoded("video", (FORMATS[name],)).decode()


@CHECKS.of("sounds")
def _sounds(parts: Parts) -> None:
    for name in ("mp4", "m4a", "webm"):
        with pytest.raises(MediaError):
            Encoded("audio", (FORMATS[name],), 16_000).decode()


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
    residence = Residence.__new__(Residence)
    residence._directory = MODEL
    residence._config = EngineConfig.create(kv_transfer_config=transfer, cluster_secret_file=str(secret))
    with pytest.raises(ValueError, match="other engines would not know of it"):
        residence._check_replaceable()


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


@CHECKS.of("WebSockets")
def _websockets(parts: Parts) -> None:
    assert not [route for route in parts.server.app.routes if "websocket" in type(route).__name__.lower()]
