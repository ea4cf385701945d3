"""GGUF models: `owner/name:KIND` is pulled, shown, listed, run and deleted, against a stand-in for the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from quire.checkpoints.errors import ModelNotFoundError, WeightError
from quire.checkpoints.hub import gguf_files, gguf_kinds, split_kind
from quire.cli.models import remote
from quire.cli.models.facts import facts_of
from support.checkpoints import write_checkpoint
from support.gguf_files import in_parts, write_gguf
from support.hub import COMMIT, Hub, Machine

pytestmark = pytest.mark.slow

Q8, PARTS = "demo-Q8_0.gguf", [f"F16/model-F16-{i:05}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with three kinds, one of them in three files, and one with a single kind."""
    folder = tmp_path_factory.mktemp("repositories")
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", dtype="float16")
    several, single = folder / "some/model-GGUF", folder / "one/kind"
    (several / "F16").mkdir(parents=True)
    single.mkdir(parents=True)
    write_gguf(checkpoint, several / Q8, "Q8_0")
    write_gguf(checkpoint, several / "demo-q4_0.gguf", "Q4_0")
    for part, name in zip(in_parts(several / Q8, tmp_path_factory.mktemp("parts"), 3), PARTS, strict=True):
        part.rename(several / name)
    (several / "demo-UD-Q8_0.gguf").write_text("another kind")
    (several / "mmproj-Q8_0.gguf").write_text("for images")
    (several / "config.json").write_text("{}")
    (single / "demo.Q8_0.gguf").symlink_to(several / Q8)
    return folder


@pytest.fixture
def machine(repositories, tmp_path: Path) -> Iterator[Machine]:
    with Hub(repositories) as hub:
        yield Machine(hub, tmp_path / "home")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_kind_is_described_before_it_is_downloaded_and_then_pulled_shown_listed_run_and_deleted(machine):
    name = "some/model-GGUF:q8_0"
    said = machine.says(f"pull {name} --dry-run")
    assert "1 of 1 files" in said
    assert "GGUF Q8_0" in said
    assert "LlamaForCausalLM" in said
    assert "tokens a second" in said
    for kind in ("Q8_0 (", "Q4_0 (", "F16 (", "UD-Q8_0 ("):
        assert kind in said.partition("kinds")[2]
    assert not machine.cache.exists()
    machine.hub.requests.clear()
    machine.says(f"pull {name}")
    snapshot = machine.cache / "models--some--model-GGUF" / "snapshots" / COMMIT
    assert [path.name for path in snapshot.rglob("*.gguf")] == [Q8]
    assert "is in the cache already" in machine.says(f"pull {name}")
    facts = json.loads(machine.says(f"show {name} --json"))
    assert facts["place"].startswith(str(snapshot / Q8))
    assert facts["format"] == "GGUF Q8_0"
    assert json.loads(machine.says("show some/model-GGUF --json"))["place"] == facts["place"]
    machine.says("pull some/model-GGUF:Q4_0")
    (line,) = [line for line in json.loads(machine.says("list --json")) if line["name"] == "some/model-GGUF"]
    assert line["format"] == "GGUF Q4_0, Q8_0"
    assert not line["partial"]
    offline = {"HF_HUB_OFFLINE": "1"}
    done = machine.run(f"generate a --max-tokens 3 --ignore-eos --dtype float32 --model {name}", **offline)
    assert done.returncode == 0, done.stderr
    assert "some/model-GGUF:Q4_0 is deleted" in machine.says("rm -y some/model-GGUF:q4_0")
    assert [path.name for path in snapshot.rglob("*.gguf")] == [Q8]
    assert "some/model-GGUF:Q4_0 is not in the hub's cache" in machine.fails("rm -y some/model-GGUF:Q4_0")
    assert "some/model-GGUF is deleted" in machine.says(f"rm -y {name}"), "nothing is left of it"
    assert not snapshot.exists()


def test_all_parts_of_a_split_file_are_pulled(machine):
    said = machine.says("pull some/model-GGUF:F16")
    assert "3 of 3 files" in said
    snapshot = machine.cache / "models--some--model-GGUF" / "snapshots" / COMMIT
    assert sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")) == PARTS
    assert f"It is in {snapshot / PARTS[0]}\n" in said
    (snapshot / PARTS[1]).unlink()
    (line,) = [line for line in json.loads(machine.says("list --json")) if line["name"] == "some/model-GGUF"]
    assert line["partial"]
    assert "1 of 3 files" in machine.says("pull some/model-GGUF:F16")


@pytest.mark.nightly
def test_a_single_kind_need_not_be_named(machine):
    assert "GGUF Q8_0" in machine.says("show one/kind")
    assert "kinds" not in machine.says("pull one/kind")
    assert "is in the cache already" in machine.says("pull one/kind:Q8_0")
    machine.says("rm -y one/kind")
    assert machine.run("generate a --max-tokens 3 --ignore-eos --dtype float32 --model one/kind").returncode == 0
    assert "there is no GGUF model F32" in machine.run("generate a --model one/kind:F32").stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pull some/model-GGUF", "there is no GGUF model Q4_K_M, only UD-Q8_0, F16, Q4_0, Q8_0"),
        ("show some/model-GGUF:Q6_K", "there is no GGUF model Q6_K, only"),
        ("show some/model-GGUF:7b", "'7b' in 'some/model-GGUF:7b' is no kind of GGUF model"),
    ],
)
def test_a_kind_that_is_not_there_is_one_clear_line(machine, line, message):
    error = machine.fails(line)
    assert message.partition("only")[0] in error


def test_only_the_beginning_of_a_file_is_fetched_to_describe_it(repositories, monkeypatch):
    with Hub(repositories) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            hub.address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(remote, "_HEAD_BYTES", 1000)
        folder = repositories / "some/model-GGUF"
        sizes = {name: (folder / name).stat().st_size for name in (Q8, *PARTS)}
        for kind, names in (("Q8_0", [Q8]), ("F16", PARTS)):
            model = remote.RemoteModel("some/model-GGUF", kind, COMMIT, sizes, {}, None)
            assert remote.describe(model, None) == facts_of(folder / names[0])
            sent = sum(hub.sent[f"/some/model-GGUF/resolve/{COMMIT}/{name}"] for name in names)
            assert sent < sum(sizes[name] for name in names)


def test_a_type_that_quire_does_not_have_is_told_after_the_beginning(tmp_path, monkeypatch):
    path = tmp_path / "a/b/model-Q8_K.gguf"
    path.parent.mkdir(parents=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", np.zeros((1000, 292), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with Hub(tmp_path) as hub:
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            hub.address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(remote, "_HEAD_BYTES", 100)
        model = remote.RemoteModel("a/b", None, COMMIT, {path.name: path.stat().st_size}, {}, None)
        with pytest.raises(WeightError, match=r"^model-Q8_K.gguf cannot be read as GGUF: .* is not supported"):
            remote.describe(model, None)
        assert sum(hub.sent.values()) < 2000


def test_kinds_are_recognized_by_the_names_of_files():
    names = [
        "a-b.Q4_K_M.gguf",
        "IQ4_XS.gguf",
        "x/Qwen3-0.6B-UD-Q2_K_XL-00001-of-00002.gguf",
        "a-F16-mmproj.gguf",
        "x/Qwen3-0.6B-UD-Q2_K_XL-00002-of-00002.gguf",
        "model.gguf",
        "README.md",
        "mmproj-F16.gguf",
    ]
    assert gguf_kinds(names) == {"IQ4_XS": [names[1]], "Q4_K_M": [names[0]], "UD-Q2_K_XL": [names[2], names[4]]}
    for kind in ("IQ2_XXS", "IQ1_M", "TQ2_0", "NVFP4", "MXFP4_MOE", "Q1_0"):
        assert gguf_kinds([f"a-{kind}.gguf"]) == {kind: [f"a-{kind}.gguf"]}
    assert gguf_files(names, None) == [names[0]]
    with pytest.raises(ModelNotFoundError, match="is not one file or all parts of one"):
        gguf_files(names[:3], "UD-Q2_K_XL")
    assert split_kind("a/b:q4_k_m") == ("a/b", "Q4_K_M")
    assert split_kind("a/b:latest") == split_kind("a/b") == ("a/b", None)
