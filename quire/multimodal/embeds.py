"""Embeddings instead of a prompt: reads files of torch.save and safetensors without unpickling.

torch.save writes a ZIP archive with a pickle that describes how to create the tensor, and a file of its numbers. The
pickle is not executed. A small interpreter reads its operations. It accepts only the functions that rebuild a dense
tensor, and calls none of them.
"""

import base64
import binascii
import json
import pickletools
import zipfile
from collections.abc import Callable
from functools import partial
from io import BytesIO
from math import prod
from typing import Any, NamedTuple

import numpy as np

from quire.messages.media import Buffer
from quire.multimodal.pictures import MediaError

CHUNK = 256  # embeddings per item: the unit in which prompts share prefixes
_TYPES = {"FloatStorage": ("float32", 4), "HalfStorage": ("float16", 2), "BFloat16Storage": ("bfloat16", 2)}
_SAFE_TYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}


class _Name(NamedTuple):
    """A function or class that a pickle names."""

    module: str
    name: str


class _Call(NamedTuple):
    function: Any
    arguments: Any


def decode_embeddings(text: str) -> Buffer:
    """Return the matrix [tokens, hidden] in the base64 text of a torch.save or safetensors file. Raises MediaError."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError("it is not valid base64") from error
    try:
        found = _read_torch(data) if data[:2] == b"PK" else _read_safetensors(data)
    except MediaError:
        raise
    except Exception as error:  # a damaged file can fail in any way
        raise MediaError("it is neither a tensor of torch.save nor a safetensors file") from error
    return checked(found)


def checked(found: Buffer) -> Buffer:
    """Raises MediaError unless it is a matrix of finite numbers."""
    shape = found.shape[1:] if len(found.shape) == 3 and found.shape[0] == 1 else found.shape
    if len(shape) != 2 or not all(0 < size < 2**24 for size in shape):
        raise MediaError(f"it must be a tensor [tokens, hidden], got {found.shape}")
    raw = np.frombuffer(found.data, np.uint16 if found.dtype == "bfloat16" else found.dtype)
    is_finite = (raw & 0x7F80) != 0x7F80 if found.dtype == "bfloat16" else np.isfinite(raw)
    if not is_finite.all():
        raise MediaError("it has values that are not finite")
    return Buffer(found.dtype, list(shape), found.data)


def buffer_of(value: Any) -> Buffer:
    """Return a matrix passed by a program: a torch tensor or a numpy array. Raises MediaError."""
    if getattr(value, "is_sparse", False) or "sparse" in str(getattr(value, "layout", "")):
        raise MediaError("sparse tensors are not taken")
    if hasattr(value, "detach"):
        value = value.detach().float().cpu().numpy()
    if not isinstance(value, np.ndarray) or value.dtype not in (np.float32, np.float16):
        raise MediaError("it must be a torch tensor or a numpy array of float32 or float16")
    return checked(Buffer(str(value.dtype), list(value.shape), np.ascontiguousarray(value).tobytes()))


def _read_safetensors(data: bytes) -> Buffer:
    size = int.from_bytes(data[:8], "little")
    if size > len(data) - 8:
        raise MediaError("it is neither a tensor of torch.save nor a safetensors file")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    if len(header) != 1:
        raise MediaError(f"the safetensors file has {len(header)} tensors; one is needed")
    [entry] = header.values()
    dtype, width = _SAFE_TYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    return _buffer(dtype, width, entry["shape"], data[8 + size :][begin:end])


def _read_torch(data: bytes) -> Buffer:
    with zipfile.ZipFile(BytesIO(data)) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
            raise MediaError("the file of torch.save is compressed, which torch does not do")
        if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
            raise MediaError("the numbers are not little-endian")
        call = _interpret(archive.read(entries["data.pkl"]))
        name = call.function if isinstance(call, _Call) else call
        if isinstance(name, _Name) and "sparse" in name.name:
            raise MediaError("sparse tensors are not taken")
        if name != _Name("torch._utils", "_rebuild_tensor_v2"):
            raise MediaError("the file of torch.save has something else than one dense tensor")
        storage, offset, shape, stride = call.arguments[:4]
        kind, typed, key, _, _ = storage
        if kind != "storage" or not isinstance(typed, _Name) or typed.module != "torch" or typed.name not in _TYPES:
            raise MediaError("the tensor must be of float32, float16 or bfloat16")
        dtype, width = _TYPES[typed.name]
        expected = 1
        row_major = list[int]()
        for size in reversed(shape):
            row_major.insert(0, expected)
            expected *= size
        if any(s != r for s, r, n in zip(stride, row_major, shape, strict=True) if n != 1):
            raise MediaError("the tensor must be contiguous")
        numbers = archive.read(entries[f"data/{key}"])
        return _buffer(dtype, width, list(shape), numbers[offset * width : (offset + prod(shape)) * width])


def _buffer(dtype: str, width: int, shape: list[int], data: bytes) -> Buffer:
    if not all(isinstance(size, int) and size >= 0 for size in shape) or len(data) != prod(shape) * width:
        raise MediaError("the tensor's shape does not fit its data")
    return Buffer(dtype, list(shape), data)


def _interpret(pickled: bytes) -> Any:
    """Return the value that a pickle describes, with its calls as data. Raises MediaError for operations that no dense
    tensor needs."""
    machine = _Machine()
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "STOP":
            return machine.stack.pop()
        if operation.name not in _OPERATIONS:
            raise MediaError(f"the file of torch.save has something else than one dense tensor ({operation.name})")
        _OPERATIONS[operation.name](machine, argument)
    raise MediaError("the file of torch.save is incomplete")


class _Machine:
    """The state of a pickle that is being read."""

    def __init__(self) -> None:
        self.stack = list[Any]()
        self._marks = list[int]()
        self._memo = dict[int, Any]()

    def ignore(self, argument: Any) -> None: ...

    def push(self, argument: Any) -> None:
        self.stack.append(argument)

    def push_name(self, argument: Any) -> None:
        self.stack.append(_Name(*str(argument).split(" ", 1)))

    def make_name(self, argument: Any) -> None:
        attribute = self.stack.pop()
        module = self.stack.pop()
        self.stack.append(_Name(module, attribute))

    def put(self, argument: Any) -> None:
        self._memo[int(argument or 0)] = self.stack[-1]

    def memoize(self, argument: Any) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def get(self, argument: Any) -> None:
        self.stack.append(self._memo[int(argument or 0)])

    def mark(self, argument: Any) -> None:
        self._marks.append(len(self.stack))

    def make_tuple_from_mark(self, argument: Any) -> None:
        self._make_tuple(self._marks.pop())

    def make_tuple(self, argument: Any, size: int) -> None:
        self._make_tuple(len(self.stack) - size)

    def _make_tuple(self, start: int) -> None:
        self.stack[start:] = [tuple(self.stack[start:])]

    def call(self, argument: Any) -> None:
        arguments = self.stack.pop()
        function = self.stack.pop()
        self.stack.append(_Call(function, arguments))


_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine.ignore,
    "FRAME": _Machine.ignore,
    "BINPERSID": _Machine.ignore,  # the top of the stack names a storage
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "BININT": _Machine.push,
    "BININT1": _Machine.push,
    "BININT2": _Machine.push,
    "LONG1": _Machine.push,
    "BINUNICODE": _Machine.push,
    "SHORT_BINUNICODE": _Machine.push,
    "GLOBAL": _Machine.push_name,
    "STACK_GLOBAL": _Machine.make_name,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.memoize,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "MARK": _Machine.mark,
    "TUPLE": _Machine.make_tuple_from_mark,
    "EMPTY_TUPLE": partial(_Machine.make_tuple, size=0),
    "TUPLE1": partial(_Machine.make_tuple, size=1),
    "TUPLE2": partial(_Machine.make_tuple, size=2),
    "TUPLE3": partial(_Machine.make_tuple, size=3),
    "REDUCE": _Machine.call,
}
