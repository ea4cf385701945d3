"""`quire pull`, `list`, `show` and `rm`, in processes of their own, against a stand-in for the hub.

huggingface_hub reads its address when it is imported. What needs no hub runs in this process, on a cache that was
downloaded before.
"""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoints.hub import bundled_model, resolve
from quire.cli.main import main
from quire.cli.models.place import check_place
from support.checkpoints import write_checkpoint
from support.gguf_files import write_gguf
from support.hub import COMMIT, Hub, Machine, hub_environment
from support.server_process import Server
from support.terminal import terminal
from support.waiting import LONGEST, eventually

QWEN, OTHER = "Qwen/Qwen3-0.6B", "tiny/demo"
NEEDED = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
ONLY_DESCRIBE = {"config.json", "tokenizer_config.json"}
SPEED = "The speed is an estimate for one request with a short context"


@pytest.fixture(scope="session")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models on the hub, with files that are not needed; a model of an unknown architecture, one in GGUF, and an
    adapter."""
    folder = tmp_path_factory.mktemp("repositories")
    for name in (QWEN, OTHER, "gated/demo", "new/kind"):
        shutil.copytree(bundled_model(), folder / name)
        (folder / name / "consolidated.safetensors").write_text("a second copy")
        (folder / name / "modeling.py").write_text("raise SystemExit")
    config = json.loads((folder / "new/kind/config.json").read_text())
    (folder / "new/kind/config.json").write_text(json.dumps({**config, "architectures": ["BrandNewForCausalLM"]}))
    (folder / "tiny/gguf").mkdir()
    (folder / "tiny/gguf/demo-Q4_K_M.gguf").write_text("GGUF")
    shutil.copytree(bundled_model().parent / "adapters" / "rhyme", folder / "tiny/rhyme")
    return folder


@pytest.fixture
def machine(repositories, tmp_path: Path) -> Iterator[Machine]:
    with Hub(repositories, tokens=("sesame",), revisions=("main", "v2", COMMIT)) as hub:
        yield Machine(hub, tmp_path / "home")


@pytest.fixture(scope="module")
def downloaded(repositories, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with two models, which have the same commit."""
    home = tmp_path_factory.mktemp("downloaded")
    with Hub(repositories) as hub:
        for name in (QWEN, OTHER):
            Machine(hub, home).says(f"pull {name}")
    return home / "hub"


@pytest.fixture
def cache(downloaded, tmp_path: Path) -> Path:
    return Path(shutil.copytree(downloaded, tmp_path / "cache", symlinks=True))


def listed(cache: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert main(["list", "--json", "--download-dir", str(cache)]) == 0
    return {line["name"]: line for line in json.loads(capsys.readouterr().out)}


# ---- pull


def test_pull_says_what_a_model_is_and_downloads_what_an_engine_loads(machine):
    said = machine.says("pull qwen3:0.6b --dry-run")
    assert f"{QWEN} (short name qwen3:0.6b)" in said
    assert "5 of 5 files, 9.1 MB of 9.1 MB" in said
    for fact in ("Qwen3ForCausalLM", "safetensors BF16", "4.5 million", "2,048 tokens", "hermes", "apache-2.0", SPEED):
        assert fact in said
    assert machine.hub.fetched() == ONLY_DESCRIBE
    assert not machine.cache.exists()
    said = machine.says("pull qwen3:0.6b")
    assert said.endswith("To use it: quire chat qwen3:0.6b\n")
    assert machine.hub.fetched() == NEEDED
    folder = machine.cache / "models--Qwen--Qwen3-0.6B" / "snapshots" / COMMIT
    assert {path.name for path in folder.iterdir()} == NEEDED
    assert f"It is in {folder}\n" in said


def test_pull_can_print_its_progress_as_json(machine, capsys):
    lines = [json.loads(line) for line in machine.says(f"pull {OTHER} --json").splitlines()]
    assert lines[0] == {"status": "pulling manifest"}
    assert [line["status"] for line in lines[-2:]] == ["verifying sha256 digest", "success"]
    progress = {line["digest"]: line for line in lines[1:-2]}
    assert len(progress) == len(NEEDED)
    assert all(line["completed"] == line["total"] > 0 for line in progress.values())
    offline = machine.says(f"pull {OTHER} --json", HF_ENDPOINT="http://127.0.0.1:9")
    assert json.loads(offline.splitlines()[-1]) == {"status": "success"}
    assert main(["pull", OTHER, "--json", "--dry-run"]) == 1
    assert "--dry-run and --json exclude each other" in capsys.readouterr().err
    assert main(["pull", "quire-demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"status": "success"}


@pytest.mark.nightly
def test_a_second_pull_says_that_the_model_is_there_even_without_the_hub(machine):
    machine.says(f"pull {OTHER} --revision v2")
    machine.hub.requests.clear()
    said = machine.says(f"pull {OTHER} --revision v2")
    assert said == f"{OTHER} is in the cache already, with the hub's commit {COMMIT[:12]}.\n"
    assert not machine.hub.fetched()
    said = machine.says(f"pull {OTHER} --revision v2", HF_ENDPOINT="http://127.0.0.1:9")
    assert f"{OTHER} is in the cache already. Whether there is a newer commit is not known, since the hub" in said
    assert "HF_HUB_OFFLINE forbids" in machine.says(f"pull {OTHER} --revision v2", HF_HUB_OFFLINE="1")
    # A file that is missing is fetched again, and only that one.
    blob = machine.cache / "models--tiny--demo" / "snapshots" / COMMIT / "generation_config.json"
    blob.resolve().unlink()
    blob.unlink()
    assert "1 of 5 files" in machine.says(f"pull {OTHER} --revision v2 --dry-run")


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pull no/such", "the hub has no model 'no/such', or it is private and needs --hf-token"),
        ("pull gated/demo", "'gated/demo' is gated: accept its licence at http://127.0.0.1:"),
        ("show gated/demo", "give a token with --hf-token or in the environment as HF_TOKEN"),
        ("pull gated/demo --hf-token no", "the given --hf-token has no access"),
        (f"pull {OTHER} --revision v3", "model 'tiny/demo' has no revision 'v3' on the hub"),
        ("pull bad!name/x", "'bad!name/x' is no name of a model on the hub"),
        ("pull a/b/c", "neither a directory nor a Hugging Face id"),
        ("pull tiny/gguf", "demo-Q4_K_M.gguf cannot be read as GGUF: "),
        ("pull new/kind", "Quire cannot run this model: architecture BrandNewForCausalLM is not supported"),
        (f"pull {OTHER} --download-dir /dev/null", "nothing can be written to /dev/null; --download-dir takes another"),
    ],
)
def test_what_cannot_be_pulled_is_one_clear_line(machine, line, message):
    assert message in machine.fails(line)
    assert machine.hub.fetched() <= {*ONLY_DESCRIBE, "tokenizer_config.json", "demo-Q4_K_M.gguf"}


def test_no_network_is_one_clear_line(machine):
    message = machine.fails(f"pull {OTHER}", HF_ENDPOINT="http://127.0.0.1:9")
    assert "the hub (http://127.0.0.1:9) cannot be reached: " in message
    assert "HF_HUB_OFFLINE forbids to ask the hub" in machine.fails(f"show {OTHER}", HF_HUB_OFFLINE="1")


@pytest.mark.slow
def test_a_token_gives_access_to_a_gated_model(machine):
    assert "tiny" not in machine.says("pull gated/demo --dry-run --hf-token sesame")
    assert "gated/demo" in machine.says("show gated/demo", HF_TOKEN="sesame")


def test_a_disk_that_is_too_small_is_noticed_before_the_download(tmp_path: Path):
    check_place(tmp_path / "not" / "there" / "yet", 1)
    with pytest.raises(
        OSError, match=r"^1000000 TB are to be downloaded, but only .* are free in .*download_dir takes"
    ):
        check_place(tmp_path / "not" / "there" / "yet", 10**18)


def test_there_may_be_nothing_to_pull(tmp_path: Path, monkeypatch, capsys):
    assert main(["pull", "quire-demo"]) == 0
    assert "comes with Quire" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3").mkdir()
    assert main(["pull", "qwen3"]) == 1
    assert "qwen3 is a local file or folder" in capsys.readouterr().err


@pytest.mark.slow
def test_an_adapter_can_be_pulled(machine):
    said = machine.says("pull tiny/rhyme")
    assert "an adapter (LoRA) for " in said
    assert "It is used together with a model" in said
    assert "adapter_model.safetensors" in machine.hub.fetched()


@pytest.mark.slow  # it runs five commands
def test_ctrl_c_ends_a_download_and_what_is_left_is_marked_and_completed(machine, tmp_path: Path):
    environment = hub_environment(machine.hub.address, machine.home)
    machine.hub.stalls = ("model.safetensors",)
    with terminal("pull", OTHER, state=tmp_path, **environment) as session:
        session.wait_for("Fetching 5 files")  # the progress is shown on a terminal
        assert machine.hub.stalled.wait(LONGEST)
        eventually(lambda: len(list(machine.home.glob("hub/models--*/snapshots/*/*"))) == 4)  # the small files
        session.interrupt()
        assert session.end() == 130
    [_, line] = json.loads(machine.says("list --json"))
    assert (line["name"], line["partial"]) == (OTHER, True)
    assert "(partial)" in machine.says("list")
    machine.hub.stalls = ()
    assert "1 of 5 files, 9.0 MB of 9.1 MB" in machine.says(f"pull {OTHER}")
    assert not json.loads(machine.says("list --json"))[1]["partial"]


# ---- list


def test_list_shows_the_bundled_model_and_those_in_the_cache(cache, capsys):
    assert main(["ls", "--download-dir", str(cache)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "quire-demo", QWEN, OTHER]
    assert lines[2].split("  ")[1].strip() == "qwen3:0.6b"
    assert lines[2].endswith("just now")
    bundled, qwen, _ = listed(cache, capsys).values()
    assert bundled == {**qwen, "name": "quire-demo", "short_name": None, "last_used": None, "size": bundled["size"]}
    assert (qwen["parameters"], qwen["format"], qwen["partial"]) == (4492672, "safetensors BF16", False)


def test_a_model_was_used_when_its_weights_were_read(cache, capsys):
    snapshot = cache / "models--tiny--demo" / "snapshots" / COMMIT
    os.utime((snapshot / "model.safetensors").resolve(), (10**9, 10**9))  # in 2001
    for _ in range(2):  # listing reads only other files
        assert listed(cache, capsys)[OTHER]["last_used"] == "2001-09-09T01:46:40+00:00"
    assert main(["list", "--download-dir", str(cache)]) == 0
    assert " years ago" in capsys.readouterr().out


def test_what_is_damaged_or_foreign_in_the_cache_hides_no_other_model(cache, capsys):
    snapshot = cache / "models--tiny--demo" / "snapshots" / COMMIT
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").write_text("{")
    foreign = cache / "models--some--whisper" / "snapshots" / COMMIT
    foreign.mkdir(parents=True)
    (foreign / "config.json").write_text(json.dumps({"architectures": ["Whisper"], "torch_dtype": "float16"}))
    (foreign / "pytorch_model.bin").write_text("weights")
    begun = cache / "models--just--begun" / "blobs"
    begun.mkdir(parents=True)
    (begun / "abc.incomplete").write_text("half")
    gguf = cache / "models--some--gguf" / "snapshots" / COMMIT
    gguf.mkdir(parents=True)
    (gguf / "some-model-Q4_K_M.gguf").write_text("GGUF")
    (cache / "datasets--some--data" / "snapshots").mkdir(parents=True)
    (cache / "version.txt").write_text("1")
    models = listed(cache, capsys)
    assert set(models) == {"quire-demo", QWEN, OTHER, "some/whisper", "just/begun", "some/gguf"}
    assert (models["some/whisper"]["format"], models["some/whisper"]["parameters"]) == ("pytorch F16", None)
    assert (models["just/begun"]["partial"], models["just/begun"]["size"]) == (True, 4)
    assert models["some/gguf"]["format"] == "GGUF Q4_K_M"
    assert models[OTHER]["parameters"] is None


def test_shards_that_are_missing_make_a_model_partial(cache, capsys):
    snapshot = cache / "models--tiny--demo" / "snapshots" / COMMIT
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert listed(cache, capsys)[OTHER]["partial"]
    (snapshot / "model-00002-of-00002.safetensors").write_text("the rest")
    assert not listed(cache, capsys)[OTHER]["partial"]


def test_a_cache_that_is_not_there_is_empty(tmp_path: Path, capsys):
    assert list(listed(tmp_path / "nothing", capsys)) == ["quire-demo"]
    (tmp_path / "file").touch()
    assert main(["list", "--download-dir", str(tmp_path / "file")]) == 1
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_narrow_terminal_gets_two_lines_for_each_model(cache, tmp_path: Path):
    for columns, lines in ((100, 4), (50, 6)):
        with terminal("list", "--download-dir", str(cache), state=tmp_path, columns=columns) as session:
            assert session.end() == 0
        written = session.screen.splitlines()
        assert len(written) == lines
        assert max(map(len, written)) <= columns


# ---- show


@pytest.mark.slow
def test_show_describes_a_model_wherever_it_is(machine, cache, capsys):
    on_the_hub = json.loads(machine.says("show qwen3:0.6b --json"))
    assert machine.hub.fetched() == ONLY_DESCRIBE
    assert not machine.cache.exists()
    bundled = shown("quire-demo", capsys)
    cached = shown("qwen3:0.6b", capsys, "--download-dir", str(cache))
    assert cached["place"].startswith(str(cache))
    assert (on_the_hub["name"], on_the_hub["short_name"], on_the_hub["licence"]) == (QWEN, "qwen3:0.6b", "apache-2.0")
    varying = ("name", "short_name", "place", "licence", "machine", "estimates")
    same = [{key: facts[key] for key in facts if key not in varying} for facts in (bundled, on_the_hub, cached)]
    assert same[0] == same[1] == same[2]
    assert (bundled["parameters"], bundled["context_length"], bundled["vocabulary"]) == (4492672, 2048, 4096)
    assert [estimate["quantization"] for estimate in bundled["estimates"]] == [None, "int8", "int4"]
    assert all(estimate["context"] == 2048 for estimate in bundled["estimates"])


def test_show_is_read_by_people(capsys):
    assert main(["show"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("quire-demo\n  place           ")
    assert "KV cache        2,560 bytes a token, 5.2 MB for a request of the full context" in said
    assert SPEED in said


def shown(model: str | Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["show", str(model), "--json", *options]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_show_reads_folders_and_gguf_files(tmp_path: Path, capsys):
    folder = write_checkpoint(tmp_path / "llama", dtype="float16")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    (folder / "chat_template.jinja").write_text("{{ '<tool_call>' }}{{ '</tool_call>' }}{{ '</think>' }}")
    facts = shown(folder, capsys)
    assert (facts["format"], facts["licence"], facts["chat_template"]) == ("safetensors F16", "mit", True)
    file = write_gguf(folder, tmp_path / "model.gguf", "Q8_0")
    of_file = shown(file, capsys)
    assert (of_file["format"], of_file["parameters"]) == ("GGUF Q8_0", facts["parameters"])
    assert len(of_file["estimates"]) == 1  # a quantized model is not quantized again
    (tmp_path / "alone").mkdir()
    file.rename(tmp_path / "alone" / "model.gguf")
    assert shown(tmp_path / "alone", capsys)["format"] == "GGUF Q8_0"


@pytest.mark.slow
def test_show_says_why_a_model_cannot_run(tmp_path: Path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(bundled_model(), folder)
    config = json.loads((folder / "config.json").read_text())
    for changes, problem in (
        ({"architectures": ["BrandNew"]}, "architecture BrandNew is not supported"),
        ({"hidden_size": "large"}, "hidden_size must be a positive integer, got 'large'"),
        ({"quantization_config": {"quant_method": "quark"}}, "quark"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, "bits=5"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        assert problem in shown(folder, capsys)["problem"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"odd": 1}]}))
    facts = shown(folder, capsys)
    assert (facts["problem"], facts["chat_template"]) == (None, False)
    (folder / "model.safetensors").unlink()
    assert shown(folder, capsys)["problem"] == "it has no weights in a format that Quire reads"
    (folder / "config.json").unlink()
    assert main(["show", str(folder)]) == 1
    assert "has no config.json" in capsys.readouterr().err


def test_show_tells_drafters_and_adapters_from_models(capsys):
    drafter = shown(resolve("quire-demo/eagle3"), capsys)
    assert (drafter["problem"], drafter["purpose"]) == (None, "a drafter (eagle3) for speculation")
    assert "adapter (LoRA)" in shown(resolve("quire-demo/rhyme"), capsys)["purpose"]


# ---- rm


def test_rm_deletes_all_of_a_model_and_nothing_of_others(cache, capsys):
    assert main(["rm", "qwen3:0.6b", "--dry-run", "--download-dir", str(cache)]) == 0
    assert capsys.readouterr().out == f"{QWEN} (9.1 MB) would be deleted.\n"
    assert main(["rm", "tiny/demo", "--yes", "--download-dir", str(cache)]) == 0
    assert capsys.readouterr().out == "tiny/demo is deleted.\nThis freed 9.1 MB.\n"
    assert not (cache / "models--tiny--demo").exists()
    assert set(listed(cache, capsys)) == {"quire-demo", QWEN}
    assert main(["rm", "qwen3:0.6b", "-y", "--download-dir", str(cache)]) == 0
    assert set(listed(cache, capsys)) == {"quire-demo"}


def test_rm_deletes_what_an_interrupted_download_has_left(cache, capsys):
    blobs = cache / "models--just--begun" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_text("half")
    (cache / "models--tiny--demo" / "blobs" / "abc.incomplete").write_bytes(b"0" * 10**6)
    assert main(["rm", "just/begun", "tiny/demo", "-y", "--download-dir", str(cache)]) == 0
    assert "This freed 10 MB." in capsys.readouterr().out
    assert set(listed(cache, capsys)) == {"quire-demo", QWEN}


def test_rm_refuses_what_is_no_cached_model(cache, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    for name, message in (
        ("tiny/dem", "tiny/dem is not in the hub's cache; did you mean tiny/demo?"),
        ("qwen3:0.6", "did you mean qwen3:0.6b or "),
        ("xyz", "quire list shows what is there"),
        ("quire-demo", "quire-demo is the bundled model"),
        ("local", "local is a local file or folder"),
        (str(cache), "is a local file or folder"),
    ):
        assert main(["rm", "-y", "tiny/demo", name, "--download-dir", str(cache)]) == 1
        printed = capsys.readouterr()
        assert message in printed.err
        assert printed.out == ""
    assert set(listed(cache, capsys)) == {"quire-demo", QWEN, OTHER}  # not even the name that was right
    assert (tmp_path / "local").is_dir()


def test_rm_asks_on_a_terminal(cache, tmp_path: Path):
    for answer, status, remains in (("\n", 1, True), ("y\n", 0, False)):
        with terminal("rm", OTHER, "--download-dir", str(cache), state=tmp_path) as session:
            session.wait_for("Delete tiny/demo (9.1 MB)? [y/N] ")
            session.type(answer)
            assert session.end() == status
        assert (cache / "models--tiny--demo").exists() == remains


def test_rm_without_a_terminal_needs_yes(cache, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    assert main(["rm", OTHER, "--download-dir", str(cache)]) == 1
    assert "-y deletes without a question" in capsys.readouterr().err


# ---- a short name, to the end


@pytest.mark.slow  # it starts a server
def test_a_server_answers_to_the_short_name(downloaded):
    arguments = ("qwen3:0.6b", "--download-dir", str(downloaded), "--kv-cache-memory-bytes", "64M")
    with Server(*arguments, HF_HUB_OFFLINE="1") as server:
        models = json.loads(server.get("/v1/models")[1])["data"]
        assert [model["id"] for model in models] == [QWEN, "qwen3:0.6b"]
        tags = json.loads(server.get("/api/tags")[1])["models"]
        assert [model["name"] for model in tags] == [f"{QWEN}:latest", "qwen3:0.6b"]
        body = json.dumps({"model": "qwen3:0.6b", "prompt": "Once", "max_tokens": 3}).encode()
        request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
