"""Embeddings in place of a prompt: reads the bytes of torch.save and of safetensors, and unpickles nothing.

torch.save writes a ZIP archive with a pickle that says how to make the tensor, and a file of its numbers. The pickle is
not run. Its operations are read by a small machine of our own, which knows no other functions than those that rebuild a
dense tensor, and calls none of them.
"""

import base64
import binascii
import json
import pickletools
import zipfile
from io import BytesIO
from math import prod
from typing import Any, NamedTuple

import numpy as np

from quire.messages.media import Buffer
from quire.multimodal.pictures import MediaError

CHUNK = 256  # embeddings of an item: the unit in which prefixes of other prompts are shared
_TYPES = {"FloatStorage": ("float32", 4), "HalfStorage": ("float16", 2), "BFloat16Storage": ("bfloat16", 2)}
_SAFE_TYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1"}
_TEXTS = {"BINUNICODE", "SHORT_BINUNICODE"}


class _Name(NamedTuple):
    """A function or class that a pickle names."""

    module: str
    name: str


class _Call(NamedTuple):
    function: Any
    arguments: Any


def decode_embeddings(text: str) -> Buffer:
    """The matrix [tokens, hidden] in the base64 text of a file of torch.save or safetensors. Raises MediaError."""
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
    """A matrix that a program gives: a torch tensor or a numpy array. Raises MediaError."""
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
    """What a pickle builds, with its calls as data. Raises MediaError for operations that no dense tensor needs."""
    stack = list[Any]()
    marks = list[int]()
    memo = dict[int, Any]()
    for operation, argument, _ in pickletools.genops(pickled):
        name = operation.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            return stack.pop()
        if name == "GLOBAL":
            stack.append(_Name(*str(argument).split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute = stack.pop()
            module = stack.pop()
            stack.append(_Name(module, attribute))
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _NUMBERS or name in _TEXTS:
            stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[int(argument or 0)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument or 0)])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name == "TUPLE" or name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            start = marks.pop() if name == "TUPLE" else len(stack) - int(name[-1])
            stack[start:] = [tuple(stack[start:])]
        elif name == "BINPERSID":
            pass  # what is on the stack names a storage
        elif name == "REDUCE":
            arguments = stack.pop()
            function = stack.pop()
            stack.append(_Call(function, arguments))
        else:
            raise MediaError(f"the file of torch.save has something else than one dense tensor ({name})")
    raise MediaError("the file of torch.save is incomplete")
