"""Measures how far Quire's distributions are from the reference's, for ../divergence.py.

python logits_quire.py MODEL WINDOWS.json REFERENCE.npy [engine flags]
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from distances import Distances, read_windows

from quire import LLM, SamplingParams, __version__
from quire.cli.flags import add_engine_flags, engine_options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("windows", type=Path)
    parser.add_argument("reference", type=Path)
    add_engine_flags(parser)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, **engine_options(arguments))
    scored: list[torch.Tensor] = []
    sampler = llm.core.executor.runner.sampler
    score = sampler.score

    def keep(logits: torch.Tensor) -> torch.Tensor:
        scored.append(logits.float())
        return score(logits)

    sampler.score = keep
    distances = Distances(np.load(arguments.reference, mmap_mode="r"))
    for window in read_windows(arguments.windows):
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        llm.generate([window], params, use_tqdm=False)
        distances.add(torch.cat(scored).numpy(), window[1:])
        scored.clear()
    print(json.dumps({"version": __version__, **distances.summary()}), flush=True)


if __name__ == "__main__":
    main()
