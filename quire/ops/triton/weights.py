"""Decodes stored weights (integers, float8, and codes of 4 bits) to the type of the product's other operand."""

import triton
import triton.language as tl

from quire.ops.triton.float8 import from_float8


@triton.constexpr_function
def _unpacking(dtype, quarter, centre):
    """Return PTX that converts the 4-bit codes in one quarter of two 16-bit words to two 16-bit floats.

    A code in the last bits of a float's mantissa is added to the float: to 128 in bfloat16, to 1024 in float16. This
    constant is then subtracted together with the centre.
    """
    name, base, one, minus = ("bf16", 0x4300, 0x3F80, 0xC300) if dtype.is_bf16() else ("f16", 0x6400, 0x3C00, 0xE400)
    return f"""{{
        .reg .b32 a, one, minus;
        mov.b32 one, {one * 0x10001};
        mov.b32 minus, {(minus + centre) * 0x10001};
        shr.u32 a, $1, {4 * quarter};
        lop3.b32 a, a, 0x000F000F, {base * 0x10001}, 0xEA;
        fma.rn.{name}x2 $0, a, one, minus;
    }}"""


@triton.constexpr_function
def _lookup(quarter, words):
    """Return PTX that looks up the 4-bit codes in one quarter of two 16-bit words, giving two 16-bit floats.

    `prmt` picks one byte of eight for each of four codes of 3 bits. So the low bytes of the floats are looked up in
    both halves of the table, then the high bytes, and the fourth bit of a code decides between the halves. Two quarters
    are looked up together, and the assembler merges the instructions that are the same for both.

    words: see words_of.
    """
    lines = []
    for name, table in (("low", words[:4]), ("high", words[4:])):
        lines += [f"mov.b32 {register}, {word};" for register, word in zip("abcd", table, strict=True)]
        lines.append(f"prmt.b32 {name}, a, b, codes;")
        if table[:2] != table[2:]:
            lines += ["prmt.b32 c, c, d, codes;", f"prmt.b32 {name}, {name}, c, half;"]
    if quarter >= 2:
        lines = ["shr.u32 half, half, 16;", "shr.u32 codes, codes, 16;", *lines]
    return f"""{{
        .reg .b32 codes, half, low, high, a, b, c, d;
        prmt.b32 codes, $1, 0, 0x3120;
        shr.u32 half, codes, 1;
        lop3.b32 half, half, 0x44444444, 0x32103210, 0xEA;
        and.b32 codes, codes, 0x77777777;
        {" ".join(lines)}
        prmt.b32 $0, low, high, {("0x6240", "0x7351")[quarter % 2]};
    }}"""


@triton.constexpr_function
def _float8_conversion(dtype):
    """Return PTX that converts four float8_e4m3fn to 16-bit floats, for cards without an instruction. NaNs become 480.

    With the bits of its exponent and mantissa moved into place, a value is too small by a power of two, since the
    exponents' biases differ. This is also correct for subnormal values.
    """
    name, shift, mask, factor = ("bf16", 4, 0x07F0, 0x7B80) if dtype.is_bf16() else ("f16", 1, 0x3F80, 0x5C00)
    pair = """
        prmt.b32 a, $2, 0, {select};
        shr.u32 b, a, {shift};
        and.b32 b, b, {mask};
        lop3.b32 a, a, 0x80008000, b, 0xEA;
        fma.rn.{name}x2 {out}, a, factor, zero;"""
    low, high = (
        pair.format(select=select, shift=shift, mask=mask * 0x10001, name=name, out=out)
        for select, out in (("0x1404", "$0"), ("0x3424", "$1"))
    )
    return f"""{{
        .reg .b32 a, b, factor, zero;
        mov.b32 factor, {factor * 0x10001};
        mov.b32 zero, 0x80008000;{low}{high}
    }}"""


@triton.jit
def group_of_quarter(word, QUARTER: tl.constexpr, ins, GROUP: tl.constexpr):
    """Return the group of a quarter of a word, if each quarter has its own. Words after the inputs have the last
    group."""
    return tl.minimum(word // GROUP * 4 + QUARTER, (ins - 1) // GROUP)


@triton.jit
def weights_of(
    stored,
    table,
    scale_rows,
    offset_rows,
    begin,
    at,
    group_stride,
    ins,
    QUARTER: tl.constexpr,
    FORM: tl.constexpr,
    WORDS: tl.constexpr,
    SCALING: tl.constexpr,
    OFFSETS: tl.constexpr,
    CENTRE: tl.constexpr,
    NATIVE: tl.constexpr,
    GROUP: tl.constexpr,
    PTX: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return the weights of a step of the loop in `dtype`, without scales if these are applied to the products."""
    if FORM == "float8" and PTX and not NATIVE:
        values = tl.inline_asm_elementwise(
            _float8_conversion(dtype), "=r,=r,r", [stored], dtype=dtype.value, is_pure=True, pack=4
        )
    elif FORM == "float8":
        values = from_float8(stored, dtype, NATIVE)
    elif FORM == "table" and PTX:
        values = tl.inline_asm_elementwise(
            _lookup(QUARTER, WORDS), "=r,r", [stored], dtype=dtype.value, is_pure=True, pack=2
        )
    elif FORM == "table":
        values = tl.load(table + ((stored >> (4 * QUARTER)) & 15))
    elif FORM == "four" and PTX:
        values = tl.inline_asm_elementwise(
            _unpacking(dtype, QUARTER, CENTRE), "=r,r", [stored], dtype=dtype.value, is_pure=True, pack=2
        )
    elif FORM == "four":
        values = ((stored >> (4 * QUARTER)) & 15).to(tl.int8)
        if CENTRE:
            values -= CENTRE
        values = values.to(dtype)
    else:
        values = stored.to(dtype)
    if SCALING == "quarters":
        scale = tl.load(scale_rows + group_of_quarter(begin, QUARTER, ins, GROUP) * group_stride)
        values = (values * scale.to(tl.float32)[:, None]).to(dtype)
    elif SCALING == "groups":
        # One load for each group. All weights of a group are then multiplied by its scale.
        per_word: tl.constexpr = 4 if FORM == "four" or FORM == "table" else 1
        count: tl.constexpr = stored.shape[1] * per_word // GROUP
        shape: tl.constexpr = (stored.shape[0], count, GROUP // per_word)
        groups = begin * per_word // GROUP + tl.arange(0, count)
        inside = (groups * GROUP < ins)[None, :]
        scale = tl.load(scale_rows[:, None] + groups[None, :] * group_stride, mask=inside, other=0.0).to(tl.float32)
        wide = tl.reshape(values.to(tl.float32), shape) * scale[:, :, None]
        if OFFSETS:
            offset = tl.load(offset_rows[:, None] + groups[None, :] * group_stride, mask=inside, other=0.0)
            wide += offset.to(tl.float32)[:, :, None]
        values = tl.reshape(wide, stored.shape).to(dtype)
    elif SCALING == "any":
        inside = (at < ins)[None, :]
        groups = (at // GROUP)[None, :] * group_stride
        wide = values.to(tl.float32) * tl.load(scale_rows[:, None] + groups, mask=inside, other=0.0)
        if OFFSETS:
            wide += tl.load(offset_rows[:, None] + groups, mask=inside, other=0.0)
        values = wide.to(dtype)
    return values
