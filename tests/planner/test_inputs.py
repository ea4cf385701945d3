"""What users write: devices, objectives, traffic and layouts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.slo import Limit, parse
from quire.planner.devices import DEVICES, parse_devices
from quire.planner.layout import Layout, layouts, parse_layout
from quire.planner.traffic import PIECE, Arrival, read_traffic


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("H100x8", "H100", 8),
        ("h100", "H100", 1),
        ("a100-80gb*4", "A100", 4),
        ("RTX 4090x2", "RTX-4090", 2),
        ("rtx_pro_6000", "RTX-PRO-6000", 1),
        ("EPYC-9654", "EPYC-9654", 1),
    ],
)
def test_devices_are_found_by_name_and_number(text, name, count):
    assert parse_devices(text) == (DEVICES[name], count)


@pytest.mark.parametrize("text", ["", "x8", "H100x0", "H100x9999", "V100x8"])
def test_unknown_devices_are_errors_that_list_the_known_ones(text):
    with pytest.raises(ValueError, match=r"^gpus=.*(known devices are: H100|from 1 to 1024)"):
        parse_devices(text)


def test_devices_reach_a_part_of_their_data_sheet():
    for name, device in DEVICES.items():
        assert 0 < device.reached_bandwidth < device.bandwidth, name
        assert all(0 < device.products(dtype) < rate for dtype, rate in device.rates.items()), name
        assert device.weight_bandwidth <= device.reached_bandwidth, name
        assert 8 * 2**30 <= device.memory <= 2**40, name
        assert 2e10 < device.bandwidth < 1e13, name  # in the right unit
        assert 1e12 < device.rates["bf16"] < 1e16, name


def test_objectives_are_read():
    assert parse("ttft=500ms, itl=50ms,e2e=10s") == [Limit("ttft", 0.5), Limit("itl", 0.05), Limit("e2e", 10.0)]
    assert parse("p95:TPOT=1.5ms,tpot=3ms") == [Limit("tpot", 0.0015, 95.0), Limit("tpot", 0.003, 99.0)]
    assert str(parse("p50:ttft=2s")[0]) == "p50 TTFT ≤ 2 s"


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft=500", "latency=5ms", "ttft=-1ms", "p0:ttft=1s", "p101:ttft=1s", "ttft=1s,ttft=2s", "ttft=0ms"],
)
def test_wrong_objectives_are_errors(text):
    with pytest.raises(ValueError, match=r"^slo="):
        parse(text)


def test_a_description_is_traffic_at_that_rate():
    traffic = read_traffic("rate=10,input=1000,output=100,requests=200,spread=0.5")
    assert traffic.rate == pytest.approx(10)
    assert {500 <= a.prompt <= 1500 and 50 <= a.output <= 150 for a in traffic.arrivals} == {True}
    assert len({a.prompt for a in traffic.arrivals}) > 50
    times = [a.time for a in traffic.arrivals]
    assert times == sorted(times)
    assert traffic == read_traffic("rate=10,input=1000,output=100,requests=200,spread=0.5")
    assert traffic.at_rate(20).rate == pytest.approx(20)
    assert math.isinf(read_traffic("rate=inf,input=10,output=10").rate)


def test_prompts_may_begin_alike():
    traffic = read_traffic("rate=10,input=100,output=10,requests=50,prefix=1000,prefixes=3")
    assert traffic.has_prefixes
    assert {a.prompt for a in traffic.arrivals} == {1024 + 100}  # in whole pieces
    assert len({a.pieces for a in traffic.arrivals}) == 3


@given(st.integers(1, 3000), st.lists(st.integers(0, 9), max_size=4), st.integers(0, 1000))
def test_a_prompt_has_its_tokens(rest, pieces, number):
    arrival = Arrival(0.0, PIECE * len(pieces) + rest, 1, tuple(pieces))
    tokens = arrival.tokens(number)
    assert len(tokens) == arrival.prompt
    assert tokens[PIECE * len(pieces) :] == [-1 - number] * rest
    assert [tokens[PIECE * i] for i in range(len(pieces))] == pieces


def write(path: Path, *lines: object) -> str:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def test_traces_of_several_kinds_are_read(tmp_path):
    mooncake = {"timestamp": 27_482, "input_length": 6755, "output_length": 500, "hash_ids": [*range(14)]}
    later = {"timestamp": 30_482, "input_length": 7319, "output_length": 490, "hash_ids": [0, 1, 2, 99]}
    first, second = read_traffic(write(tmp_path / "trace.jsonl", later, mooncake)).arrivals
    assert (first.time, first.prompt, first.output) == (0.0, 6755, 500)
    assert first.pieces == tuple(range(13))  # the last piece is not whole
    assert (second.time, second.pieces) == (3.0, (0, 1, 2, 99))
    text = "Once upon a time, there was a cat. " * 300
    prompts = [{"prompt": text + end, "output_tokens": 5, "arrival": 1.5} for end in "ab"]
    one, other = read_traffic(write(tmp_path / "prompts.jsonl", *prompts)).arrivals
    assert one.pieces == other.pieces != ()
    assert one.prompt == pytest.approx(len(text) / 4, rel=0.01)
    ids = {"prompt_token_ids": [1] * 1200, "max_tokens": 7, "arrival": 0}
    assert read_traffic(write(tmp_path / "ids.jsonl", ids)).arrivals[0].prompt == 1200


def test_a_rate_replaces_the_times_of_a_file(tmp_path):
    lines = [{"input_length": 10 + i, "output_length": 3} for i in range(20)]
    name = write(tmp_path / "requests.jsonl", *lines)
    with pytest.raises(ValueError, match=r"give a rate: --traffic .*,rate=10"):
        read_traffic(name)
    traffic = read_traffic(f"{name},rate=4,requests=10")
    assert traffic.rate == pytest.approx(4)
    assert [a.prompt for a in traffic.arrivals] == [10 + i for i in range(10)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.jsonl", "there is no file nowhere.jsonl"),
        ("rate=10,input=5", "needs output=TOKENS"),
        ("rate=10,input=0,output=5", "input must be at least 1"),
        ("rate=ten,input=5,output=5", "'rate=ten' must be one of"),
        ("rate=1,rate=2,input=5,output=5", "each once"),
        ("rate=0,input=5,output=5", "must be positive"),
        ("rate=1,input=5,output=5,spread=1", "spread must be"),
        ("rate=1,input=5,output=5,colour=1", "'colour=1' must be one of"),
    ],
)
def test_wrong_traffic_is_an_error_that_says_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        read_traffic(text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "must be a JSON object"),
        ({"input_length": 5, "arrival": 0}, "needs the number of output tokens"),
        ({"output_length": 5, "arrival": 0}, 'needs "input_length"'),
        ({"output_length": 5, "prompt": "", "arrival": 0}, 'needs "input_length"'),
        ({"output_length": "many", "input_length": 5}, "invalid literal"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    good = {"input_length": 5, "output_length": 5, "arrival": 0}
    with pytest.raises(ValueError, match=f"line 2: .*{message}"):
        read_traffic(write(tmp_path / "trace.jsonl", good, line))


def test_layouts_use_all_devices(llama, mixture):
    found = layouts(8, llama.spec)
    assert len(found) == len(set(found)) == 10
    assert {layout.ranks for layout in found} == {8}
    assert not any(layout.ep for layout in found)
    of_mixture = layouts(8, mixture.spec)
    assert {Layout(8, ep=True), Layout(1, 1, 8, True), Layout(2, 2, 2, True)} < set(of_mixture)
    assert Layout(1, 8, 1, True) not in of_mixture  # a stage of one rank has nobody to share experts with
    assert layouts(64, llama.spec)[-1].tp * layouts(64, llama.spec)[-1].pp <= 64
    assert max(layout.tp for layout in layouts(64, llama.spec)) == 32  # heads


def test_layouts_are_read_and_written():
    assert parse_layout("tp=4,dp=2,ep") == Layout(4, 1, 2, True)
    assert parse_layout("pp=3").flags == "-pp 3"
    assert str(Layout(4, 1, 2, True)) == "tp 4 × dp 2 + ep"
    for wrong in ("", "tp", "tp=0", "tp=2,tp=4", "xp=2", "tp=2;dp=2"):
        with pytest.raises(ValueError, match=r"^layout="):
            parse_layout(wrong)
