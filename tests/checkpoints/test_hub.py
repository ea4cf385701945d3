"""Downloads from the hub, against a stand-in on this machine.

huggingface_hub reads its address when it is imported, so each test's calls run in a process of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import Checkpoints
from support.engines import GREEDY, generate, make_llm, tokens_of
from support.hub import COMMIT, Hub, hub_environment
from support.waiting import LONGEST

WANTED = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
UNWANTED = [
    "README.md",
    "consolidated.safetensors",
    "model.gguf",
    "modeling_evil.py",
    "onnx/config.json",
    "onnx/model.safetensors",
    "original/consolidated.00.pth",
    "pytorch_model.bin",
]


@pytest.fixture
def folder(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """Repositories: a whole one, with what must not be fetched beside it; and a gated one."""
    for name in ("tiny/llama", "gated/llama"):
        directory = tmp_path / "hub" / name
        directory.mkdir(parents=True)
        for file in checkpoints.path("llama").iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        for other in UNWANTED:
            (directory / other).parent.mkdir(exist_ok=True)
            (directory / other).write_text("raise SystemExit('run!')")
    return tmp_path / "hub"


def in_a_process(code: str, address: str, home: Path) -> Any:
    """Run the lines, which put their answer into `answer`; what they put there."""
    environment = {**hub_environment(address, home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    script = f"import json, os\nanswer = {{}}\n{code}\nprint('ANSWER' + json.dumps(answer))"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=LONGEST
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.split("ANSWER")[-1])


ERROR_OF = """
from pathlib import Path
from quire.checkpoints.errors import ModelNotFoundError
from quire.checkpoints.hub import resolve
def error_of(*arguments, **options):
    try:
        return "no error: " + str(resolve(*arguments, **options))
    except ModelNotFoundError as error:
        return str(error)
def files(path):
    return sorted(p.relative_to(path).as_posix() for p in Path(path).rglob("*") if p.is_file())
"""


@pytest.mark.slow
def test_a_model_of_the_hub_is_fetched_once_and_says_what_its_directory_says(folder, checkpoints, tmp_path):
    run = """
from quire import LLM, SamplingParams
llm = LLM("tiny/llama", dtype="float32", max_model_len=176, max_num_seqs=4)
params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
answer["tokens"] = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids
"""
    with Hub(folder) as hub:
        answer = in_a_process(run, hub.address, tmp_path / "home")
        local = generate(make_llm(checkpoints.path("llama")), ["Once upon a time"], GREEDY.clone(max_tokens=16))
        assert answer["tokens"] == tokens_of(local)[0]
        assert hub.fetched() == WANTED
    # The hub is gone: what was fetched is enough.
    assert in_a_process(run, hub.address, tmp_path / "home") == answer


def test_the_files_of_a_model_are_fetched_once(folder, tmp_path):
    """No Python, no pickle, no second copy of the weights."""
    run = ERROR_OF + "answer['path'] = str(resolve('tiny/llama')); answer['files'] = files(answer['path'])"
    with Hub(folder) as hub:
        answer = in_a_process(run, hub.address, tmp_path / "home")
        assert hub.fetched() == {*answer["files"]} == WANTED
    for name in WANTED:
        assert (Path(answer["path"]) / name).read_bytes() == (folder / "tiny" / "llama" / name).read_bytes()
    # The hub is gone: what was fetched is enough.
    assert in_a_process(run, hub.address, tmp_path / "home") == answer


@pytest.mark.slow
def test_of_an_older_repository_come_the_pickled_weights_and_whatever_tokenizer_it_has(tmp_path):
    wanted = ["config.json", "merges.txt", "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"]
    wanted += ["qwen.tiktoken", "tekken.json", "tiktoken.model", "tokenizer.model", "vocab.json"]
    directory = tmp_path / "hub" / "old" / "opt"
    for name in [*wanted, "flax_model.msgpack", "tf_model.h5", "training_args.bin", "original/tokenizer.model"]:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)  # the client fetches equal files once
    with Hub(tmp_path / "hub") as hub:
        run = ERROR_OF + "answer['weights'] = files(resolve('old/opt'))"
        answer = in_a_process(run, hub.address, tmp_path / "home")
        assert answer["weights"] == wanted == sorted(hub.fetched())
        run = ERROR_OF + "answer['none'] = files(resolve('old/opt', weights=False))"
        answer = in_a_process(run, hub.address, tmp_path / "another home")
        assert answer["none"] == [name for name in wanted if not name.endswith(".bin")]


def test_of_medusa_heads_come_the_config_and_the_pickled_heads(tmp_path):
    directory = tmp_path / "hub" / "old" / "medusa"
    directory.mkdir(parents=True)
    for name in ("config.json", "medusa_lm_head.pt", "training_state.pt"):
        (directory / name).write_text(name)
    with Hub(tmp_path / "hub") as hub:
        run = ERROR_OF + "answer['heads'] = files(resolve('old/medusa'))"
        assert in_a_process(run, hub.address, tmp_path / "home")["heads"] == ["config.json", "medusa_lm_head.pt"]


def test_with_a_model_that_embeds_come_the_files_of_its_pooling_and_dense_layers(tmp_path):
    parts = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    wanted = sorted([*parts, "config.json", "model.safetensors", "modules.json", "sentence_bert_config.json"])
    for name in [*wanted, "onnx/config.json", "openvino/1_Pooling/config.json", "onnx/model.safetensors"]:
        path = tmp_path / "hub" / "tiny" / "embedder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    with Hub(tmp_path / "hub") as hub:
        run = ERROR_OF + "answer['files'] = files(resolve('tiny/embedder'))"
        assert in_a_process(run, hub.address, tmp_path / "home")["files"] == wanted


def test_what_may_be_asked_of_the_hub(folder, tmp_path):
    with Hub(folder, tokens=("sesame",), revisions=("main", "v2", COMMIT)) as hub:
        answer = in_a_process(
            ERROR_OF
            + f"""
answer["unknown"] = error_of("no/such")
answer["gated"] = error_of("gated/llama")
answer["revision"] = error_of("tiny/llama", revision="v3")
answer["malformed"] = error_of("bad name!/llama")
answer["with token"] = files(resolve("gated/llama", token="sesame", weights=False))
answer["at revision"] = files(resolve("tiny/llama", revision="v2", weights=False))
place = {str(tmp_path / "elsewhere")!r}
answer["elsewhere"] = str(resolve("tiny/llama", download_dir=place, weights=False)).startswith(place)
""",
            hub.address,
            tmp_path / "home",
        )
    for name, model in (("unknown", "no/such"), ("gated", "gated/llama"), ("revision", "tiny/llama")):
        assert f"model '{model}' is no directory here and could not be fetched from the hub: " in answer[name]
    assert "no error" not in answer["malformed"]
    assert "bad name!/llama" in answer["malformed"]
    without_weights = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert answer["with token"] == answer["at revision"] == without_weights
    assert answer["elsewhere"]


def test_a_hub_that_cannot_be_reached_is_a_clear_error(tmp_path):
    answer = in_a_process(ERROR_OF + "answer['error'] = error_of('tiny/llama')", "http://127.0.0.1:9", tmp_path)
    assert "model 'tiny/llama' is no directory here and could not be fetched from the hub" in answer["error"]
