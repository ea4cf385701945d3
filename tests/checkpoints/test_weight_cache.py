"""Weights that one start keeps are those of the next, bit for bit; and nothing that is in the folder does harm."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quire.checkpoints.packed.cache
from quire.checkpoints.packed import packed_file
from quire.checkpoints.packed.forms import FormError, decode, encode
from quire.config.engine import ConfigError, EngineConfig
from quire.engine.llm import LLM
from quire.ops.cpu.build import library
from quire.platform.folders import cache_folder
from quire.platform.kept_files import KeptFiles, NoRoomError
from quire.worker.resident_memory import _tensors
from support.checkpoints import FAMILIES, write_checkpoint
from support.engines import generate, loaded_by, logits_of_ranks, make_llm, runner_of, tokens_of, workers_of_ranks
from support.gguf_files import write_gguf
from support.quantized import FORMATS, FURTHER, write_quantized
from support.reference import prompts

TEXTS = prompts(300, 3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, in which models of any size are kept."""
    if library() is None:
        pytest.skip("the CPU kernels cannot be compiled here")
    cache, users = tmp_path / "cache" / "quire", cache_folder()
    cache.mkdir(parents=True)
    if users is not None and (users / "kernels").is_dir():  # for processes that tests start
        (cache / "kernels").symlink_to(users / "kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(quire.checkpoints.packed.cache, "WORTHWHILE", 0)
    return cache / "weights"


def wait_until_kept() -> None:
    for thread in threading.enumerate():
        if thread.name == "quire-weights":
            thread.join()


def start(path: Path, **options: Any) -> LLM:
    """An engine that has kept its weights, if it keeps them."""
    llm = make_llm(path, **options)
    wait_until_kept()
    return llm


def is_mapped(llm: LLM) -> bool:
    cache = loaded_by(llm).weight_cache
    return cache is not None and cache.mapped > 0


def assert_equal(one: Any, other: Any) -> None:
    ones, others = list(_tensors(one, set())), list(_tensors(other, set()))
    assert len(ones) == len(others)
    for a, b in zip(ones, others, strict=True):
        assert a.dtype is b.dtype
        assert a.shape == b.shape
        assert torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def check_second_start(path: Path, **options: Any) -> None:
    first, second = start(path, **options), start(path, **options)
    assert not is_mapped(first)
    assert is_mapped(second)
    assert_equal(runner_of(first).model, runner_of(second).model)
    assert tokens_of(generate(first, TEXTS)) == tokens_of(generate(second, TEXTS))


FAST = ["llama", "gpt2", "gemma2", "mixtral", "deepseek_v3", "qwen3_next"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", FAST)
def test_the_second_start_has_the_weights_of_the_first(folder, checkpoints, family):
    """Dense, transposed, tied, with experts, absorbed, with states."""
    check_second_start(checkpoints.path(FAMILIES[family][0]))


@pytest.mark.sampled(7)
@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in FAST])
def test_so_it_is_for_every_family(folder, checkpoints, family):
    check_second_start(checkpoints.path(FAMILIES[family][0]))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"quantization": "int8", "dtype": "bfloat16"},
        {"quantization": "int4"},
        {"quantization": "int4", "dtype": "bfloat16"},
        {"dtype": "float16"},
    ],
)
@pytest.mark.sampled(10)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_weights_may_be_quantized_at_load(folder, checkpoints, family, options):
    check_second_start(checkpoints.path(FAMILIES[family][0]), **options)


IN_EACH_RUN = [("gptq-act-order", "bfloat16"), ("nf4", "float32")]


@pytest.mark.sampled(84)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if (name, dtype) in IN_EACH_RUN else pytest.mark.sampled(16))
        for name in [*FORMATS, *FURTHER]
        for dtype in ("float32", "bfloat16")
    ],
)
def test_checkpoints_may_be_quantized(folder, tmp_path, name, dtype):
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 2}
    source = write_checkpoint(tmp_path / "source", "llama", sizes)
    quantized, _ = write_quantized(source, tmp_path, {**FORMATS, **FURTHER}[name])
    check_second_start(quantized, dtype=dtype)


@pytest.mark.parametrize("kind", ["Q4_K", "F16"])
def test_checkpoints_may_be_gguf_files(folder, checkpoints, tmp_path, kind):
    path = write_gguf(checkpoints.path("llama-gqa2-tied-llama3"), tmp_path / "model.gguf", kind)
    check_second_start(path, dtype="bfloat16")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"quantization": "int4"}, {"enable_expert_parallel": True}])
def test_each_rank_has_weights_of_its_own(folder, checkpoints, options):
    path = checkpoints.path(FAMILIES["mixtral"][0])
    first = [worker.runner for worker in workers_of_ranks(path, 2, **options)]
    wait_until_kept()
    assert len(list(folder.iterdir())) == 2
    workers = workers_of_ranks(path, 2, **options)
    second = [worker.runner for worker in workers]
    for one, other, worker in zip(first, second, workers, strict=True):
        assert worker.loaded.weight_cache.mapped
        assert_equal(one.model, other.model)
    assert torch.equal(logits_of_ranks(first, TEXTS[0]), logits_of_ranks(second, TEXTS[0]))


# ---- which weights are kept


def test_models_that_are_small_enough_anyway_are_not_kept(folder, checkpoints, monkeypatch):
    monkeypatch.undo()
    assert loaded_by(start(checkpoints.path("llama"))).weight_cache is None


@pytest.mark.parametrize("options", [{"weight_cache": False}, {"load_format": "dummy"}])
def test_an_engine_may_keep_nothing(folder, checkpoints, options):
    assert loaded_by(start(checkpoints.path("llama"), **options)).weight_cache is None
    assert not folder.exists()


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"kernels": {"linear": "reference"}}]
)
def test_other_options_are_other_weights(folder, checkpoints, options):
    start(checkpoints.path("llama"))
    assert not is_mapped(start(checkpoints.path("llama"), **options))
    assert len(list(folder.iterdir())) == 2


def test_a_checkpoint_that_has_changed_is_read_again(folder, checkpoints, tmp_path):
    """Even if its size is the same, and someone has set its time."""
    path = Path(shutil.copytree(checkpoints.path("llama"), tmp_path / "model"))
    before = tokens_of(generate(start(path), TEXTS))
    file = path / "model.safetensors"
    info, tensors = file.stat(), load_file(file)
    save_file({name: tensor.flip(0) for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert file.stat().st_size == info.st_size
    llm = start(path)
    assert not is_mapped(llm)
    assert tokens_of(generate(llm, TEXTS)) != before


def test_a_restored_engine_takes_other_weights(folder, checkpoints, tmp_path):
    """They are not kept, and do not change what is kept."""
    path = checkpoints.path("llama")
    other = Path(shutil.copytree(path, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor.flip(0) for name, tensor in tensors.items()}, other / "model.safetensors")
    expected = [tokens_of(generate(start(p), TEXTS)) for p in (path, other)]
    count = len(list(folder.iterdir()))
    llm = start(path)
    assert is_mapped(llm)
    llm.sleep(level=2)
    llm.wake_up()
    assert tokens_of(generate(llm, TEXTS)) == expected[0]
    llm.update_weights(str(other))
    assert tokens_of(generate(llm, TEXTS)) == expected[1]
    wait_until_kept()
    assert len(list(folder.iterdir())) == count
    assert tokens_of(generate(start(path), TEXTS)) == expected[0]


def test_weights_that_change_are_not_kept(folder, checkpoints, tmp_path, monkeypatch):
    """Writing is given up before they change."""
    written = threading.Event()

    def write(*arguments: Any) -> None:
        written.wait()
        packed_file.write(*arguments)

    monkeypatch.setattr(quire.checkpoints.packed.cache, "write", write)
    llm = make_llm(checkpoints.path("llama"))
    llm.sleep(level=2)
    written.set()
    wait_until_kept()
    assert not list(folder.iterdir())


def test_nothing_is_kept_of_weights_that_changed_while_they_were_written(tmp_path):
    tensors = [torch.zeros(1 << 20), torch.zeros(3)]
    changes = iter([False, True])
    with (tmp_path / "file").open("w+b") as file, pytest.raises(packed_file.StoppedError):
        packed_file.write(file.fileno(), None, tensors, lambda: next(changes))


def test_the_file_counts_as_memory_that_is_used(folder, checkpoints, monkeypatch):
    """The system says that it could be freed, but the KV cache must not take its place."""
    path, free = checkpoints.path("llama"), 1 << 22
    monkeypatch.setattr("quire.worker.assembly.cache.free_on_host", lambda mapped: free - mapped)
    start(path)
    llm = make_llm(path)
    mapped = loaded_by(llm).weight_cache.mapped
    assert 0 < mapped < free / 2
    kv = llm.core.executor.kv_cache
    assert kv.num_blocks == (free - mapped) // 2 // sum(kv.rank_bytes)


# ---- the folder and its files


def kept_file(folder: Path) -> Path:
    (file,) = folder.glob("*.weights")
    return file


def spoil(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "empty":
        content.clear()
    elif how == "cut off":
        del content[len(content) // 2 :]
    elif how == "longer":
        content += bytes(64)
    elif how == "one bit of a tensor":
        content[-100] ^= 1
    elif how == "one bit of the header":
        content[100] ^= 1
    elif how == "zeros":
        content = bytearray(len(content))
    file.write_bytes(content)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["empty", "cut off", "longer", "one bit of a tensor", "one bit of the header", "zeros"])
def test_a_damaged_file_is_replaced(folder, checkpoints, caplog, how):
    path = checkpoints.path("llama")
    expected = tokens_of(generate(start(path), TEXTS))
    spoil(kept_file(folder), how)
    llm = start(path)
    assert not is_mapped(llm)
    assert "damaged" in caplog.text
    assert tokens_of(generate(llm, TEXTS)) == expected
    assert is_mapped(start(path))


def test_a_file_that_another_user_could_have_written_is_not_used(folder, checkpoints, caplog):
    path = checkpoints.path("llama")
    start(path)
    kept_file(folder).chmod(0o666)
    with caplog.at_level("INFO"):
        assert not is_mapped(start(path))
    assert "another user" in caplog.text


def test_a_folder_that_cannot_be_written_does_no_harm(folder, checkpoints, caplog):
    path = checkpoints.path("llama")
    folder.write_text("a file in its place")
    with caplog.at_level("INFO"):
        llm = start(path)
    assert "not kept" in caplog.text
    assert generate(llm, TEXTS)


@pytest.mark.slow
def test_a_read_only_folder_is_read(folder, checkpoints):
    path = checkpoints.path("llama")
    start(path)
    code = (
        "import sys; from quire.checkpoints.packed import cache; cache.WORTHWHILE = 0; from quire import LLM;"
        "llm = LLM(sys.argv[1], dtype='float32', max_model_len=176, max_num_seqs=32, mamba_block_size=16);"
        "print(llm.core.executor._worker.loaded.weight_cache.mapped)"
    )
    command = ["unshare", "--mount", "sh", "-c", f'mount --bind -o ro "{folder}" "{folder}" && exec "$@"', "sh"]
    allowed = subprocess.run([*command, "true"], capture_output=True)
    if allowed.returncode:
        pytest.skip("file systems cannot be mounted here")
    shown = subprocess.run([*command, sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert int(shown.stdout) > 0


def test_a_full_disk_does_no_harm(folder, checkpoints, caplog, monkeypatch):
    monkeypatch.setattr("quire.platform.kept_files._SPARE", 1 << 60)
    with caplog.at_level("INFO"):
        assert generate(start(checkpoints.path("llama")), TEXTS)
    assert "no room" in caplog.text
    assert not list(folder.iterdir())


def test_a_disk_that_becomes_full_leaves_nothing_behind(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    weights = KeptFiles(tmp_path, 1 << 30)

    def write(handle: int) -> None:
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")

    with pytest.raises(OSError, match="No space"):
        weights.write("a", 100, write)
    assert not list(tmp_path.iterdir())


def test_the_limit_can_be_chosen(folder, checkpoints, caplog):
    with caplog.at_level("INFO"):
        start(checkpoints.path("llama"), weight_cache_size="1K")
    assert "weight_cache_size" in caplog.text
    assert not list(folder.iterdir())
    with pytest.raises(ConfigError, match="weight_cache_size"):
        EngineConfig.create(weight_cache_size=0)


def fill(weights: KeptFiles, name: str, size: int) -> bool:
    return weights.write(name, size, lambda handle: os.ftruncate(handle, size))


def test_what_was_not_used_for_the_longest_time_makes_room(tmp_path):
    weights = KeptFiles(tmp_path, 100)
    for name, time in (("old", 1), ("used", 2), ("new", 3)):
        fill(weights, name, 30)
        os.utime(tmp_path / f"{name}.weights", (time, time))
    with weights.opened("old") as handle:  # which is now the last to go
        assert fill(weights, "large", 65)
        assert os.fstat(handle).st_size == 30
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["large", "old"]
    with pytest.raises(NoRoomError):
        fill(weights, "too large", 101)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["large", "old"]


def test_a_deleted_file_stays_readable_for_who_has_it(folder, checkpoints):
    path = checkpoints.path("llama")
    expected = tokens_of(generate(start(path), TEXTS))
    llm = start(path)
    shutil.rmtree(folder)
    assert tokens_of(generate(llm, TEXTS)) == expected


def test_what_a_killed_process_left_is_deleted(tmp_path):
    weights = KeptFiles(tmp_path, 1000)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.part").write_bytes(b"half")
    with (tmp_path / "c.part").open("rb") as written:  # another process is at it
        fcntl.flock(written, fcntl.LOCK_EX)
        assert fill(weights, "a", 10)
        assert not fill(weights, "c", 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.weights", "c.part"]
    assert (tmp_path / "a.weights").read_bytes() == bytes(10)


def test_a_file_may_be_taken_for_abandoned_before_it_is_locked(tmp_path):
    """Another process that makes room deletes it, and it is written nevertheless."""
    weights, unfinished = KeptFiles(tmp_path, 1000), tmp_path / "a.part"
    with unfinished.open("w") as deleted:
        fcntl.flock(deleted, fcntl.LOCK_SH)
        writer = threading.Thread(target=fill, args=(weights, "a", 10))
        writer.start()
        unfinished.unlink()
    writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["a.weights"]


def test_all_files_of_processes_that_start_at_once_are_written(tmp_path):
    """As those of ranks, which differ."""

    def work(name: str) -> None:
        for index in range(50):
            assert fill(KeptFiles(tmp_path, 1 << 30), f"{name}{index}", 10)

    with ThreadPoolExecutor() as threads:
        list(threads.map(work, "abcd"))


def test_processes_that_start_at_once_write_one_file(tmp_path):
    """Each finds that the file is there, or that another process writes it; and only whole files have the name."""
    weights, written = KeptFiles(tmp_path, 1 << 30), []

    def write(handle: int) -> None:
        for _ in range(50):
            os.write(handle, b"x" * 1000)
        written.append(handle)

    def work() -> None:
        for _ in range(20):
            weights.write("a", 50_000, write)
            if (tmp_path / "a.weights").exists():
                with weights.opened("a") as handle:
                    assert os.fstat(handle).st_size == 50_000

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.weights"]


# ---- forms


def test_unknown_forms_are_not_kept_and_not_read():
    class Other:
        pass

    with pytest.raises(FormError, match="Other"):
        encode([Other()])
    for data in (["Other", {}], ["tensor", 5], ["Panels", {"rows": 1}], ["list", 3], "text", ["Panels", []]):
        with pytest.raises(FormError):
            decode(data, [])


def test_a_tensor_of_two_weights_stays_one():
    shared = torch.ones(3)
    data, tensors = encode([shared, [shared]])
    assert len(tensors) == 1
    one, (other,) = decode(data, tensors)
    assert one is other


@pytest.mark.parametrize("shape", [(0, 5), (), (3, 7), (1,)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_tensors_of_all_kinds_can_be_kept(tmp_path, shape, dtype):
    tensors = [torch.arange(35)[: max(1, torch.Size(shape).numel())].to(dtype).view(-1)[: torch.Size(shape).numel()]]
    tensors = [tensor.view(shape) for tensor in tensors] * 2
    with (tmp_path / "file").open("w+b") as file:
        packed_file.write(file.fileno(), {"a": [1, None]}, tensors, lambda: False)
        weights, read = packed_file.read(file.fileno())
    assert weights == {"a": [1, None]}
    for one, other in zip(tensors, read, strict=True):
        assert one.dtype is other.dtype
        assert one.shape == other.shape
        assert one.tolist() == other.tolist()
