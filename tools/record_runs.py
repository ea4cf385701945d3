"""Records the runs shown by the page's player: the bundled model, with blocks of 4 tokens to make steps interesting.

    python tools/record_runs.py                   # writes quire/server/page/static/runs.json

A run is recorded where the worker flattens each step, so the player shows the exact inputs of the model.
"""

from __future__ import annotations

import json
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.executor.uniproc import UniprocExecutor
from quire.scheduler.request import Request

TARGET = Path(__file__).parent.parent / "quire" / "server" / "page" / "static" / "runs.json"
BLOCK = 4


@dataclass
class Run:
    """A run to record. arrivals: for each request, the step before which it arrives, its prompt, and how many tokens it
    generates. options: the engine's options.
    """

    name: str
    title: str
    text: str
    arrivals: list[tuple[int, str, int]]
    num_blocks: int
    options: dict[str, Any] = field(default_factory=dict)


LONG = "The little fox went down to the river, and there it met a crow, a hare and an old grey bear who were fishing."
SHARED = "You are a kind storyteller who talks to children."
RUNS = [
    Run(
        "batching",
        "Continuous batching and paged attention",
        "Three prompts arrive at once. All their tokens are computed in one step, concatenated into the super "
        "sequence. Positions are each token's index in its own text, and slots are where its keys and values are "
        "stored. Then each request adds one token per step, until it has finished.",
        [(0, "Hi, my name is", 6), (0, "Today is a beautiful summer day", 4), (0, "Hello there", 8)],
        16,
    ),
    Run(
        "chunks",
        "Chunked prefill",
        "Two requests are generating when a long prompt arrives. A step has room for 12 tokens, so the prompt is "
        "computed in chunks, alongside the next token of each of the others. None of them has to wait.",
        [(0, "Once upon a time", 12), (0, "Hello there", 12), (2, LONG, 4)],
        24,
        {"max_num_batched_tokens": 12},
    ),
    Run(
        "sharing",
        "Prefix sharing",
        "Two prompts share a prefix. The full blocks of the first one are found by their hashes, which cover their "
        "tokens and all tokens before them. The second request uses the same blocks, and computes only the rest. The "
        "third arrives after the first has finished, and still finds them.",
        [(0, f"{SHARED} Tell of a fox.", 5), (2, f"{SHARED} Tell of a crow.", 4), (8, f"{SHARED} Tell of a bear.", 3)],
        24,
    ),
    Run(
        "preemption",
        "Preemption",
        "There are too few blocks for all tokens of the requests. When a request needs a block and none is free, the "
        "request that arrived last frees its blocks and waits. Later it resumes: its tokens so far are computed "
        "again, unless their blocks are still cached.",
        [(0, "Once upon a time there was a fox", 16), (0, "The crow and the bear", 16), (1, "A little hare ran", 12)],
        13,
    ),
    Run(
        "speculation",
        "Speculation",
        "The text repeats itself, so the next tokens are guessed from an earlier repetition. A step computes the "
        "drafts together with the last token. It accepts the drafts that the model would have generated itself, and "
        "adds one more token. Rejected drafts are overwritten by the next step.",
        [(0, "Emma lived in a small house with a red door. Oscar lived in a small house", 14)],
        16,
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 2,
                "adaptive": False,
            }
        },
    ),
]


class Recorder:
    """Runs requests step by step, and records the work of each step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        options = {"max_num_batched_tokens": 64, **run.options}
        self.llm = LLM(
            block_size=BLOCK,
            num_gpu_blocks_override=run.num_blocks,
            attention_backend="reference",
            max_num_seqs=4,
            max_model_len=BLOCK * (run.num_blocks - 1),
            dtype="float32",
            async_scheduling=False,
            **options,
        )
        executor = self.llm.core.executor
        assert isinstance(executor, UniprocExecutor)
        self.batch = executor.runner.batch
        self.flat = None
        flatten = self.batch.flatten

        def remember(step: Any) -> Any:
            self.flat = flatten(step)
            self.step = step
            self.tokens = self.batch.token_ids[self.flat.token_rows, self.flat.positions].tolist()
            return self.flat

        self.batch.flatten = remember  # type: ignore[method-assign]
        self.names: dict[str, str] = {}

    def text(self, token: int) -> str:
        return self.llm.get_tokenizer().decode([token], skip_special_tokens=False)

    def record(self) -> dict[str, Any]:
        core = self.llm.core
        steps = list[dict[str, Any]]()
        prompts = {}
        number = 0
        waiting = sorted(self.run.arrivals, key=lambda arrival: arrival[0])
        while waiting or core.has_unfinished:
            while waiting and waiting[0][0] <= number:
                _, prompt, count = waiting.pop(0)
                name = string.ascii_uppercase[len(prompts)]
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                request = self.llm.processor.process(name, prompt, params).core_requests[0]
                prompts[name] = [self.text(token) for token in request.prompt_token_ids]
                core.add_request(request)
            requests = dict(core.scheduler.requests)
            preempted = {name: request.num_preemptions for name, request in requests.items()}
            outputs = {output.request_id: output.new_token_ids for output in core.step()}
            if self.flat is not None:
                steps.append(self._describe(requests, preempted, outputs))
            self.flat = None
            number = number + 1
        run = self.run
        return {
            "name": run.name,
            "title": run.title,
            "text": run.text,
            "block_size": BLOCK,
            "num_blocks": run.num_blocks,
            "prompts": prompts,
            "steps": steps,
        }

    def _describe(
        self, requests: dict[str, Request], preempted: dict[str, int], outputs: dict[str, list[int]]
    ) -> dict[str, Any]:
        flat = self.flat
        step = self.step
        rows = {request.row: name for name, request in requests.items()}
        self.names.update({new.row: new.request_id for new in step.new_requests} | rows)  # type: ignore[call-overload]
        parts = []
        new = {new.request_id: new.num_computed_tokens for new in step.new_requests}
        drafts = step.num_draft_tokens or [0] * len(step.rows)
        for index, row in enumerate(flat.rows.tolist()):
            start, stop = flat.query_start_loc[index : index + 2].tolist()
            positions = flat.positions[start:stop].tolist()
            table = self.batch.block_tables[0, row]
            name = self.names[row]
            sampled = outputs.get(name, [])
            parts.append(
                {
                    "id": name,
                    "positions": positions,
                    "tokens": [self.text(token) for token in self.tokens[start:stop]],
                    "slots": [int(table[position // BLOCK]) * BLOCK + position % BLOCK for position in positions],
                    "table": [int(block) for block in table[: -(-(positions[-1] + 1) // BLOCK)]],
                    "found": new.get(name, 0),
                    "drafts": drafts[index],
                    "sampled": [self.text(token) for token in sampled],
                }
            )
        present = self.llm.core.scheduler.requests
        return {
            "parts": parts,
            "waiting": [name for name in requests if name not in {part["id"] for part in parts}],
            "preempted": [n for n, r in requests.items() if n in present and r.num_preemptions > preempted[n]],
            "ended": [name for name in requests if name not in present],
            "blocks": "".join(
                str(min(9, b.ref_cnt + 1)) if b.ref_cnt else str(int(b.block_hash is not None))
                for b in self.llm.core.scheduler.kv.pool.blocks[1:]
            ),
        }


def main() -> None:
    TARGET.write_text(json.dumps([Recorder(run).record() for run in RUNS], ensure_ascii=False, indent=None) + "\n")
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
