"""Measures how far next-token distributions diverge from those of the same weights computed in float32.

    python benchmarks/divergence.py --out DIR --model FILE.gguf --reference PYTHON --peer llamacpp=PYTHON

The reference is transformers in float32, with weights dequantized by the package gguf, and therefore independent of
Quire. --reference is the interpreter of an environment with both packages (peers/README.md). The texts are this
repository's licence and chapters of Python's reference manual, from the standard library. They are read in independent
windows of --window tokens. Each line of the table runs in its own process: Quire with each of --dtypes and
--instruction-sets, and the peers. --quantization, with a checkpoint in the Hugging Face layout, adds lines for weights
that Quire quantizes while loading.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
CHAPTERS = ("execmodel", "naming", "objects", "types", "import", "compound", "assignment")
PEERS = {"llamacpp": "llama.cpp", "ik": "ik_llama.cpp"}
DTYPES = ("auto", "bfloat16", "float16", "float32")
Result = dict[str, Any]


def texts() -> dict[str, str]:
    return {
        "licence": (HERE.parent / "LICENSE").read_text(),
        "manual": "\n".join(topics[chapter] for chapter in CHAPTERS),
    }


def windows_of(texts: list[list[int]], start: list[int], tokens: int, window: int) -> list[list[int]]:
    """Return windows with `tokens` rows in total, an equal part from each text.

    texts: token ids without special tokens. start: the special tokens before each window. Raises ValueError if a text
    is too short.
    """
    each = tokens // len(texts) // window
    found = []
    for ids in texts:
        if len(ids) < each * window + 1:
            raise ValueError(f"a text has {len(ids)} tokens; {each * window + 1} are needed")
        found += [start + ids[i * window : (i + 1) * window + 1 - len(start)] for i in range(each)]
    return found


def tokenize(model: Path, tokens: int, window: int) -> list[list[int]]:
    from quire.checkpoints.metadata import load_tokenizer

    tokenizer = load_tokenizer(model)
    start = tokenizer.encode("")
    return windows_of([tokenizer.encode(text, False) for text in texts().values()], start, tokens, window)


def _run(command: list[str], environment: dict[str, str]) -> Result:
    """Return the line of JSON that a command prints last. Raises RuntimeError."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    result: Result = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def measure(a: argparse.Namespace) -> list[Result]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(a.threads)}
    results: list[Result] = []
    with tempfile.TemporaryDirectory(dir=a.out) as folder:
        windows = Path(folder, "windows.json")
        reference = Path(folder, "reference.npy")
        windows.write_text(json.dumps(tokenize(a.model, a.tokens, a.window)))
        scripts = HERE / "peers"
        given = [str(a.model), str(windows), str(reference)]
        _run([a.reference, str(scripts / "logits_transformers.py"), *given, str(a.threads)], environment)
        jobs: list[tuple[Result, list[str]]] = []
        for peer, python in a.peer.items():
            command = [python, str(scripts / "logits_llamacpp.py"), *given, str(a.threads)]
            jobs.append(({"engine": PEERS[peer]}, command))
        for dtype, isa, kind in product(a.dtypes, a.instruction_sets, ["", *a.quantization]):
            command = [sys.executable, str(scripts / "logits_quire.py"), *given, "--dtype", dtype, "--cpu-isa", isa]
            command += ["--max-model-len", str(a.window + 8), "--kv-cache-memory-bytes", str(1 << 28)]
            command += ["--wait-for-kernels", *a.quire_args]
            command += ["--quantization", kind] if kind else []
            jobs.append(({"engine": "Quire", "dtype": dtype, "isa": isa, "quantization": kind}, command))
        for names, command in tqdm(jobs, desc=a.model.name, dynamic_ncols=True):
            results.append({"model": a.model.name, **names, **_run(command, environment)})
    return results


def table(results: list[Result]) -> str:
    head = (
        "engine | compute type | instruction set | divergence (10⁻⁶ nats) | largest | same likeliest token | perplexity"
    )
    lines = [f"| {head} |", "|---|---|---|---|---|---|---|"]
    for r in results:
        name = f"{r['engine']} {r.get('quantization', '')}".strip()
        mean = f"{1e6 * r['mean']:,.0f} ± {1e6 * r['error']:,.0f}"
        error = f"{r['maximum']:.3f}"
        top1 = f"{100 * r['top1']:.2f} %"
        perplexity = f"{r['perplexity']:.4f}"
        lines.append(
            f"| {name} | {r.get('dtype', '')} | {r.get('isa', '')} | {mean} | {error} | {top1} | {perplexity} |"
        )
    return "\n".join(lines) + "\n"


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or name not in PEERS:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PYTHON, with {', '.join(PEERS)}")
    return name, value


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="PATH", help="a GGUF file or a checkpoint's folder")
    add("--out", type=Path, required=True, metavar="DIR", help="where results go")
    add("--reference", required=True, metavar="PYTHON", help="has transformers, gguf and accelerate")
    add("--peer", type=_pair, action="append", default=[], metavar="NAME=PYTHON", help=", ".join(PEERS))
    add("--dtypes", nargs="+", choices=DTYPES, default=["auto", "bfloat16", "float32"], help="of Quire")
    add("--instruction-sets", nargs="+", default=["native", "avx2"], metavar="ISA", help="of Quire")
    add("--quantization", nargs="+", default=[], metavar="KIND", help="of Quire, at load")
    add("--tokens", type=int, default=4000, metavar="N", help="scored (default: 4000)")
    add("--window", type=int, default=500, metavar="N", help="scored in a window (default: 500)")
    add("--threads", type=int, default=os.cpu_count(), metavar="N", help="of every engine (default: all cores)")
    add("--quire-args", nargs="+", default=[], metavar="FLAG", help="more flags for Quire")
    arguments = parser.parse_args(argv)
    arguments.peer = dict(arguments.peer)
    return arguments


def main(argv: list[str] | None = None) -> int:
    a = parse(argv)
    a.out.mkdir(parents=True, exist_ok=True)
    results = measure(a)
    digest = hashlib.sha256("".join(texts().values()).encode()).hexdigest()[:12]
    text = f"{a.model.name}: {a.tokens} tokens in windows of {a.window}, texts {digest}\n\n{table(results)}"
    with (a.out / "divergence.jsonl").open("a") as file:
        file.writelines(json.dumps(result) + "\n" for result in results)
    with (a.out / "divergence.md").open("a") as file:
        file.write(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
