"""Adapters that are made to stop or bloat the server: the request that names one fails, and nothing else does."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.async_llm import AsyncLLM
from quire.engine.llm import LLM
from quire.lora import patterns
from quire.lora.checkpoint import read_adapter
from quire.lora.files import CONFIG, WEIGHTS, adapter_files
from quire.lora.patterns import first_matches, values_by_module
from quire.messages.lora import LoRARequest
from quire.messages.sampling_params import SamplingParams
from quire.platform.untrusted.limits import BusyError
from quire.platform.untrusted.pool import PLACES, shared_pool
from support.adapters import modules_of, write_adapter
from support.attack_variants import JSON
from support.attacks import check_refused, steady_memory, witness
from support.odd_files import ODD_FILES, replace_file
from support.server import Answer, Host, Service, eventually

MODULES = {f"model.layers.{i}.self_attn.{name}_proj": (8, 8) for i in range(12) for name in ("q", "v")}
BOMB = ".*" * 14 + "x"
_LONG = patterns.Limits(cpu_seconds=600.0, memory_bytes=256 << 20, total_seconds=600.0)
BOMBS = [BOMB, "((m|o|d|e|l|.)*)*!", "(.+.+)+!", "(?:[a-z.0-9_]+)+!"]


def write(folder: Path, **config: Any) -> Path:
    return write_adapter(folder, MODULES, **config)


@pytest.fixture
def quick_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = patterns.Limits(cpu_seconds=0.05, memory_bytes=256 << 20, total_seconds=600.0)
    monkeypatch.setattr(patterns, "_LIMITS", limits)


# ---- patterns


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_backtracks_forever_is_an_error_that_names_the_field(
    tmp_path: Path, quick_limit: None, field: str, bomb: str
) -> None:
    adapter = write(tmp_path, **{field: {bomb: 4}})
    with pytest.raises(ValueError, match=f"{CONFIG}: {field} takes too long to match: it needs more than 0.05 s"):
        read_adapter(adapter)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"(": 4}, r"{field} has '\(', which is no regular expression"),
        ({"(a" * 400 + ")" * 400: 4}, "{field} has"),
        ({"a{1,99999999999}": 4}, "{field} has"),
        ({"a" * 1001: 4}, "{field} has a pattern of 1,001 characters; at most 1,000 are allowed"),
        ({f"{i}": 4 for i in range(10_001)}, "{field} has 10,001 patterns; at most 10,000"),
        ([1], "{field} must be an object, not of type list"),
        ("x", "{field} must be an object, not of type str"),
    ],
    ids=["syntax", "nested", "overflow", "long", "many", "list", "text"],
)
def test_patterns_of_a_wrong_form_are_errors_that_name_the_field(tmp_path: Path, value: Any, error: str) -> None:
    adapter = write(tmp_path, alpha_pattern=value)
    with pytest.raises(ValueError, match=error.format(field=f"{CONFIG}: alpha_pattern")):
        read_adapter(adapter)


def test_names_need_no_worker_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(patterns, "shared_pool")
    names = {"q_proj": 16, "layers.3.self_attn.v_proj": 32, "proj": 64, "self_attn.q": 64}
    matrices = read_adapter(write(tmp_path, alpha_pattern=names))
    plain = read_adapter(write(tmp_path / "plain"))
    for module, (_, b) in matrices.items():
        factor = 2 if module.endswith("q_proj") else 4 if ".3." in module else 1
        assert torch.equal(b, factor * plain[module][1])


_MODULE = st.lists(st.sampled_from(["a", "b", "ab", "q_proj", "0", "1", "11"]), min_size=1, max_size=4).map(".".join)
_PART = st.sampled_from(
    ["a", "b", "ab", "q_proj", "1", r"\d", ".", ".*", "[ab]", "(a|b)", r"\.", "q_(proj|x)", "+", "?"]
)
_PATTERN = st.lists(_PART, min_size=1, max_size=5).map("".join) | _MODULE


def _peft(keys: list[str], module: str) -> str | None:
    """PEFT's get_pattern_key."""
    return next((key for key in keys if re.match(rf"(.*\.)?({key})$", module)), None)


def _check_equal_to_peft(keys: list[str], modules: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for key in keys:
        try:
            re.compile(rf"(.*\.)?({key})$")
        except re.error:
            return
    modules = list(dict.fromkeys(modules))
    # A dot of a name counts as itself, so modules with other characters there are no example.
    expected = {module: key for module in modules if (key := _peft(keys, module)) is not None}
    dotted = {key for key in keys if patterns._NAME.fullmatch(key) and "." in key}
    found = values_by_module("rank_pattern", {key: key for key in keys}, modules)
    for module in modules:
        if expected.get(module) not in dotted:
            assert found.get(module) == expected.get(module)


class _InThisProcess:
    """In the place of the pool, for patterns that are known to be harmless."""

    def run(self, function: str, *arguments: Any, limits: Any) -> Any:
        assert function == "quire.lora.patterns:first_matches"
        return first_matches(*arguments)


def test_patterns_match_as_peft_matches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "shared_pool", _InThisProcess)

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.lists(_PATTERN, min_size=1, max_size=4, unique=True), st.lists(_MODULE, min_size=1, max_size=5))
    def check(keys: list[str], modules: list[str]) -> None:
        _check_equal_to_peft(keys, modules, monkeypatch)

    check()


def test_patterns_match_in_the_worker_process(tmp_path: Path) -> None:
    adapter = write(tmp_path, alpha_pattern={r".*\.1\d\..*q_proj": 16, "q_proj": 32, r"layers\.(2|3)\..*": 64})
    plain = read_adapter(write(tmp_path / "plain"))
    for module, (_, b) in read_adapter(adapter).items():
        is_q = module.endswith("q_proj")
        factor = (
            2 if is_q and re.search(r"\.1\d\.", module) else 4 if is_q else 8 if re.search(r"\.[23]\.", module) else 1
        )
        assert torch.equal(b, factor * plain[module][1]), module


@pytest.mark.nightly
@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from([*"am.l*+?|()[]{}1,^$\\", ".*", "(.+)+", "(a|a)*"]), max_size=30).map("".join))
def test_any_pattern_ends_within_its_limit(pattern: str) -> None:
    try:
        values_by_module("rank_pattern", {pattern: 1}, list(MODULES))
    except ValueError as error:
        assert "rank_pattern" in str(error)  # noqa: PT017


# ---- files


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize("name", [CONFIG, *WEIGHTS])
def test_what_is_no_regular_file_is_named(tmp_path: Path, name: str, kind: str) -> None:
    adapter = write(tmp_path / "adapter")
    error = replace_file(adapter / name, kind)
    with pytest.raises(ValueError, match=re.escape(error)):
        read_adapter(adapter)


def test_large_files_are_refused_before_they_are_read(tmp_path: Path) -> None:
    adapter = write(tmp_path / "weights")
    with (adapter / WEIGHTS[0]).open("r+b") as stream:
        stream.truncate(20 << 30)  # which takes no space
    with pytest.raises(ValueError, match=f"{WEIGHTS[0]} has 20.0 GiB; an adapter may have 16 GiB"):
        adapter_files(adapter)
    adapter = write(tmp_path / "config", note="x" * (1 << 20))
    with pytest.raises(ValueError, match=f"{CONFIG} has more than 1 MiB, the limit"):
        read_adapter(adapter)
    adapter = write(tmp_path / "header")
    (adapter / WEIGHTS[0]).write_bytes((90 << 20).to_bytes(8, "little"))
    with pytest.raises(ValueError, match=f"{WEIGHTS[0]} has a header of 94,371,840 bytes"):
        read_adapter(adapter)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[]", "5", "\xff", '{"r": 1e999}', "", "{"])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    adapter = write(tmp_path)
    (adapter / CONFIG).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=re.escape(CONFIG)):
        read_adapter(adapter)


def test_compressed_pickles_are_refused(tmp_path: Path) -> None:
    adapter = write(tmp_path, name=WEIGHTS[1])
    assert read_adapter(adapter).keys() == MODULES.keys()
    with zipfile.ZipFile(adapter / WEIGHTS[1]) as archive:
        parts = {part.filename: archive.read(part) for part in archive.infolist()}
    with zipfile.ZipFile(adapter / WEIGHTS[1], "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    with pytest.raises(ValueError, match=f"{WEIGHTS[1]} cannot be read: its parts are compressed"):
        read_adapter(adapter)


def test_tensors_that_repeat_a_number_a_billion_times_are_refused(tmp_path: Path) -> None:
    adapter = write(tmp_path)
    (adapter / WEIGHTS[0]).unlink()
    names = [f"model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB"]
    torch.save({name: torch.ones(1, dtype=torch.float16).expand(1 << 40) for name in names}, adapter / WEIGHTS[1])
    with pytest.raises(ValueError, match=f"{WEIGHTS[1]} cannot be read: its tensors are 8,388,608 MiB"):
        read_adapter(adapter)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    bad = {f"model.layers.0.self_attn.q_proj.lora_{half}.weight": torch.full((4, 4), torch.nan) for half in "AB"}
    with pytest.raises(ValueError, match=r"matrices of model.layers.0.self_attn.q_proj with NaN or infinity"):
        read_adapter(write_adapter(tmp_path / "weights", {}, tensors=bad))
    for fields in ({"lora_alpha": float("inf")}, {"lora_alpha": 10**400}, {"lora_alpha": True}, {"r": True}):
        adapter = write(tmp_path / "config")
        config = json.loads((adapter / CONFIG).read_text()) | fields
        (adapter / CONFIG).write_text(json.dumps(config))
        with pytest.raises(ValueError, match=f"{CONFIG} has r=.* and lora_alpha=.*, which must be numbers"):
            read_adapter(adapter)


def test_a_config_with_any_values_is_read_or_refused(tmp_path: Path, quick_limit: None) -> None:
    adapter = write(tmp_path)
    original = json.loads((adapter / CONFIG).read_text())
    names = st.sampled_from([*original, "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "modules_to_save"])

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(st.dictionaries(names, JSON, min_size=1, max_size=3))
    def check(changes: dict[str, Any]) -> None:
        (adapter / CONFIG).write_text(json.dumps(original | changes))
        try:
            assert len(read_adapter(adapter)) == len(MODULES)
        except ValueError as error:
            assert len(str(error)) < 2_000  # noqa: PT017

    check()


# ---- a pool that has too much to do


def test_a_request_whose_adapter_finds_the_pool_busy_may_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = patterns.Limits(cpu_seconds=60.0, memory_bytes=256 << 20, total_seconds=0.2)
    monkeypatch.setattr(patterns, "_LIMITS", limits)
    llm = LLM(dtype="float32", max_num_seqs=4, kv_cache_memory_bytes=64 << 20, enable_lora=True, max_lora_rank=8)
    adapter = write_adapter(tmp_path, modules_of(llm), alpha_pattern={"x.*": 4})
    request = LoRARequest("a", lora_path=str(adapter))
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    others = [shared_pool().submit("support.untrusted_jobs:sleep", 600.0, limits=_LONG) for _ in range(PLACES)]
    try:
        with pytest.raises(BusyError, match=r"adapter 'a' cannot be used: it .* for 0.2 s, the limit"):
            llm.generate(["Once"], params, lora_request=request, use_tqdm=False)
    finally:
        for other in others:
            other.cancel()
    monkeypatch.setattr(patterns, "_LIMITS", _LONG)
    eventually(lambda: _is_loaded(llm, request, params))


def _is_loaded(llm: LLM, request: LoRARequest, params: SamplingParams) -> bool:
    try:
        [output] = llm.generate(["Once"], params, lora_request=request, use_tqdm=False)
    except BusyError:  # for a second
        return False
    return len(output.outputs[0].token_ids) == 2


# ---- a server


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host(dtype="float32", max_num_seqs=4, kv_cache_memory_bytes=64 << 20, enable_lora=True, max_lora_rank=8)
    yield host
    host.close()


@pytest.fixture(scope="module")
def service(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("adapters")
    write(folder / "bomb", rank_pattern={BOMB: 4})
    write(folder / "pipe")
    replace_file(folder / "pipe" / WEIGHTS[0], "pipe")
    write(folder / "usual", rank_pattern={".*q_proj": 4})
    service = host.serve(enable_admin_api=True, lora_folder=str(folder))
    with steady_memory(lambda: load(service, "usual")):
        yield service


def load(service: Service, path: str) -> Answer:
    return service.post("/v1/load_lora_adapter", {"lora_name": path, "lora_path": path})


@pytest.mark.slow
def test_a_client_gets_an_error_and_other_requests_go_on(host: Host, service: Service) -> None:
    with witness(service):
        answer = load(service, "bomb")
    message = check_refused(answer, 400, 503)
    if answer.status == 400:  # not on a machine that leaves it no time
        assert "rank_pattern takes too long to match: it needs more than 2 s of processor time" in message
        assert answer.error["param"] == "lora_path"
    eventually(lambda: host.is_idle)


def test_a_client_whose_adapter_finds_the_pool_busy_gets_a_503(
    monkeypatch: pytest.MonkeyPatch, service: Service
) -> None:
    async def refuse(self: AsyncLLM, request: LoRARequest) -> None:
        raise BusyError("adapter 'pipe' cannot be used: it waited for other requests for 20 s, the limit")

    monkeypatch.setattr(AsyncLLM, "add_lora", refuse)
    answer = load(service, "pipe")
    assert (answer.status, answer.error["code"]) == (503, "server_overloaded")
    assert answer.headers["retry-after"] == "1"
    assert "it waited for other requests" in answer.error["message"]


@pytest.mark.slow
def test_a_client_gets_an_error_for_a_pipe(service: Service) -> None:
    with witness(service):
        answer = load(service, "pipe")
    assert f"{WEIGHTS[0]} is a named pipe" in check_refused(answer, 400)
