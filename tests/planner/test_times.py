"""Counted and fitted step times."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.planner.devices import DEVICES
from quire.planner.fitted import VERSION, Fit, Fitted, Sample, read_fit, shape_of, write_fit
from quire.planner.layout import Layout
from quire.planner.roofline import RooflineTimes
from quire.planner.work import StepWork, pairs, step_work

H100 = DEVICES["H100"]
WINDOWS = st.one_of(st.none(), st.integers(1, 60))


@given(st.integers(0, 100), st.integers(0, 50), WINDOWS)
def test_pairs_are_counted(start, count, window):
    seen = [position + 1 for position in range(start, start + count)]
    assert pairs(start, count, window) == sum(min(n, window or n) for n in seen)


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 9)), min_size=1, max_size=9), WINDOWS)
def test_the_work_of_a_step_is_that_of_its_requests(rows, window):
    ends, counts = [start + count for start, count in rows], [count for _, count in rows]
    work = step_work(ends, counts, len(rows), (window,))
    assert (work.tokens, work.requests) == (sum(counts), len(rows))
    ones = [end for end, count in zip(ends, counts, strict=True) if count == 1]
    others = [(end, count) for end, count in zip(ends, counts, strict=True) if count > 1]
    assert work.read == (sum(min(end, window or end) for end in ones),)
    assert work.prompts == len(others)
    assert work.pairs == (sum(pairs(end - count, count, window) for end, count in others),)
    assert work.keys == (sum(end - max(0, end - count - (window or end) + 1) for end, count in others),)


def decode(context: int, requests: int = 1) -> StepWork:
    return step_work([context] * requests, [1] * requests, requests, (None,))


def prompt(tokens: int, start: int = 0) -> StepWork:
    return step_work([start + tokens], [tokens], 1, (None,))


def test_one_token_takes_the_time_to_read_the_weights(llama):
    (seconds,) = RooflineTimes(llama, Layout(), H100).stages([decode(1)])
    least = llama.weights(None)[1] / H100.weight_bandwidth
    assert least < seconds < 1.15 * least


def test_a_prompt_takes_the_time_of_its_products(llama):
    times = RooflineTimes(llama, Layout(), H100)
    (seconds,) = times.stages([prompt(8192)])
    head = llama.parameters.output
    products = 2 * (llama.parameters.active - llama.parameters.embedding - head) * 8192 / H100.products("bf16")
    assert products < seconds < 1.5 * products


@pytest.mark.parametrize("layout", [Layout(), Layout(4), Layout(1, 4), Layout(2, 2)])
def test_more_work_takes_longer(llama, layout):
    times = RooflineTimes(llama, layout, H100)
    growing = [decode(1), decode(1, 8), decode(500, 8), decode(5000, 8), decode(5000, 64)]
    seconds = [sum(times.stages([work])) for work in growing]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == len(seconds)
    assert sum(times.stages([prompt(512)])) < sum(times.stages([prompt(512, 4000)])) < sum(times.stages([prompt(4096)]))


def test_ranks_share_the_work_and_pay_for_exchanges(llama):
    one, two, eight = (RooflineTimes(llama, Layout(tp), H100) for tp in (1, 2, 8))
    work = decode(1000, 16)
    assert one.explain(work)["exchanges"] == 0
    assert 0 < two.explain(work)["exchanges"] < 1e-3
    assert 1.3 < one.stages([work])[0] / two.stages([work])[0] < 2
    assert eight.stages([work])[0] < two.stages([work])[0]
    slow = RooflineTimes(llama, Layout(8), DEVICES["L4"])
    assert slow.explain(prompt(8192))["exchanges"] > eight.explain(prompt(8192))["exchanges"] * 10


def test_the_parts_of_a_step_add_up(llama):
    times = RooflineTimes(llama, Layout(2, 2), H100)
    for work in (decode(700, 5), prompt(300)):
        assert sum(times.explain(work).values()) == pytest.approx(sum(times.stages([work])))
    assert len(times.stages([decode(1)])) == 2


def test_fewer_bits_are_read_faster(llama):
    plain, int8, int4 = (RooflineTimes(llama, Layout(), H100, q).stages([decode(1)])[0] for q in (None, "int8", "int4"))
    assert int4 < int8 < plain
    assert (
        RooflineTimes(llama, Layout(), H100, "int8").stages([prompt(8000)])[0]
        < 0.7 * RooflineTimes(llama, Layout(), H100).stages([prompt(8000)])[0]
    )


def test_few_tokens_read_few_experts(mixture):
    times = RooflineTimes(mixture, Layout(), H100)
    one, many = times.explain(decode(1))["experts"], times.explain(decode(1, 256))["experts"]
    assert one == pytest.approx(many * 8 / 128, rel=0.05)
    shared = RooflineTimes(mixture, Layout(1, 1, 8, True), H100)
    alone, together = (shared.stages([decode(1, 32)] * n)[0] for n in (1, 8))
    assert alone < together  # tokens of the others come to a rank's experts
    assert shared.stages([decode(1, 32)] * 8)[0] < times.stages([decode(1, 32)])[0]


def test_steps_without_graphs_keep_the_host_busy(mixture):
    captured, launched = RooflineTimes(mixture, Layout(), H100), RooflineTimes(mixture, Layout(1, 1, 2, True), H100)
    assert captured.host([decode(1)]) < 0.3e-3 < 2e-3 < launched.host([decode(1)] * 2)
    assert RooflineTimes(mixture, Layout(), DEVICES["EPYC-9654"]).host([decode(1)]) == 0.0


def test_layers_with_a_window_read_less(windows, llama):
    narrow, wide = (RooflineTimes(footprint, Layout(), H100) for footprint in (windows, llama))
    assert narrow.windows == (100,)
    short, long = (step_work([n] * 64, [1] * 64, 64, narrow.windows) for n in (100, 8000))
    assert narrow.stages([short]) == narrow.stages([long])
    assert wide.stages([decode(8000, 64)])[0] > 2 * narrow.stages([long])[0]


def samples(rng: random.Random, noise: float) -> list[Sample]:
    """Steps of a device with 2 ms a step that decodes, 30 µs a token, and 1 ns a cached token."""
    found = []
    for _ in range(400):
        requests = rng.choice((1, 2, 4, 8, 16, 24))
        ends, counts = [rng.randint(20, 3000) for _ in range(requests)], [1] * requests
        if rng.random() < 0.4:
            counts[0] = rng.choice((30, 100, 500))
            ends[0] += counts[0]
        work = step_work(ends, counts, requests, (None,))
        seconds = 2e-3 + 30e-6 * work.tokens + 1e-8 * work.read[0] + 2e-9 * work.pairs[0]
        found.append(Sample(work, seconds * (1 + noise * rng.random() ** 4)))
    return found


def fit(made: list[Sample], shape: str = "") -> Fit:
    return Fit(VERSION, "model", "machine", shape, None, (None,), (4096.0,), (2e4,), 100, 16, 32, 512, made)


def test_a_fit_finds_times_that_have_its_form():
    fitted = Fitted(fit(samples(random.Random(1), noise=0.0)))
    for sample in samples(random.Random(2), noise=0.0):
        assert fitted.seconds(sample.work) == pytest.approx(sample.seconds, rel=0.02)
    assert (fitted.coefficients >= 0).all()


def test_disturbed_measurements_do_not_lead_it_astray():
    fitted = Fitted(fit(samples(random.Random(1), noise=1.0)))
    errors = [fitted.seconds(s.work) / s.seconds - 1 for s in samples(random.Random(2), noise=0.0)]
    assert abs(np.median(errors)) < 0.12
    assert fitted.host([]) == 0.0


def test_a_fit_is_of_one_model(tmp_path, llama, mixture):
    path = tmp_path / "fit.json"
    made = fit(samples(random.Random(1), 0.0)[:5], shape_of(llama))
    write_fit(path, made)
    assert read_fit(path, llama, None) == made
    with pytest.raises(ValueError, match="was measured with another model"):
        read_fit(path, mixture, None)
    with pytest.raises(ValueError, match="quantization int8"):
        read_fit(path, llama, "int8")
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no file of quire plan measure"):
        read_fit(path, llama, None)
    write_fit(path, fit([], shape_of(llama)))
    with pytest.raises(ValueError, match="no measured steps"):
        read_fit(path, llama, None)
