"""All commands and Python examples of README and docs are run, document by document, in their order.

What cannot be run here is in NOT_RUN, with the reason. tests/docs/test_examples.py parses these, too.
"""

from __future__ import annotations

import re
import shutil
from itertools import chain
from pathlib import Path

import pytest

from support.document_run import run_document
from support.documents import GUIDES, ROOT, blocks, commands, name_of

INSTALLS = "it installs packages: .ci/run installs the repository in environments of its own"
MACHINES = "it needs several machines or a Ray cluster: tests/e2e runs these as processes"
GPUS = "it needs more ranks than a machine of the tests can run: tests/e2e has such ranks with tiny models"
COMPILES = "it compiles kernels for minutes: tests/cli/test_compile.py runs the command"
LARGE = "it needs a large checkpoint with a head of its own: tests/speculation has small ones"
GPU_TOOLS = "it needs tools for GPUs, and runs for up to an hour: .ci/nightly has parts of it"
NOT_RUN = {  # regular expressions of whole commands
    r"pip install .*|pytest.*|mkdocs .*|pre-commit .*|\.ci/.*": INSTALLS,
    r"ray start .*|quire serve .*(-backend ray|--nnodes|--data-parallel-address|-dpl ).*": MACHINES,
    r"quire serve .*(hybrid-lb|--data-parallel-rank).*": MACHINES,
    r"quire serve (meta-llama|deepseek-ai|Qwen/Qwen3-30B).*|quire serve .* -dp [48].*": GPUS,
    r"quire compile .*": COMPILES,
    r"quire serve (Qwen/Qwen3-8B|RedHatAI/).*|python tools/train_demo_speculators.*": LARGE,
    r"python (-m )?benchmarks.*": GPU_TOOLS,
    r"quire serve .*(cluster-secret-file|MiniLM|Embedding|reranker|Reranker).*|quire route .*--prefill.*":
        "it needs a model that embeds, or two machines: tests/server/test_pooling_api.py and tests/router have these",
    r"quire serve .*/var/cache/.*": "it writes to a folder of the system: tests/engine/test_tiers.py has its own",
    r"quire serve Qwen/Qwen3-0.6B (--port 8001 --s|Qwen/Qwen3-8B).*|quire route (.*--rules|train) .*":
        "it needs two models: tests/router/test_semantic.py has stand-ins, and tests/semantic trains a classifier",
    r"docker .*|python3 -m venv /opt.*|/opt/.*|install .*|systemctl .*|python tools/build_wheel.py":
        "it installs a server on the system: tests/deploy builds the wheel and the image, and runs them",
    r"nsys .*": "it needs NVIDIA's profiler: tests/observability checks the ranges with a library of its own",
    r"quire top.*": "it is a screen that stays: tests/e2e/test_top_screen.py has it in a terminal",
    r"quire chat .*": "it is a conversation at a terminal: tests/cli/test_chat_command.py has some",
    r"curl -s .*/v1/embeddings .*": "its server is not run",
    r"quire serve qwen2.5-coder.*|(codex|claude|opencode|qwen|aider) .*|curl .*\"coder\".*":
        "it needs a model of its own and coding agents: tests/clients/test_coding_agents.py runs these",
    r"quire serve google/vaultgemma.*": "tests/models/test_transformers_impl.py has tiny models",
    r"quire serve facebook/bart.*": "tests/multimodal/test_encoder_decoders.py has a tiny BART",
    r"quire serve openai/whisper.*|curl .*/v1/audio/.*":
        "it needs a Whisper and a file: tests/multimodal/test_transcriptions.py has a tiny one",
}  # fmt: skip
BLOCKS_NOT_RUN = {  # a line of a Python block
    "from quire.models.registry import ARCHITECTURES": "tests/models/test_add_an_architecture.py adds the family",
    'llm = LLM("sentence-transformers/all-MiniLM-L6-v2")': "tests/engine/test_pooling.py uses this model",
    'llm = AsyncLLM("Qwen/Qwen3-0.6B", data_parallel_size=4)': "it would start four engines and not use them",
    '    {"type": "text", "text": "What is this?"},': "tests/multimodal/test_server.py has a tiny model that sees",
    'llm = LLM("llava-hf/llava-1.5-7b-hf")': "tests/multimodal/test_server.py has a tiny model that sees",
    'llm = LLM("facebook/bart-large-cnn")': "tests/multimodal/test_encoder_decoders.py has a tiny BART",
    'llm = LLM("openai/whisper-large-v3-turbo")': "tests/multimodal/test_whisper.py has a tiny Whisper",
    'with open("speech.mp3", "rb") as file:': "tests/multimodal/test_transcriptions.py has a tiny Whisper",
}
EXTRA = {  # options of a document's servers, for what it says in words
    "docs/apis.md": "--enable-admin-api",
    "docs/sessions.md": "--enable-admin-api",
    "docs/lora.md": "--enable-admin-api --lora-folder .",
}
COMMANDS = [command.text for command in chain.from_iterable(map(commands, GUIDES))]
LONG = 'quire serve path/to/checkpoint --served-model-name small --api-key "$KEY" --max-model-len 8K'
MORE = {  # what single commands get that would run for long, or ask, or may fail here
    LONG: "--max-model-len 2K",  # what the bundled model can do
    # The bundled model bears thousands of requests a second, and the search for the highest load goes up to there.
    **{
        text: "--traffic rate=10,input=64,output=8,requests=10"
        for text in COMMANDS
        if text.startswith("quire plan --") and "--traffic rate=" in text
    },
    **{text: "--seconds 5" for text in COMMANDS if text.startswith("quire plan measure")},
    "quire doctor": "|| [ $? -eq 1 ]",  # it found something on this machine
    "quire rm qwen3:0.6b": "--yes",
    "quire bench throughput path/to/checkpoint": "--num-prompts 4 --input-len 16 --output-len 8",
    "quire bench throughput path/to/checkpoint --input-len 512 --output-len 64 --num-prompts 200": "--num-prompts 4",
    "quire bench serve --base-url http://127.0.0.1:8000 --request-rate 4 --num-prompts 200": "--num-prompts 4",
    **dict.fromkeys((text for text in COMMANDS if text.startswith("quire bench sweep")), "--num-prompts 4"),
}
IN_CI = ("README.md", "docs/quick-start.md")
DOCUMENTS = [
    pytest.param(path, marks=pytest.mark.slow if name_of(path) in IN_CI else pytest.mark.nightly, id=name_of(path))
    for path in GUIDES
    if any(block.language in ("bash", "python") for block in blocks(path))
]
PYTHON = [block for block in chain.from_iterable(map(blocks, GUIDES)) if block.language == "python"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", DOCUMENTS)
def test_a_document_can_be_followed(path: Path, tmp_path: Path):
    if shutil.which("curl") is None and any(command.text.startswith("curl") for command in commands(path)):
        pytest.skip("no curl here")
    without = {text for text in COMMANDS if any(re.fullmatch(pattern, text, re.S) for pattern in NOT_RUN)}
    without |= {str(block) for block in PYTHON if any(line in block.text.splitlines() for line in BLOCKS_NOT_RUN)}
    run_document(path, tmp_path, without, EXTRA.get(name_of(path), ""), MORE)


def test_what_is_not_run_is_still_there():
    for pattern in NOT_RUN:
        assert any(re.fullmatch(pattern, text, re.S) for text in COMMANDS), pattern
    for line in BLOCKS_NOT_RUN:
        assert any(line in block.text.splitlines() for block in PYTHON), line
    assert set(MORE) <= set(COMMANDS)
    assert set(EXTRA) <= {name_of(path) for path in GUIDES}


def test_the_first_steps_of_a_reader_are_run():
    """What matters most is not in the list by mistake."""
    run = [text for text in COMMANDS if not any(re.fullmatch(pattern, text, re.S) for pattern in NOT_RUN)]
    for program in ("generate", "serve", "pull", "list", "show", "rm", "run-batch", "bench", "route", "doctor"):
        assert any(text.startswith(f"quire {program}") for text in run), program
    assert ROOT.joinpath("README.md") in GUIDES


def test_reasons_name_tests_that_exist():
    reasons = " ".join([*NOT_RUN.values(), *BLOCKS_NOT_RUN.values()])
    assert [name for name in re.findall(r"tests/[\w/.]*\w", reasons) if not (ROOT / name).exists()] == []
