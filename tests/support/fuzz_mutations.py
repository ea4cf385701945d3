"""Changes of valid inputs for tests/support/fuzz_targets.py: of bytes, and of the values in JSON and msgpack.

Changed bytes seldom are valid JSON or msgpack, and the coverage of parsers in C does not tell a fuzzer what would be.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import msgspec

Place = tuple[Any, Any]  # a list or dict, and an index or key

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    255,
    65536,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**63 - 1,
    2**64 - 1,
    -(2**63),
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "a",
    "ab",
    "\0",
    "<s>",
    "{1}",
    "\u00e9\u4e00",
    "a" * 300,
    "(a|a)*$",
    "F32",
    "Sequence",
    b"",
    b"\0\xff",
    [],
    {},
    [[]],
    [0],
    ["a"],
    {"": 0},
    {"a": {}},
    [1, "a"],
    {"type": "Sequence"},
]


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 4])):
        place = draw.randrange(len(changed) + 1)
        length = draw.choice([1, 1, 2, 4, 8, 40])
        kind = draw.randrange(5)
        if kind == 0:
            del changed[place : place + length]
        elif kind == 1:
            changed[place:place] = draw.randbytes(length)
        elif kind == 2:
            changed[place : place + length] = bytes([draw.choice([0, 1, 127, 128, 255])]) * length
        elif kind == 3:
            start = draw.randrange(len(changed) + 1)
            changed[place:place] = changed[start : start + length]
        elif place < len(changed):
            changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed)


def mutate_json(data: bytes, draw: random.Random) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data, draw)
    text = json.dumps(mutate_value(value, draw), default=lambda value: value.decode("latin-1"))
    return text.encode()


def mutate_msgpack(data: bytes, draw: random.Random) -> bytes:
    try:
        value = msgspec.msgpack.decode(data)
        return msgspec.msgpack.encode(mutate_value(value, draw))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, TypeError):
        return mutate_bytes(data, draw)


def mutate_value(value: Any, draw: random.Random) -> Any:
    """The value with a few changes."""
    root = [copy.deepcopy(value)]
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        places = list(_places(root))
        holder, key = draw.choice(places)
        other = draw.choice(places)
        kind = draw.randrange(6)
        if holder is not root and kind == 0:
            del holder[key]
        elif kind == 1:
            holder[key] = copy.deepcopy(other[0][other[1]])
        elif kind == 2 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] += draw.choice([-1, 1, 2, 1000])
        elif kind == 3 and isinstance(holder[key], list):
            holder[key] = holder[key] * draw.choice([2, 3, 50]) + [copy.deepcopy(draw.choice(VALUES))]
        elif kind == 3 and isinstance(holder[key], dict):
            name = other[1] if isinstance(other[1], str) else "a"
            holder[key][name] = copy.deepcopy(draw.choice(VALUES))
        elif kind == 4 and isinstance(holder, dict):
            holder[draw.choice(["", "a", "type", "\u4e00", str(key) * 2])] = holder.pop(key)
        else:
            holder[key] = copy.deepcopy(draw.choice(VALUES))
    return root[0]


def _places(value: Any) -> Iterator[Place]:
    """Of all values within a list or a dict, at most some thousands."""
    waiting, count = [value], 0
    while waiting and count < 3000:
        holder = waiting.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            yield holder, key
            count += 1
            if isinstance(holder[key], list | dict):
                waiting.append(holder[key])
