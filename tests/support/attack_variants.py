"""Generated attacks: constraints, chat templates, heads of HTTP requests, media files and configs of adapters."""

from __future__ import annotations

import string
from typing import Any

from hypothesis import strategies as st
from PIL import Image

from quire.multimodal.decoding import Kind
from support.media_bombs import gif, jpeg_of_scans, saved, wav

# ---- constraints

WORDS = st.text(string.ascii_lowercase, min_size=1, max_size=3)
PATTERNS = st.recursive(
    WORDS | st.sampled_from([".", r"\w", r"\d", "[a-f]", r"\s", "(a|a)", "(a|ab|abc)"]),
    lambda part: st.one_of(
        st.builds("({}){}".format, part, st.sampled_from(["*", "+", "?", "{3}", "{1,50}", "{0,999}", "{200}"])),
        st.builds("({}|{})".format, part, part),
        st.builds("{}{}".format, part, part),
    ),
    max_leaves=12,
)
NAMED = st.dictionaries(WORDS, st.none(), max_size=3).map(list)


def extend(part: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    many = st.builds(lambda schema, count: [schema] * count, part, st.sampled_from([1, 2, 20, 600]))
    several = st.lists(part, min_size=1, max_size=4) | many
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(WORDS, part, max_size=3)},
            optional={
                "required": NAMED,
                "additionalProperties": part,
                "minProperties": st.integers(0, 9),
                "propertyNames": st.fixed_dictionaries({"pattern": PATTERNS}),
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": part},
            optional={"minItems": st.sampled_from([0, 3, 1_000, 10**9]), "prefixItems": several, "contains": part},
        ),
        st.fixed_dictionaries({"patternProperties": st.dictionaries(PATTERNS, part, max_size=2)}),
        *(st.fixed_dictionaries({keyword: several}) for keyword in ("oneOf", "anyOf", "allOf")),
        st.fixed_dictionaries({"not": part}),
        st.fixed_dictionaries({"if": part, "then": part, "else": part}),
        st.fixed_dictionaries(
            {"dependentSchemas": st.dictionaries(WORDS, part, max_size=2)}, optional={"unevaluatedProperties": part}
        ),
    )


LEAVES = st.one_of(
    st.booleans(),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={
            "pattern": PATTERNS,
            "minLength": st.sampled_from([0, 5, 10**6]),
            "maxLength": st.sampled_from([3, 10**6]),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={
            "multipleOf": st.sampled_from([3, 9973, 0.01, 1e-9, 10**30]),
            "minimum": st.integers(-(10**20), 10**20),
        },
    ),
    st.fixed_dictionaries({"enum": st.lists(st.integers() | WORDS, max_size=5)}),
    st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/properties/a", "#/items", "#/no"])}),
    st.fixed_dictionaries({"type": st.sampled_from([None, 1.5, "text", [], {}])}),
)
SCHEMAS = st.recursive(LEAVES, extend, max_leaves=8)
PARTS = st.sampled_from(['"a"', '"b"', '""', "r0", "r1", "r2", "/[ab]+/", "/(a|b)*a/", "r0*", "(r1 r2)?"])
SEQUENCES = st.lists(PARTS, min_size=1, max_size=4).map(" ".join)
ALTERNATIVES = st.lists(SEQUENCES, min_size=1, max_size=3).map(" | ".join)
GRAMMARS = st.tuples(ALTERNATIVES, ALTERNATIVES, ALTERNATIVES).map(
    lambda rules: "\n".join(["start: r0", *(f"r{index}: {rule}" for index, rule in enumerate(rules))])
)
CONSTRAINTS = st.one_of(
    st.builds(lambda schema: {"json": schema}, SCHEMAS.filter(lambda schema: isinstance(schema, dict))),
    st.builds(lambda pattern: {"regex": pattern}, PATTERNS),
    st.builds(lambda grammar: {"grammar": grammar}, GRAMMARS),
)

# ---- chat templates

ATOM = st.sampled_from(
    ["'ab'", "5", "messages", "[1, 'a']", "('x', 2)", "{'a': 1}", "ns.x", "i", "none", "y", "'\\n'", "''"]
)
FILTER = st.sampled_from(
    [
        "upper",
        "list",
        "string",
        "join('-')",
        "length",
        "tojson",
        "replace('a', 'bb')",
        "indent(3)",
        "default('d', true)",
        "map('string')",
        "select",
        "first",
        "sort",
        "unique",
        "reverse",
        "items",
        "center(9)",
        "batch(2)",
        "int",
        "trim",
    ]
)
EXPRESSION = st.recursive(
    ATOM,
    lambda e: (
        st.tuples(e, st.sampled_from(["+", "*", "~", "-", "%", "==", "in", "and", "or", "**", "//"]), e).map(
            lambda parts: f"({' '.join(parts)})"
        )
        | st.tuples(e, FILTER).map(lambda parts: f"({parts[0]} | {parts[1]})")
        | st.lists(e, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | e.map(lambda inner: f"(ns.x ~ {inner})[:2]")
        | e.map(lambda inner: f"f({inner})")
    ),
    max_leaves=8,
)
STATEMENT = st.recursive(
    EXPRESSION.map(lambda e: f"{{{{ {e} }}}}")
    | EXPRESSION.map(lambda e: f"{{% set ns.x = {e} %}}")
    | st.text("ab \n", max_size=3),
    lambda s: (
        st.tuples(EXPRESSION, st.lists(s, max_size=3)).map(
            lambda p: f"{{% for i in {p[0]} %}}{''.join(p[1])}{{% endfor %}}"
        )
        | st.tuples(EXPRESSION, s, s).map(lambda p: f"{{% if {p[0]} %}}{p[1]}{{% else %}}{p[2]}{{% endif %}}")
        | st.tuples(st.sampled_from(["5", "30", "900"]), s).map(
            lambda p: f"{{% for i in range({p[0]}) %}}{p[1]}{{% endfor %}}"
        )
    ),
    max_leaves=6,
)
TEMPLATES = st.lists(STATEMENT, min_size=1, max_size=4).map(
    lambda parts: "{% set ns = namespace(x=1) %}{% macro f(y) %}<{{ y }}>{% endmacro %}" + "".join(parts)
)

# ---- heads

LINES = [b"GET / HTTP/1.1\r\n", b"POST %s HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n", b"", b"\r\n"]
NAMES = [b"Host", b"Content-Length", b"Transfer-Encoding", b"Connection", b"Upgrade", b"X", b"Expect"]
VALUES = [b"x", b"5", b"chunked", b"upgrade", b"h2c", b"-1", b"100-continue", b"LONG", b"\x00", b""]
ENDS = [b"\r\n", b"", b"\r\nhello", b"\r\n5\r\nhello\r\n0\r\n\r\n", b"\n\n"]


@st.composite
def heads(draw: st.DrawFn, path: bytes) -> bytes:
    """What a client sends first. path: of its POST."""
    line = draw(st.sampled_from(LINES)).replace(b"%s", path)
    fields = draw(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), max_size=6))
    headers = b"".join(name + b": " + value + b"\r\n" for name, value in fields)
    repeated = headers * draw(st.sampled_from([1, 1, 1, 30, 2000]))
    return line + repeated.replace(b"LONG", b"a" * 70_000, 8) + draw(st.sampled_from(ENDS))


# ---- media

NOISE = Image.effect_noise((16, 16), 80).convert("RGB")
FILES: list[tuple[Kind, bytes]] = [
    *(("image", saved(NOISE, kind)) for kind in ("PNG", "JPEG", "WEBP", "BMP")),
    ("video", gif(3, 16)),
    ("image", jpeg_of_scans(32, 3)),
    ("audio", wav(0.01)),
]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Kind, bytes]:
    """A file with changed bytes, perhaps cut."""
    kind, data = draw(st.sampled_from(FILES))
    changed = bytearray(data)
    for share, value in draw(st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=8)):
        changed[int(share * len(data))] = value
    return kind, bytes(changed[: int(draw(st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.01])) * len(data))])


# ---- configs of adapters

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = """
    r lora_alpha target_modules bias use_rslora use_dora modules_to_save layers_to_transform rank_pattern alpha_pattern
    peft_type fan_in_fan_out trainable_token_indices
""".split()
_PATTERN_MAPS = st.dictionaries(PATTERNS, st.integers(-1, 20), max_size=3)
ADAPTER_FIELDS = st.dictionaries(st.sampled_from(_FIELDS), JSON, min_size=1, max_size=3) | st.fixed_dictionaries(
    {}, optional={"rank_pattern": _PATTERN_MAPS, "alpha_pattern": _PATTERN_MAPS}
)
