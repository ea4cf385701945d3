"""GGUF files: every type of blocks as the gguf package reads it, whole models as transformers and llama.cpp run them.

What llama.cpp said was recorded: tests/data/record_gguf_greedy.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

import quire.checkpoints.gguf
from quire import SamplingParams
from quire.checkpoints.errors import ModelNotFoundError
from quire.checkpoints.formats.gguf import dequantize
from quire.checkpoints.formats.gguf_types import TYPES as READERS
from quire.checkpoints.formats.scheme import QuantizedWeight
from quire.checkpoints.gguf import read_gguf, read_part
from quire.checkpoints.gguf_models import gguf_config, gguf_tensors
from quire.checkpoints.hub import bundled_model
from quire.checkpoints.metadata import load_tokenizer
from quire.layers.linear import DenseWeight
from quire.text.tokenizer import Tokenizer
from support.checkpoints import write_checkpoint
from support.engines import (
    GREEDY,
    generate,
    logits_of_ranks,
    make_llm,
    runner_of,
    runners_of_ranks,
    teacher_forced_logits,
    tokens_of,
)
from support.ggml_blocks import HALVES, meaning, set_factors
from support.gguf_files import (
    FAMILIES,
    FURTHER_TYPES,
    TABLE_TYPES,
    TYPES,
    WIDE,
    in_parts,
    reference,
    write_family,
    write_gguf,
    write_meaning,
)
from support.reference import greedy, logits, prompts
from support.waiting import eventually

pytestmark = pytest.mark.texts

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "gguf_greedy.json").read_text("utf-8"))
TEXT = prompts(300, 9)[8][:60]
SOME = [
    *(pytest.param(kind, marks=pytest.mark.sampled(3)) for kind in (*TYPES, *TABLE_TYPES)),
    *(pytest.param(kind, marks=pytest.mark.sampled(12)) for kind in FURTHER_TYPES),
]


# ---- blocks


def test_the_types_are_those_of_the_gguf_package():
    known = {number: kind for number, kind in READERS.items() if kind.name != "Q2_0"}  # newer than the package
    assert [Type(number).name for number in known] == [kind.name for kind in known.values()]
    assert {kind.name for kind in known.values()} == {*TYPES, *TABLE_TYPES, *FURTHER_TYPES}
    for number, kind in known.items():
        assert (kind.elements, kind.nbytes) == gguf.GGML_QUANT_SIZES[Type(number)]
    others = {kind.name for kind in Type} - {kind.name for kind in known.values()}
    assert others == {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}, "these are no weights"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(7, 3), (1, 1), (300, 5)], ids=str)
@pytest.mark.parametrize("name", [kind.name for kind in READERS.values()])
def test_any_bytes_mean_what_the_gguf_package_says_bit_for_bit(name, shape):
    draw = np.random.default_rng(0)
    (kind,) = (kind for kind in READERS.values() if kind.name == name)
    data = draw.integers(0, 256, (*shape, kind.nbytes if name in HALVES else 256), dtype=np.uint8)
    if name in HALVES:  # numbers, not infinities
        set_factors(data, name, draw.normal(0, 0.01, shape))
    data = data.reshape(len(data), -1)
    made = dequantize(kind, torch.from_numpy(data)).float().numpy()
    expected = meaning(data, name)
    assert made.shape == expected.shape
    if name in HALVES:
        assert (made.view(np.int32) == expected.view(np.int32)).all()
    else:
        np.testing.assert_array_equal(made, expected)  # NaNs among them


# ---- whole models


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama: rotated elements stand side by side in GGUF, and the head is the embedding."""
    return write_checkpoint(tmp_path_factory.mktemp("wide"), "llama", {**WIDE, "tie_word_embeddings": True}, seed=3)


@pytest.mark.sampled(27)
@pytest.mark.parametrize("kind", SOME)
def test_a_file_says_what_transformers_says_with_the_weights_that_it_means(wide, tmp_path, kind):
    path = write_gguf(wide, tmp_path / "model.gguf", kind)
    model = reference(write_meaning(wide, tmp_path / "meaning", kind))
    llm = make_llm(path)
    torch.testing.assert_close(teacher_forced_logits(llm, TEXT), logits(model, TEXT), rtol=1e-4, atol=2e-4)
    continuations = greedy(model, [TEXT[:1], TEXT[:17], TEXT], 24)
    made = generate(llm, [c.prompt for c in continuations], GREEDY.clone(max_tokens=24))
    for continuation, token_ids in zip(continuations, tokens_of(made), strict=True):
        continuation.check(token_ids)
    weight = runner_of(llm).model.layers[0].mixer.qkv.weight
    assert isinstance(weight, DenseWeight if kind in ("F32", "F16", "BF16") else QuantizedWeight)


def check_against_llama_cpp(llm: Any, case: dict[str, Any], texts: list[list[int]]) -> None:
    """Wherever its best token won by more than the noise of its arithmetic: the best of the same texts, and what is
    generated up to the first place where it did not."""
    compared = agreed = count = 0
    for text, recorded in zip(texts, case["continuations"], strict=True):
        tokens, margins = recorded["tokens"], recorded["margins"]
        best = teacher_forced_logits(llm, text + tokens[:-1])[len(text) - 1 :].argmax(-1).tolist()
        sure = [margin > case["noise"] for margin in margins]
        assert [b for b, s in zip(best, sure, strict=True) if s] == [t for t, s in zip(tokens, sure, strict=True) if s]
        compared, count = compared + sum(sure), count + len(tokens)
        agreed += sum(b == t for b, t in zip(best, tokens, strict=True))
        certain = sure.index(False) if False in sure else len(tokens)
        (made,) = tokens_of(generate(llm, [text], GREEDY.clone(max_tokens=len(tokens))))
        assert made[:certain] == tokens[:certain]
    assert compared >= (0.8 if case["type"] in HALVES else 0.9) * count
    assert agreed >= 0.97 * count  # with the near-ties


def the_recorded_file(path: Path, case: dict[str, Any]) -> bool:
    return hashlib.sha256(path.read_bytes()).hexdigest() == case["sha256"]


@pytest.mark.sampled(13)
@pytest.mark.parametrize("case", [c for c in RECORDED["cases"] if not c["variant"]], ids=lambda case: case["type"])
def test_the_greedy_tokens_are_those_of_llama_cpp(tmp_path, case):
    path = write_gguf(bundled_model(), tmp_path / "model.gguf", case["type"], "llama-bpe")
    assert the_recorded_file(path, case), "the file is another one than llama.cpp was given: record its tokens again"
    check_against_llama_cpp(make_llm(path), case, RECORDED["texts"])


@pytest.mark.sampled(19)
@pytest.mark.parametrize("case", [c for c in RECORDED["cases"] if c["variant"]], ids=lambda case: case["variant"])
def test_so_are_those_of_each_family_and_its_logits_are_those_of_transformers(tmp_path, case):
    checkpoint = write_family(tmp_path / "checkpoint", case["variant"])
    for kind in ("Q8_0", "F32"):
        path = write_gguf(checkpoint, tmp_path / f"{kind}.gguf", kind)
        model = reference(write_meaning(checkpoint, tmp_path / kind, kind), case["variant"])
        llm = make_llm(path)
        torch.testing.assert_close(teacher_forced_logits(llm, TEXT), logits(model, TEXT), rtol=1e-4, atol=2e-4)
    # Another processor may draw weights whose last bits differ from those that llama.cpp was given. That changes the
    # logits by far less than the noise of its arithmetic, within which no token is compared.
    check_against_llama_cpp(llm, case, RECORDED["family_texts"])


def test_every_type_and_every_family_was_recorded():
    assert [(case["variant"], case["type"]) for case in RECORDED["cases"]] == [
        *(("", kind) for kind in TYPES),
        *((variant, "F32") for variant in FAMILIES),
    ]


def test_the_tokenizer_the_chat_template_and_the_ends_are_in_the_file(tmp_path):
    """The bundled model is in bfloat16, and so this file is the very same model."""
    path = write_gguf(bundled_model(), tmp_path / "model.gguf", "BF16", "llama-bpe")
    ours, theirs = load_tokenizer(path), load_tokenizer(bundled_model())
    for text in ("", "  Wie heißt du?\n\n 12345 <|im_end|>x", "One day, Tom's boat\tsank… 你好"):
        assert ours.encode(text) == theirs.encode(text)
    questions = ["What is the capital of France?", "Who are you?", "What is 12 plus 7?"]
    chats = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0, max_tokens=40)
    answers = [make_llm(given).chat(chats, params, use_tqdm=False) for given in (path, bundled_model())]
    for a, b in zip(*answers, strict=True):
        assert a.prompt_token_ids == b.prompt_token_ids
        assert a.outputs[0].text == b.outputs[0].text
        assert a.outputs[0].finish_reason == b.outputs[0].finish_reason == "stop"


# ---- files and directories


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return write_gguf(write_family(folder / "checkpoint", "llama-gqa2-tied-llama3"), folder / "model.gguf", "Q8_0")


def test_a_directory_with_one_model_is_that_model(small, tmp_path):
    shutil.copy(small, tmp_path / "model.gguf")
    expected = teacher_forced_logits(make_llm(small), TEXT)
    assert torch.equal(teacher_forced_logits(make_llm(tmp_path), TEXT), expected)
    assert torch.equal(teacher_forced_logits(make_llm(str(tmp_path / "model.gguf")), TEXT), expected)
    shutil.copy(small, tmp_path / "other.gguf")
    with pytest.raises(ModelNotFoundError, match=r"several models, give one of them: model.gguf, other.gguf"):
        make_llm(tmp_path)


def test_a_table_that_is_also_the_head_keeps_its_codes_and_gives_logits_in_float32(small):
    model = runner_of(make_llm(small, dtype="bfloat16")).model
    assert isinstance(model.embedding.table, QuantizedWeight)
    stored = next(t for t in gguf.GGUFReader(small).tensors if t.name == "token_embd.weight")
    table = torch.from_numpy(meaning(stored.data, stored.tensor_type.name).copy())
    assert stored.tensor_type == Type.Q8_0
    assert torch.equal(model.embedding(torch.tensor(TEXT)), table[TEXT].bfloat16())

    hidden = torch.randn(3, table.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    found = model.logits(hidden)
    assert found.dtype is torch.float32
    assert not torch.equal(found, found.bfloat16().float())
    torch.testing.assert_close(found, hidden.float() @ table.T, rtol=0, atol=0.02 * float(found.abs().max()))


def test_a_model_in_several_files_is_read_from_the_first(small, tmp_path):
    first, second, third = in_parts(small, tmp_path, 3)
    expected = teacher_forced_logits(make_llm(small), TEXT)
    for given in (first, tmp_path):
        assert torch.equal(teacher_forced_logits(make_llm(given), TEXT), expected)
    with pytest.raises(
        ValueError, match=r"model-00002-of-00003.gguf is one of 3 files; give the first.*-00001-of-00003"
    ):
        make_llm(second)
    third.unlink()
    with pytest.raises(ValueError, match=r"model-00003-of-00003.gguf cannot be read as GGUF: .*No such file"):
        make_llm(first)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", ["llama-gqa2-tied-llama3", "mixtral", "phi3"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
def test_two_ranks_say_what_one_does(tmp_path, variant, kind):
    """Heads in llama.cpp's order, tensors of all experts, projections that are fused in the file; blocks of 32."""
    source = write_family(tmp_path / "checkpoint", variant, {"intermediate_size": 128})
    path = write_gguf(source, tmp_path / "model.gguf", kind)
    wanted = teacher_forced_logits(make_llm(path), TEXT)
    torch.testing.assert_close(logits_of_ranks(runners_of_ranks(path, 2), TEXT), wanted, rtol=1e-4, atol=2e-4)


# ---- what is no such file


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(version: int = 3, tensors: int = 0, values: int = 0, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, values)


def array_of(kind: int, count: int) -> bytes:
    return header(values=1) + string("k") + struct.pack("<IIQ", 9, kind, count)


def tensor(kind: int, *shape: int, offset: int = 0, dims: int | None = None) -> bytes:
    entry = struct.pack(f"<I{len(shape)}QIQ", len(shape) if dims is None else dims, *shape, kind, offset)
    return header(tensors=1) + string("t") + entry + bytes(400)


def two_tensors(kind: int, *shape: int, offset: int) -> bytes:
    """The second one, of floats, begins at the offset."""
    first = string("t") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, 0)
    return header(tensors=2) + first + string("u") + struct.pack("<IQIQ", 1, 32, 0, offset) + bytes(400)


MALFORMED = {
    "empty": (b"", "cannot mmap an empty file"),
    "other letters": (header(magic=b"GGML"), "does not begin with the letters GGUF"),
    "too short": (b"GGUF\x03", "ends early"),
    "version 1": (header(version=1), r"version is 1 \(supported: 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), r"supported: 2 and 3, little-endian"),
    "tensors without end": (header(tensors=2**63), "ends early"),
    "values without end": (header(values=2**64 - 1), "ends early"),
    "a string without end": (header(values=1) + struct.pack("<Q", 2**64 - 8), "ends early"),
    "an array without end": (array_of(4, 2**62), f"an array of {2**62} values"),
    "a long array": (array_of(4, 2**24), "ends early"),
    "a long array of strings": (array_of(8, 2**24), "ends early"),
    "an array of arrays": (array_of(9, 1) + struct.pack("<IQ", 4, 0), "of the unknown type 9"),
    "a value of no type": (header(values=1) + string("k") + struct.pack("<I", 99), "of the unknown type 99"),
    "a tensor of no type": (tensor(99, 32), "tensor t is of ggml type 99, .*supported: F32, .*Q6_K"),
    "a tensor of another type": (tensor(15, 256, 1), "tensor t is of ggml type 15"),
    "no dimensions": (tensor(0), "tensor t has 0 dimensions"),
    "many dimensions": (tensor(0, 1, dims=2**32 - 1), "tensor t has 4294967295 dimensions"),
    "half a block": (tensor(2, 48, 1), "rows of 48 elements, which cannot be Q4_0"),
    "a truncated tensor": (tensor(0, 32, 32), "tensor t lies beyond the end of the file"),
    "a large tensor": (tensor(8, 2**40, 2**62), "tensor t lies beyond the end of the file"),
    "blocks of 128 as Q2_0": (two_tensors(42, 128, 4, offset=4 * 34), "tensors t and u overlap"),
    "a distant tensor": (tensor(0, 32, offset=2**64 - 32), "tensor t lies beyond the end of the file"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, name):
    data, message = MALFORMED[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=rf"broken.gguf cannot be read as GGUF: .*{message}"):
        make_llm(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_a_file_that_was_cut_off_is_an_error_that_names_a_tensor(small, tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(small.read_bytes()[:-20_000])
    with pytest.raises(ValueError, match=r"broken.gguf cannot be read as GGUF: tensor .* lies beyond the end"):
        make_llm(path)


def test_damage_anywhere_in_the_header_is_a_value_error_or_none(small, tmp_path):
    whole, path, draw = small.read_bytes(), tmp_path / "broken.gguf", random.Random(0)
    end = min(t.offset for t in read_gguf(small).tensors.values())
    refused = 0
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 3])):
            data[draw.randrange(end)] = draw.choice([0, 1, 128, 255])
        path.write_bytes(data)
        try:
            file = read_gguf(path)
            gguf_config(file), gguf_tensors(file), Tokenizer.from_gguf(file.metadata)
        except ValueError:
            refused += 1
    assert 100 < refused < 400


def settled(path: Path) -> Path:
    """The file, when its next change would have another time."""
    eventually(lambda: time.time_ns() - path.stat().st_ctime_ns > 2 * quire.checkpoints.gguf._SETTLED)
    return path


def test_the_header_is_read_once_for_an_engine(small, tmp_path, monkeypatch):
    path, read = settled(Path(shutil.copy(small, tmp_path / "model.gguf"))), []
    monkeypatch.setattr("quire.checkpoints.gguf.read_part", lambda part: read.append(part) or read_part(part))
    generate(make_llm(path), [TEXT])
    assert read == [path]
    make_llm(path)
    assert read == [path]


def test_a_file_that_has_changed_is_read_again(small, tmp_path):
    parts = [settled(part) for part in in_parts(small, tmp_path, 2)]
    file = read_gguf(parts[0])
    assert read_gguf(parts[0]) is file
    os.utime(parts[1])
    assert read_gguf(parts[0]) is not file
    parts[1].unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.gguf cannot be read"):
        read_gguf(parts[0])


def test_a_file_that_has_just_been_written_is_not_kept(small, tmp_path):
    """It may be written once more at the same time, as far as its times show."""
    path = Path(shutil.copy(small, tmp_path / "model.gguf"))
    assert read_gguf(path) is not read_gguf(path)


@pytest.mark.parametrize("seed", range(4))
def test_arrays_of_strings_are_read_at_once_and_one_by_one(tmp_path, seed, monkeypatch):
    """Strings that look like lengths, empty ones, and long ones, across the borders of what is searched at once."""
    monkeypatch.setattr("quire.checkpoints.gguf._AT_ONCE", 512)
    monkeypatch.setattr("quire.checkpoints.gguf._WALKED", 3)
    draw = random.Random(seed)
    kinds = ["a", "", "\0" * 9, "word", "é" * 200, "x" * 600, "\1" + "\0" * 7]
    texts = [draw.choice(kinds[: 4 if seed % 2 else None]) * draw.randrange(3) for _ in range(500)]
    values = b"".join(map(string, texts))
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("texts") + struct.pack("<IIQ", 9, 8, len(texts))
    path = tmp_path / "texts.gguf"
    path.write_bytes(header + values + bytes(600))
    assert list(read_part(path).metadata["texts"]) == texts
    for end in [*draw.sample(range(len(header), len(header + values)), 20), len(header + values) - 1]:
        path.write_bytes((header + values)[:end])
        with pytest.raises(ValueError, match="the file ends early"):
            read_part(path)


def with_metadata(source: Path, path: Path, **changes: int) -> Path:
    """uint32 values overwritten in place, underscores for the key's first dot."""
    data = bytearray(source.read_bytes())
    for key, value in changes.items():
        at = data.index(string(key.replace("_", ".", 1))) + 8 + len(key)
        assert data[at : at + 4] == struct.pack("<I", 4)
        data[at + 4 : at + 8] = struct.pack("<I", value)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [("block_count", 2**31), ("embedding_length", 2**31), ("feed_forward_length", 2**32 - 1), ("block_count", 0)],
)
def test_sizes_that_the_tensors_do_not_have_are_an_error_that_names_the_key(small, tmp_path, key, value):
    path = with_metadata(small, tmp_path / "broken.gguf", **{f"llama_{key}": value})
    with pytest.raises(ValueError, match=rf"broken.gguf: llama.{key} is {value}, which its tensors"):
        make_llm(path)


def test_an_unknown_architecture_is_an_error_that_lists_the_known_ones(small, tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(small.read_bytes().replace(string("llama"), string("lemma")))
    with pytest.raises(ValueError, match=r"architecture 'lemma' are not supported; supported: llama, .*qwen3"):
        make_llm(path)
