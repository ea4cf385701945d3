"""The parsers of untrusted bytes, as functions of one input each: for tools/fuzz_parsers.py and tests/fuzz.

A parser returns or raises one of its declared errors. Anything else is a bug: another exception, a crash of the
interpreter, a hang, or more memory than `MEMORY_BYTES` beyond what the process had.

An input with several parts, such as a config and tensors, has a line of two dashes between them.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import safetensors.torch
import torch
from starlette.exceptions import HTTPException
from starlette.requests import Request

import quire.lora.patterns
import quire.server.transcriptions
from quire.checkpoints.gguf import read_gguf
from quire.checkpoints.gguf_models import gguf_config, gguf_generation_config, gguf_tensors
from quire.checkpoints.weights import SafetensorsCheckpoint
from quire.cluster.secret import ClusterSecret
from quire.layers.build import WeightSlot
from quire.lora.checkpoint import read_adapter
from quire.text.tokenizer import Tokenizer
from quire.transfer import core_messages, messages
from quire.transfer.layout import Entry, GroupLayout, RankLayout, plan
from quire.transfer.link import _from_consumer, _from_producer
from quire.transfer.server import BlockServer
from quire.transfer.sources import TcpSource
from quire.worker.kv_transfer import Rows
from support.fuzz_mutations import mutate_bytes, mutate_json, mutate_msgpack

Mutation = Callable[[bytes, random.Random], bytes]
MEMORY_BYTES = 1 << 29
SEPARATOR = b"\n--\n"
_FEW = 1 << 16  # elements of a tensor that is read
_TEXTS = ("", "a", "Once upon a time, <s>3.5 \u00e9\U0001f600\n</s>  \u4e00\u4e8c")


@dataclass(frozen=True)
class Target:
    """parse: raises only `errors`. seeds: valid inputs. words: for libFuzzer's dictionary. instrumented: the modules
    whose coverage guides the fuzzer. mutate: makes another input of one."""

    parse: Callable[[bytes], None]
    errors: tuple[type[Exception], ...]
    seeds: Callable[[], Iterable[bytes]]
    instrumented: tuple[str, ...]
    words: tuple[bytes, ...] = ()
    mutate: Mutation = mutate_bytes
    max_bytes: int = 4096

    def run(self, data: bytes) -> None:
        """Raises what is a bug."""
        with suppress(*self.errors):
            self.parse(data)


# ---- files


@cache
def _root() -> Path:
    """A folder in memory, if there is one."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


_numbers = count()


@contextmanager
def _folder(files: Mapping[str, bytes]) -> Iterator[Path]:
    """A new folder, since readers may remember files by their paths."""
    folder = Path(tempfile.mkdtemp(prefix=f"quire-fuzz-{next(_numbers)}-", dir=_root()))
    try:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        yield folder
    finally:
        shutil.rmtree(folder)


def _in_parts(*mutations: Mutation) -> Mutation:
    """Changes one of the parts. The last mutation is for all further parts, too."""

    def mutate(data: bytes, draw: random.Random) -> bytes:
        parts = data.split(SEPARATOR)
        index = draw.randrange(len(parts))
        parts[index] = mutations[min(index, len(mutations) - 1)](parts[index], draw)
        return SEPARATOR.join(parts)

    return mutate


def _parts(data: bytes, number: int) -> list[bytes]:
    parts = data.split(SEPARATOR, number - 1)
    return [*parts, *[b""] * (number - len(parts))]


def safetensors_file(data: bytes) -> bytes:
    """The file itself. Of a header, which begins with a brace: the file with its size and as many zeros as it needs."""
    if not data.startswith(b"{"):
        return data
    stop = 0
    try:
        entries = [e for e in json.loads(data).values() if isinstance(e, dict)]
        stop = max(e["data_offsets"][1] for e in entries if e.get("data_offsets"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    zeros = bytes(stop) if isinstance(stop, int) and 0 <= stop < 1 << 16 else b""
    return len(data).to_bytes(8, "little") + data + zeros


# ---- GGUF


def parse_gguf(data: bytes) -> None:
    with _folder({"model.gguf": gguf_file(data)}) as folder:
        found = read_gguf(folder / "model.gguf")
        _each(gguf_config, found)
        _each(gguf_generation_config, found)
        for stored in (_each(gguf_tensors, found) or {}).values():
            if 0 < np.prod(stored.shape, dtype=float) <= _FEW:
                stored.rows(0, 1)
                if stored.tensor.kind.is_float:
                    stored.floats()
        use_tokenizer(Tokenizer.from_gguf(found.metadata))


def gguf_file(data: bytes) -> bytes:
    """The file itself. Of JSON with the metadata and the tensors' places: the file, with zeros for the tensors."""
    try:
        given = json.loads(data) if data.startswith(b"{") else None
        if not isinstance(given, dict):
            return data
        fields = [(str(name), value) for name, value in given["metadata"].items() if _gguf_kind(value) is not None]
        tensors = [(str(name), *tensor) for name, tensor in given["tensors"].items()]
        made = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
        for name, value in fields:
            made += _gguf_text(name) + struct.pack("<I", _gguf_kind(value) or 0) + _gguf_value(value)
        stop = 0
        for name, kind, shape, offset in tensors:
            made += _gguf_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
            stop = max(stop, offset + 4 * math.prod(shape))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, struct.error):
        return data
    return made + bytes(-len(made) % 32 + min(stop, _FEW))


_GGUF_CODES = {4: "I", 6: "f", 7: "?", 11: "q", 10: "Q"}


def _gguf_kind(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return 4 if 0 <= value < 1 << 32 else 10 if value >> 63 == 1 else 11 if abs(value) < 1 << 63 else None
    return {str: 8, bool: 7, float: 6, list: 9}.get(type(value))


def _gguf_text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _gguf_value(value: Any) -> bytes:
    kind = _gguf_kind(value)
    if kind == 8:
        return _gguf_text(value)
    if kind != 9:
        return struct.pack(f"<{_GGUF_CODES[kind or 0]}", value)
    kinds = {_gguf_kind(item) for item in value}
    kind = max(kinds, default=4) if None not in kinds and 9 not in kinds else 4
    items = [item for item in value if _gguf_kind(item) == kind]
    return struct.pack("<IQ", kind, len(items)) + b"".join(map(_gguf_value, items))


def _each(read: Callable[[Any], Any], value: Any) -> Any:
    """None if the value is refused: other parts are to be read nevertheless."""
    try:
        return read(value)
    except ValueError:
        return None


def gguf_seeds() -> Iterator[bytes]:
    tokens = ["<unk>", "<s>", "</s>", *map(chr, range(97, 105)), "ab"]
    sizes = {
        "block_count": 1,
        "embedding_length": 32,
        "attention.head_count": 2,
        "attention.head_count_kv": [2],
        "feed_forward_length": 32,
        "context_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e4,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 2.0,
        "expert_count": 0,
        "rope.scaling.original_context_length": 32,
        "rope.dimension_count": 8,
        "attention.key_length": 16,
    }
    common = {
        "tokens": tokens,
        "token_type": [2, 3, 3, *[1] * (len(tokens) - 3)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "eot_token_id": 2,
        "add_bos_token": True,
        "add_space_prefix": True,
        "pre": "llama-bpe",
    }
    own = ({"model": "llama", "scores": [-float(i) for i in range(len(tokens))]}, {"model": "gpt2", "merges": ["a b"]})
    for architecture, tokenizer in zip(("llama", "gemma2"), own, strict=True):
        metadata = {
            "general.architecture": architecture,
            "general.alignment": 32,
            "tokenizer.chat_template": "{{ messages }}",
            **{f"{architecture}.{name}": value for name, value in sizes.items()},
            **{f"tokenizer.ggml.{name}": value for name, value in {**common, **tokenizer}.items()},
        }
        tensors = {
            "token_embd.weight": (8, (32, len(tokens)), 0),
            "blk.0.attn_norm.weight": (0, (32,), 512),
            "blk.0.attn_q.weight": (1, (32, 4), 640),
            "rope_freqs.weight": (0, (8,), 896),
        }
        described = json.dumps({"metadata": metadata, "tensors": tensors}).encode()
        yield described
        yield gguf_file(described)


# ---- safetensors


def parse_safetensors(data: bytes) -> None:
    """Both ways to read a tensor must agree, that of the safetensors package and Quire's own."""
    content = safetensors_file(data)
    with _folder({"model.safetensors": content}) as folder:
        checkpoint = SafetensorsCheckpoint(folder)
        for name in checkpoint.names:
            shape = checkpoint.shape(name)
            slot = WeightSlot(name, torch.empty(0), shape)
            if np.prod(shape, dtype=float) > _FEW or max(shape, default=0) > _FEW or len(shape) > 8:
                continue  # no model has such a slot, so it is never read
            wanted = checkpoint.read(slot)
            target = torch.empty(shape, dtype=wanted.dtype)
            slot = WeightSlot(name, target, shape, tuple(slice(0, n) for n in shape))
            checkpoint.copy_into(slot)
            assert torch.equal(target.view(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)), name


def safetensors_seeds() -> Iterator[bytes]:
    tensors = {
        "model.embed_tokens.weight": torch.arange(12.0).reshape(4, 3),
        "model.norm.weight": torch.ones(3, dtype=torch.bfloat16),
        "a": torch.ones(()),
        "empty": torch.ones(0, 2),
        "codes": torch.arange(8, dtype=torch.uint8).reshape(2, 4),
        "halves": torch.ones(2, 2, dtype=torch.float16),
    }
    content = safetensors.torch.save(tensors, {"format": "pt"})
    yield content
    yield content[8 : 8 + int.from_bytes(content[:8], "little")].strip()
    yield b'{"w":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}}'


_SAFETENSORS_WORDS = (
    b'"dtype" "shape" "data_offsets" "__metadata__" "F32" "BF16" "F8_E4M3" "BOOL" "I64" "F64" "F4"'.split()
)

# ---- tokenizer.json


def parse_tokenizer(data: bytes) -> None:
    tokenizer_json, config = _parts(data, 2)
    files = {"tokenizer.json": tokenizer_json, **({"tokenizer_config.json": config} if config else {})}
    with _folder(files) as folder:
        use_tokenizer(Tokenizer.from_directory(folder))


def use_tokenizer(tokenizer: Tokenizer) -> None:
    """What servers do with it at start, and with each request."""
    for text in _TEXTS:
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
        ids = tokenizer.encode(text)  # templates may drop the text
        tokenizer.decode(ids)
        for token_id in ids:
            assert isinstance(tokenizer.token_bytes[token_id], bytes)
    tokenizer.encode_parts(*_TEXTS[1:], 6)
    tokenizer.get_vocab()
    assert all(isinstance(text, str) for text in tokenizer.chat_templates.values())


def tokenizer_seeds() -> Iterator[bytes]:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    letters = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "ab": 5, "\u0120": 6, "\u2581": 7}
    bpe = Backend(models.BPE(letters, [("a", "b")], unk_token="<unk>", fuse_unk=True))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{L}+|\s"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B:1", [("<s>", 1), ("</s>", 2)])
    bpe.add_special_tokens(["<s>", "</s>"])
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "add_bos_token": True,
        "clean_up_tokenization_spaces": True,
        "additional_special_tokens": ["<x>"],
        "added_tokens_decoder": {"1": {"content": "<s>", "special": True}},
        "extra_special_tokens": {"image": "<i>"},
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    }
    yield bpe.to_str().encode() + SEPARATOR + json.dumps(config).encode()
    pieces = [(piece, -float(i)) for piece, i in letters.items()]
    unigram = Backend(models.Unigram(pieces, 0, False))
    unigram.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581"), normalizers.NFKC(), normalizers.Strip()]
    )
    unigram.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    unigram.enable_truncation(8)
    unigram.enable_padding(length=4)
    yield unigram.to_str().encode() + SEPARATOR + b'{"add_eos_token": true, "eos_token": "</s>", "chat_template": "x"}'
    words = Backend(models.WordPiece(letters, unk_token="<unk>"))
    words.normalizer = normalizers.BertNormalizer()
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.decoder = decoders.WordPiece()
    words.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 1))
    yield words.to_str().encode()
    level = Backend(models.WordLevel(letters, unk_token="<unk>"))
    level.pre_tokenizer = pre_tokenizers.Metaspace()
    level.decoder = decoders.CTC()
    yield level.to_str().encode()


_TOKENIZER_WORDS = b"""
"type" "BPE" "Unigram" "WordPiece" "WordLevel" "vocab" "merges" "unk_id" "unk_token" "byte_fallback" "normalizer"
"pre_tokenizer" "post_processor" "decoder" "model" "added_tokens" "content" "pattern" "Regex" "String" "Sequence"
"pretokenizers" "normalizers" "Split" "ByteLevel" "Metaspace" "Replace" "Precompiled" "precompiled_charsmap" "special"
"truncation" "padding" "dropout" "ignore_merges" "max_input_chars_per_word" "continuing_subword_prefix" null true false
"bos_token" "eos_token" "added_tokens_decoder" "chat_template" "special_tokens" "single" "pair" "id" "ids" 4294967295
""".split()

# ---- adapters


def parse_adapter(data: bytes) -> None:
    """The config, and the header of the tensors' file or the file itself."""
    config, weights = _parts(data, 2)
    files = {"adapter_config.json": config, "adapter_model.safetensors": safetensors_file(weights)}
    with _folder(files) as folder, patch.object(quire.lora.patterns, "shared_pool", _NoPool):
        for a, b in read_adapter(folder).values():
            assert a.dtype == b.dtype == torch.float32


class _NoPool:
    """Patterns are matched in worker processes, which tests/security tests; here that would take most of the time."""

    def run(self, job: str, *arguments: Any, limits: object) -> Any:
        raise ValueError("a pattern that is not a name")


def adapter_seeds() -> Iterator[bytes]:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    header = {
        name.format("A"): {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        name.format("B"): {"dtype": "BF16", "shape": [4, 2], "data_offsets": [32, 48]},
    }
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "bias": "none",
        "target_modules": ["q_proj"],
        "use_rslora": True,
        "rank_pattern": {"layers.0.self_attn.q_proj": 2, "k": 8},
        "alpha_pattern": {"v": 3.5},
        "modules_to_save": None,
        "use_dora": False,
    }
    yield json.dumps(config).encode() + SEPARATOR + json.dumps(header).encode()
    both = {name.format("A"): torch.ones(1, 2), name.format("B"): torch.ones(2, 1)}
    yield b'{"r": 1, "lora_alpha": 1}' + SEPARATOR + safetensors.torch.save(both)


_ADAPTER_WORDS = b"""
"peft_type" "r" "lora_alpha" "rank_pattern" "alpha_pattern" "target_modules" "bias" "none" "use_rslora"
"modules_to_save" "layer_replication" lora_A lora_B lora_embedding_A .default base_model.model. null 1e400 NaN
Infinity 1e-400 0 -1
""".split()

# ---- KV-transfer frames

_LAYOUT = RankLayout(64, (GroupLayout("f", (Entry(0, "kv", 0, 2, 0, 8), Entry(1, "kv", 0, 2, 32, 8))),))


@cache
def _block_server() -> BlockServer:
    rows = Rows.of(torch.zeros(4, 64, dtype=torch.uint8))
    return BlockServer(rows, _LAYOUT, ClusterSecret(b"k" * 32), "127.0.0.1", 0)


def _mutate_kv_frames(data: bytes, draw: random.Random) -> bytes:
    return data[:1] + _in_parts(mutate_msgpack)(data[1:], draw)


def parse_kv_frames(data: bytes) -> None:
    """What peers with the secret may send; ZeroMQ refuses others. The first byte chooses what the rest is."""
    kinds = (_requests, _answers, _to_producer, _to_consumer)
    if data:
        kinds[data[0] % len(kinds)](data[1:])


def _requests(data: bytes) -> None:
    for body in data.split(SEPARATOR):
        request = msgspec.msgpack.decode(body, type=messages.Request)
        _block_server()._answer(request)
        if isinstance(request, messages.Read):
            list(_block_server()._data(request))


class _Answers:
    """A connection on which answers arrive, each of which may have bytes of blocks behind it."""

    def __init__(self, data: bytes) -> None:
        self._bodies = iter(data.split(SEPARATOR))

    def send(self, message: msgspec.Struct) -> None: ...

    def receive(self, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
        return decoder.decode(next(self._bodies, b""))

    def receive_data(self) -> Iterator[memoryview]:
        return map(memoryview, self._bodies)


def _answers(data: bytes) -> None:
    source = TcpSource.__new__(TcpSource)
    source._connection = _Answers(data)  # type: ignore[assignment]
    hello = source.hello()
    runs = plan(_LAYOUT, [hello.layout], 0)
    assert sum(length for of_rank in runs for run in of_rank.values() for _, _, length in run) <= 64
    source.wait(1, 1)
    source.read([(1, 1)], [(0, 0, 8)], np.zeros((4, 64), np.uint8))


def _to_producer(data: bytes) -> None:
    _from_consumer.decode(data)


def _to_consumer(data: bytes) -> None:
    message = _from_producer.decode(data)
    if isinstance(message, core_messages.Offer):  # as imports.py reads it
        list(zip(message.groups, message.indices, message.block_ids, strict=True))


def kv_frame_seeds() -> Iterator[bytes]:
    encode = msgspec.msgpack.encode
    hello = messages.Hello("name", _LAYOUT, 4, messages.SharedFile("boot", 1, 2, 3, 4))
    nixl = msgspec.structs.replace(hello, nixl=messages.NixlAddress(b"agent", "DRAM", 0, 1))
    peer = core_messages.Peer("name", "127.0.0.1", (1, 2))
    asked = [messages.Describe(), messages.Await(1, 1), messages.Read(0, [1, 2], [(0, 8), (16, 8)])]
    yield b"\0" + SEPARATOR.join(map(encode, asked))
    yield b"\0" + encode(messages.Read(1, [3], [(0, 64)]))
    answers = encode(hello), b"", encode(messages.Reached(1, 1)), b"", encode(messages.Data(0)), bytes(8)
    yield b"\1" + SEPARATOR.join(answers)
    yield b"\1" + SEPARATOR.join((encode(nixl), b"", encode(messages.Problem("no"))))
    facts = {"model": "m", "version": "1"}
    for asked_by_core in (
        core_messages.Fetch(1, "id", b"d" * 32, [0, 1], facts),
        core_messages.Drop(1),
        core_messages.Beat(1.5, [1, 2]),
    ):
        yield b"\2" + encode(asked_by_core)
    for told in (
        core_messages.Offer(1, peer, [0], [1], [2], 3, True),
        core_messages.Gone(1, "why"),
        core_messages.BeatBack(1.5, [1, -1]),
    ):
        yield b"\3" + encode(told)


_KV_TAGS = "Hello Describe Read Await Data Reached Problem Offer Gone Fetch Drop Beat BeatBack".split()
_KV_WORDS = (SEPARATOR, b"\xcf" + b"\xff" * 8, b"\xdd\x00\x00\xff\xff", *map(msgspec.msgpack.encode, _KV_TAGS))

# ---- multipart bodies


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def parse_multipart(data: bytes) -> None:
    """The first line is what follows the media type in Content-Type, the rest is the body."""
    parameters, _, body = data.partition(b"\n")
    headers = [(b"content-type", b"multipart/form-data" + parameters), (b"content-length", b"%d" % len(body))]
    middle = len(body) // 3  # so that parts are split between two chunks
    chunks = [body[:middle], body[middle:]]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

    request = Request({"type": "http", "method": "POST", "headers": headers, "app": None}, receive)
    _loop().run_until_complete(quire.server.transcriptions._read(request))


def multipart_seeds() -> Iterator[bytes]:
    def form(*parts: tuple[str, bytes]) -> bytes:
        bodies = (
            f"--x\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + body + b"\r\n" for head, body in parts
        )
        return b"; boundary=x\n" + b"".join(bodies) + b"--x--\r\n"

    file = ('name="file"; filename="a.wav"\r\nContent-Type: audio/wav', b"RIFF")
    yield form(file, ('name="model"', b"m"), ('name="temperature"', b"0.5"))
    yield form(('name="language"', b"en"), ('name="timestamp_granularities[]"', b"word"), file, ('name="stream"', b"1"))
    yield form(('name="stream"', b"1"), ("name=\"other\"; filename*=utf-8''%e2%82", b"a"))
    yield b'; boundary="x"; charset=utf-16\n--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n\xff\r\n--x--'


_MULTIPART_WORDS = b"""
Content-Disposition: form-data; name="file" filename="a" filename* Content-Type: charset=utf-16 charset=rot13 boundary=
charset=idna name="_charset_" Content-Transfer-Encoding: base64 name="timestamp_granularities[]" multipart/mixed --x--
""".split()

TARGETS = {
    "gguf": Target(
        parse_gguf,
        (ValueError,),
        gguf_seeds,
        ("quire.checkpoints", "quire.text", "quire.checkpoints.formats.gguf_types"),
        (b"GGUF", b"general.architecture"),
        mutate_json,
    ),
    "safetensors": Target(
        parse_safetensors,
        (ValueError,),
        safetensors_seeds,
        ("quire.checkpoints", "json"),
        tuple(_SAFETENSORS_WORDS),
        mutate_json,
    ),
    "tokenizer": Target(
        parse_tokenizer,
        (ValueError,),
        tokenizer_seeds,
        ("quire.text", "json"),
        tuple(_TOKENIZER_WORDS),
        _in_parts(mutate_json),
        8192,
    ),
    "adapter": Target(
        parse_adapter,
        (ValueError,),
        adapter_seeds,
        ("quire.lora", "quire.checkpoints", "json"),
        tuple(_ADAPTER_WORDS + _SAFETENSORS_WORDS),
        _in_parts(mutate_json),
    ),
    "kv_frames": Target(
        parse_kv_frames, (ValueError, OSError), kv_frame_seeds, ("quire.transfer",), _KV_WORDS, _mutate_kv_frames
    ),
    "multipart": Target(
        parse_multipart,
        (HTTPException,),
        multipart_seeds,
        ("quire.server.transcriptions", "quire.server.routing", "quire.server.errors", "starlette", "python_multipart"),
        tuple(_MULTIPART_WORDS),
    ),
}
