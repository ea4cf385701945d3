"""Runs Quire on one workload.   python bench_quire.py CHECKPOINT WORKLOAD [engine flags]"""

import argparse

from workloads import Requests, measure

from quire import LLM, SamplingParams, __version__
from quire.cli.flags import add_engine_flags, engine_options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("workload")
    add_engine_flags(parser)
    arguments = parser.parse_args()
    options = engine_options(arguments)
    llm = LLM(arguments.model, **options)

    def run(requests: Requests) -> int:
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=n) for _, n in requests]
        outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [n for _, n in requests]
        return sum(output.num_cached_tokens for output in outputs)

    dtype = options.get("quantization") or "bfloat16"
    measure(run, "quire", __version__, dtype, arguments.workload)


if __name__ == "__main__":
    main()
