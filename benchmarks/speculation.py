"""Measures the gain from speculation: requests that copy from their prompts, in one or several streams.

    python benchmarks/speculation.py --model SmolLM2.gguf [--requests 200] [--streams 1 4 16] [--json FILE]
    python benchmarks/speculation.py --model SmolLM2.gguf --config '{"method": "ngram", "num_speculative_tokens": 5}'

Two engines, one with and one without speculation, alternate after each group of requests, one request per stream.
Both must generate the same text. Prints tokens per second of the whole time, and of the time after the first token of
each request, with the ratio (above 1: speculation is faster); the share of accepted drafts; and the mean number of
tokens per step and request.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams

NAMES = "Ada Bruno Clara David Elena Felix Greta Henrik Ines Jonas Karla Leo Mira Nils Olga Pavel".split()
CITIES = "Lisbon Oslo Vienna Porto Ghent Turin Riga Bern Lyon Cork Graz Malmo".split()
GOODS = "lamps clocks violins carpets bicycles kettles globes baskets mirrors drums".split()
TASKS = (
    "Repeat the text above, word for word.",
    "Copy the text above, and correct its mistakes.",
    "Summarize the text above with its own sentences.",
    "Quote all the sentences about {name}.",
)
EDITS = (
    "Rewrite the whole program above with `{name}_count` renamed to `number`.",
    "Add a comment to the program above and print the whole program.",
)


def text(dice: random.Random) -> tuple[str, str]:
    """Return a text of about 120 words, and a name in it."""
    sentences = []
    names = dice.sample(NAMES, 3)
    for name in names:
        city, other, goods = *dice.sample(CITIES, 2), dice.choice(GOODS)
        year = dice.randint(1900, 2020)
        sentences += [
            f"{name} was born in {city} in {year} and moved to {other} at the age of {dice.randint(3, 30)}.",
            f"In {other}, {name} opened a small shop that sold {goods} and repaired them.",
            f"The shop of {name} had {dice.randint(2, 9)} windows and a green door.",
        ]
    dice.shuffle(sentences)
    return " ".join(sentences), names[0]


def program(dice: random.Random) -> tuple[str, str]:
    """Return a program of about 20 lines, and a name in it."""
    name = dice.choice(GOODS)
    lines = []
    for verb in dice.sample(["load", "count", "sort", "print", "check", "merge"], 4):
        lines += [
            f"def {verb}_{name}({name}, limit={dice.randint(2, 99)}):",
            f"    {name}_count = len({name})",
            f"    if {name}_count > limit:",
            f'        raise ValueError(f"too many {name}: {{{name}_count}}")',
            f"    return {name}[:{name}_count]",
            "",
        ]
    return "\n".join(lines), name


def chats(count: int, seed: int = 1) -> list[list[dict[str, str]]]:
    """Return chats whose answers copy from their texts or programs."""
    dice = random.Random(seed)
    made = []
    for number in range(count):
        is_text = number % 3 < 2
        content, name = text(dice) if is_text else program(dice)
        task = dice.choice(TASKS if is_text else EDITS).format(name=name)
        made.append([{"role": "user", "content": f"{content}\n\n{task}"}])
    return made


@dataclass
class Result:
    streams: int
    requests: int
    plain: float  # tokens per second
    speculative: float
    plain_decoding: float  # tokens per second of a request, after its first token
    speculative_decoding: float
    accepted: float  # share of the drafts
    tokens_of_a_step: float  # per request whose drafts were verified

    @property
    def ratio(self) -> float:
        return self.speculative / self.plain

    @property
    def decoding_ratio(self) -> float:
        return self.speculative_decoding / self.plain_decoding


def measure(plain: LLM, speculative: LLM, streams: int, requests: int, params: SamplingParams) -> Result:
    seconds, decoding = ({id(plain): 0.0, id(speculative): 0.0} for _ in range(2))
    tokens = 0
    before = counts(speculative)
    groups = chats(requests)
    for number in range(0, requests, streams):
        group = groups[number : number + streams]
        said = []
        for llm in (plain, speculative) if number // streams % 2 else (speculative, plain):
            began = time.perf_counter()
            outputs = llm.chat(group, params, use_tqdm=False)
            seconds[id(llm)] += time.perf_counter() - began
            for output in outputs:
                assert output.metrics is not None
                decoding[id(llm)] += output.metrics.last_token_ts - output.metrics.first_token_ts
            said.append([list(output.outputs[0].token_ids) for output in outputs])
        assert said[0] == said[1], "speculation has changed an answer"
        tokens += sum(map(len, said[0]))
    drafts, drafted, accepted = (after - old for after, old in zip(counts(speculative), before, strict=True))
    return Result(
        streams,
        requests,
        tokens / seconds[id(plain)],
        tokens / seconds[id(speculative)],
        (tokens - requests) / decoding[id(plain)],
        (tokens - requests) / decoding[id(speculative)],
        accepted / max(1, drafted),
        1 + accepted / max(1, drafts),
    )


def counts(llm: LLM) -> tuple[int, int, int]:
    stats = llm.core.stats.speculation
    assert stats is not None
    return stats.drafts, stats.draft_tokens, stats.accepted_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--config", type=json.loads, default={"method": "suffix", "num_speculative_tokens": 16})
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": max(16, *arguments.streams)}
    plain = LLM(arguments.model, **options)
    speculative = LLM(arguments.model, speculative_config=arguments.config, **options)
    params = SamplingParams(temperature=arguments.temperature, seed=1, max_tokens=arguments.max_tokens)
    results = []
    print("streams  plain tok/s  speculative  ratio  plain decoding  speculative  ratio  accepted  tokens a step")
    for streams in arguments.streams:
        found = measure(plain, speculative, streams, arguments.requests, params)
        results.append(asdict(found) | {"ratio": found.ratio, "decoding_ratio": found.decoding_ratio})
        print(
            f"{streams:7}  {found.plain:11.1f}  {found.speculative:11.1f}  {found.ratio:5.2f}  "
            f"{found.plain_decoding:14.1f}  {found.speculative_decoding:11.1f}  {found.decoding_ratio:5.2f}  "
            f"{found.accepted:8.0%}  {found.tokens_of_a_step:13.2f}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"config": arguments.config, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
