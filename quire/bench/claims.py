"""`quire bench claims`: measures the gains of the engine's mechanisms in this process and compares them with their
goals.

Every number is a median over rounds. In each round the compared variants take turns, so that a slow period of the
machine affects all of them.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

import torch

from quire._version import __version__
from quire.bench.datasets import TEXTS
from quire.engine.llm import LLM
from quire.messages.engine import EngineCoreOutput
from quire.messages.sampling_params import SamplingParams
from quire.messages.structured_outputs import StructuredOutputsParams

_KV_TOKENS = 40_000
Workload = list[tuple[list[int], int]]  # (prompt, output length) of each request


@dataclass(frozen=True)
class Sizes:
    """Sizes of the workloads. Lengths are in tokens."""

    rounds: int = 5
    mixed: int = 48  # number of requests, with prompts of 32-512 tokens and outputs of 16-192
    questions: int = 16  # number of questions about one document, with 32 prompt and 32 output tokens each
    document: int = 1024  # length
    streams: int = 8  # number of requests that decode while the whale arrives
    whale: int = 4096  # length of one long prompt
    articles: int = 16  # number of requests with a JSON schema, with up to 400 output tokens each
    copies: int = 4  # number of requests with self-repeating texts, with 256 output tokens each
    stories: int = 16  # number of stories of up to 160 tokens that a head drafts, plus two questions for each


@dataclass(frozen=True)
class Claim:
    """A row of the table. literature: the gain that papers report. value and goal are ratios, displayed in `unit`."""

    mechanism: str
    measure: str
    literature: str
    value: float
    goal: float
    at_least: bool = True
    unit: str = "×"

    @property
    def met(self) -> bool:
        return self.value >= self.goal if self.at_least else self.value <= self.goal


def measure(model: str | None, options: dict[str, Any], only: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """Return the claims whose mechanism contains one of `only` (all claims if it is empty), and the configuration.

    options: options of the engine. Raises ValueError if `only` matches no claim, and the errors of LLM.
    """
    wanted = {name: run for name, run in _CLAIMS.items() if not only or any(o.lower() in name.lower() for o in only)}
    if not wanted:
        raise ValueError(f"--only {' '.join(only)} names no claim; there are: {', '.join(_CLAIMS)}")
    if sizes.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {sizes.rounds}")
    longest = max(sizes.whale, sizes.document + 32, 512) + 256
    options = {"max_num_seqs": 64, "max_model_len": longest, "wait_for_kernels": True, **options}
    if "kv_cache_memory_bytes" not in options:  # the workloads need less than the default, half of the memory
        options = {"num_gpu_blocks_override": _KV_TOKENS // options.get("block_size", 16), **options}
    try:
        llm = LLM(model, **options)
    except ValueError:  # The model has too few positions for the whale. More positions do not change the times.
        options["hf_overrides"] = {"max_position_embeddings": longest, **options.get("hf_overrides", {})}
        llm = LLM(model, **options)
    claims: list[Claim] = []
    for name, run in wanted.items():
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        claims += run(llm, options, sizes)
    llm.shutdown()
    return {
        "version": __version__,
        "model": model or "bundled",
        "dtype": llm.dtype,
        "threads": torch.get_num_threads(),
        "rounds": sizes.rounds,
        "claims": [{**asdict(claim), "met": claim.met} for claim in claims],
    }


def table(result: dict[str, Any]) -> str:
    lines = [("mechanism", "measure", "literature", "goal", "measured", "met")]
    for row in result["claims"]:
        scale = 100 if row["unit"] == "%" else 1
        unit = row["unit"]
        goal = f"{'≥' if row['at_least'] else '≤'} {row['goal'] * scale:g} {unit}"
        value = f"{row['value'] * scale:.2f} {unit}"
        lines.append((row["mechanism"], row["measure"], row["literature"], goal, value, "yes" if row["met"] else "NO"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head = "{model}, {dtype}, {threads} threads, medians of {rounds} rounds, quire {version}\n".format(**result)
    padded = ("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join([head, *(line.rstrip() for line in padded)])


# ---- workloads, as in benchmarks/peers/workloads.py but with token ids of the model's vocabulary


def _prompt(rng: random.Random, length: int, llm: LLM) -> list[int]:
    return [rng.randint(3, min(10_000, llm.processor.vocab_size - 1)) for _ in range(length)]


def mixed(llm: LLM, seed: int, count: int) -> Workload:
    rng = random.Random(seed)
    return [(_prompt(rng, rng.randint(32, 512), llm), rng.randint(16, 192)) for _ in range(count)]


def prefix(llm: LLM, seed: int, count: int, document_len: int) -> Workload:
    rng = random.Random(seed)
    document = _prompt(rng, document_len, llm)
    return [(document + _prompt(rng, 32, llm), 32) for _ in range(count)]


def _add(llm: LLM, request_id: str, prompt: list[int], output_len: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    for request in llm.processor.process(request_id, prompt, params).core_requests:
        llm.core.add_request(request)


def _steps(llm: LLM, workload: Workload) -> Iterator[list[EngineCoreOutput]]:
    """Add the requests, and run steps until all have finished. If the caller stops early, they are aborted."""
    for number, (prompt, output_len) in enumerate(workload):
        _add(llm, str(number), prompt, output_len)
    try:
        while llm.core.has_unfinished:
            yield llm.core.step()
    finally:
        llm.core.abort_requests(list(llm.core.scheduler.requests))


# ---- paged memory


def _paged_attention(llm: LLM, options: dict[str, Any], sizes: Sizes) -> list[Claim]:
    """Count slots; one run is enough. The prompts have no common prefix, so each cached token has its own slot."""
    kv = llm.core.scheduler.kv
    shares = []
    for _ in _steps(llm, mixed(llm, 2, sizes.mixed)):
        slots = kv.block_size * (kv.pool.num_usable - kv.pool.num_free)
        held = sum(
            request.num_computed_tokens - kv.block_size * table.count(kv.pool.null_block)
            for request in llm.core.scheduler.running
            for table in request.blocks.tables
        )
        if slots:
            shares.append(held / slots)
    measure = "KV tokens held ÷ slots allocated, mean over the steps of the mixed workload"
    return [Claim("PagedAttention", measure, "95 %", mean(shares), 0.96, unit="%")]


# ---- prefix caching


def _prefix_caching(llm: LLM, options: dict[str, Any], sizes: Sizes) -> list[Claim]:
    kv = llm.core.scheduler.kv
    seconds: dict[bool, list[float]] = {False: [], True: []}
    reused: dict[str, int] = {}
    for number in range(-1, sizes.rounds):  # round -1 is a warm-up
        for enabled in (False, True):
            workload = prefix(llm, number + 100, sizes.questions, sizes.document)
            llm.reset_prefix_cache()
            kv.enable_prefix_caching = enabled
            started = time.perf_counter()
            for outputs in _steps(llm, workload):
                if enabled:
                    reused.update((output.request_id, output.num_cached_tokens) for output in outputs)
            if number >= 0:
                seconds[enabled].append(time.perf_counter() - started)
    keys = {block.block_hash: block for block in kv.pool.blocks if block.block_hash is not None}
    hash_bytes = sys.getsizeof(keys) + sum(sys.getsizeof(key) + sys.getsizeof(key[1]) for key in keys if key)
    kv_bytes = len(keys) * sum(llm.core.executor.kv_cache.rank_bytes)
    kv.enable_prefix_caching = llm.config.cache.enable_prefix_caching
    reusable = (sizes.questions - 1) * (sizes.document // kv.block_size * kv.block_size)
    name = "prefix caching"
    return [
        Claim(
            name, "time of the prefix workload, off ÷ on", "2–5 ×", median(seconds[False]) / median(seconds[True]), 4.0
        ),
        Claim(name, "prompt tokens reused ÷ reusable", "", sum(reused.values()) / reusable, 0.99, unit="%"),
        Claim(name, "bytes of hashes and their index ÷ bytes of KV", "< 1 %", hash_bytes / kv_bytes, 0.005, False, "%"),
    ]


# ---- chunked prefill


def _chunked_prefill(llm: LLM, options: dict[str, Any], sizes: Sizes) -> list[Claim]:
    """Compare the usual chunk size with a chunk that holds the whole whale."""
    chunk = llm.core.scheduler.limits.max_num_batched_tokens
    whole = LLM(llm.config.model.model, **{**options, "max_num_batched_tokens": sizes.whale + 64})
    gaps: dict[str, list[float]] = {"whole": [], "chunked": []}
    decode_steps = []
    whale_seconds = []
    for number in range(-1, sizes.rounds):  # round -1 is a warm-up
        rng = random.Random(number)
        whole_gap, _ = _whale_among_streams(whole, rng, sizes)
        chunked_gap, decode_step = _whale_among_streams(llm, rng, sizes)
        started = time.perf_counter()
        for _ in _steps(llm, [(_prompt(rng, sizes.whale, llm), 1)]):
            pass
        if number >= 0:
            whale_seconds.append(time.perf_counter() - started)
            decode_steps.append(decode_step)
            gaps["whole"].append(whole_gap)
            gaps["chunked"].append(chunked_gap)
    whole.shutdown()
    gap = median(gaps["chunked"])
    expected = chunk * median(whale_seconds) / sizes.whale + median(decode_steps)
    name = "chunked prefill"
    measure = f"largest gap of {sizes.streams} streams as {sizes.whale:,} tokens arrive"
    return [
        Claim(name, f"{measure}, whole ÷ in chunks of {chunk}", "3 ×", median(gaps["whole"]) / gap, 4.0),
        Claim(
            name,
            f"the same in chunks ÷ (chunk ÷ prefill rate + decode step = {expected * 1e3:.0f} ms)",
            "",
            gap / expected,
            1.3,
            False,
        ),
    ]


def _whale_among_streams(llm: LLM, rng: random.Random, sizes: Sizes) -> tuple[float, float]:
    """Return, in seconds, (the longest gap between two tokens of a stream from the whale's arrival to its third token,
    the median gap before its arrival)."""
    llm.reset_prefix_cache()
    streams = {str(i) for i in range(sizes.streams)}
    workload = [(_prompt(rng, 32, llm), 200) for _ in streams]
    whale = _prompt(rng, sizes.whale, llm)
    latest: dict[str, float] = {}
    before: list[float] = []
    after: list[float] = []
    num_steps = num_whale = 0  # steps in which all streams ran
    for outputs in _steps(llm, workload):
        now = time.perf_counter()
        for output in outputs:
            if output.request_id not in streams:
                num_whale += 1
            elif output.request_id in latest:
                (before if num_steps < 16 else after).append(now - latest[output.request_id])
            latest[output.request_id] = now
        num_steps += len(latest) >= sizes.streams
        if num_steps == 16:
            _add(llm, "whale", whale, 8)
        if num_whale == 3:
            break
    return max(after), median(before)


# ---- structured outputs


SCHEMA: dict[str, Any] = TEXTS["articles"]["schema"]
ARTICLES = [TEXTS["articles"]["prompt"].format(topic) for topic in TEXTS["articles"]["topics"].split()]


def with_schema(seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.8, seed=seed, max_tokens=400, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )


def without_schema(seed: int, output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=output_len, ignore_eos=True)


def _structured_outputs(llm: LLM, options: dict[str, Any], sizes: Sizes) -> list[Claim]:
    prompts = ARTICLES[: sizes.articles]
    constrained = [with_schema(seed) for seed in range(len(prompts))]
    outputs = llm.generate(prompts, constrained, use_tqdm=False)  # for the lengths, and as a warm-up
    plain = [without_schema(seed, len(output.outputs[0].token_ids)) for seed, output in enumerate(outputs)]
    ratios = []
    for number in range(-1, sizes.rounds):  # round -1 is a warm-up
        times: dict[bool, float] = {}
        for has_schema in (False, True) if number % 2 else (True, False):
            started = time.perf_counter()
            llm.generate(prompts, constrained if has_schema else plain, use_tqdm=False)
            times[has_schema] = time.perf_counter() - started
        ratios += [times[False] / times[True]] * (number >= 0)
    measure = f"output tokens/s of {len(prompts)} requests with a JSON schema ÷ as many tokens without"
    return [Claim("structured outputs", measure, "80–85 %", median(ratios), 0.95, unit="%")]


# ---- speculation


def _speculation(llm: LLM, options: dict[str, Any], sizes: Sizes) -> list[Claim]:
    if llm.config.scheduler.speculation is not None:
        print("speculation is measured beside an engine that does not speculate; leave it out", file=sys.stderr)
        return []
    is_bundled = llm.config.model.model is None
    return _suffix_decoding(llm, options, sizes) + (_bundled_head(options, sizes) if is_bundled else [])


def _suffix_decoding(llm: LLM, options: dict[str, Any], sizes: Sizes) -> list[Claim]:
    """Measure one stream. Models continue such prompts by repeating a part of them. Outputs are not cached for
    drafting, since all rounds have the same prompts."""
    config = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
    speculative = LLM(llm.config.model.model, **{**options, "speculative_config": config})
    facts = TEXTS["repetition"]["facts"]
    pairs = zip(facts, facts[1:] + facts[:1], strict=True)
    prompts = [f"{first}\n{second}\n" * 4 for first, second in pairs][: sizes.copies]
    params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
    ratios: list[float] = []
    same: list[bool] = []
    for number in range(-1, sizes.rounds):  # round -1 is a warm-up
        seconds: dict[bool, float] = {}
        said: dict[bool, list[Any]] = {}
        for speculates in (False, True) if number % 2 else (True, False):
            engine = speculative if speculates else llm
            engine.reset_prefix_cache()
            started = time.perf_counter()
            outputs = [engine.generate(prompt, params, use_tqdm=False)[0].outputs[0] for prompt in prompts]
            seconds[speculates] = time.perf_counter() - started
            said[speculates] = [output.token_ids for output in outputs]
        ratios += [seconds[False] / seconds[True]] * (number >= 0)
        same += [with_drafts == plain for with_drafts, plain in zip(said[True], said[False], strict=True)]
    speculative.shutdown()
    measure = f"time of {len(prompts)} requests whose texts repeat, one by one, off ÷ with suffix decoding"
    return [
        Claim("speculation", measure, "1–5 ×", median(ratios), 1.8),
        Claim("speculation", "answers that are the same to the token", "", mean(same), 1.0, unit="%"),
    ]


def _bundled_head(options: dict[str, Any], sizes: Sizes) -> list[Claim]:
    """Count drafts; one run is enough. The prompts are of the kinds that the head was trained on."""
    config = {"model": "quire-demo/eagle3", "num_speculative_tokens": 5, "adaptive": False}
    llm = LLM(**{**options, "speculative_config": config})
    texts = TEXTS["drafts"]
    asked = [question.format(word) for question, words in texts["questions"].items() for word in words.split()]
    chats: list[Any] = [[{"role": "user", "content": question}] for question in asked[: 2 * sizes.stories]]
    stories = [texts["story"].format(hero) for hero in texts["heroes"].split()[: sizes.stories]]
    params = SamplingParams(temperature=0, max_tokens=160)
    llm.chat(chats, params, use_tqdm=False)
    llm.generate(stories, params, use_tqdm=False)
    stats = llm.core.stats.speculation
    assert stats is not None
    llm.shutdown()
    share = stats.accepted_at[0] / stats.drafts
    length = 1 + stats.accepted_tokens / stats.drafts
    return [
        Claim("speculation", "first drafts of the bundled EAGLE-3 head that are accepted", "", share, 0.9, unit="%"),
        Claim("speculation", "tokens of a verification of its 5 drafts", "4–7", length, 3.0, unit="tokens"),
    ]


_CLAIMS: dict[str, Callable[[LLM, dict[str, Any], Sizes], list[Claim]]] = {
    "PagedAttention": _paged_attention,
    "prefix caching": _prefix_caching,
    "chunked prefill": _chunked_prefill,
    "structured outputs": _structured_outputs,
    "speculation": _speculation,
}
