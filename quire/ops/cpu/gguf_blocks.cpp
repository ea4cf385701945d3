// Decodes the quantized blocks of GGUF files into codes, scales, offsets and factors (ops/reference/quantized.py).
// quantization/gguf.py is the straightforward version and describes the layouts.
#include <cstring>

#include "team.h"
#include "vector.h"

using namespace quire;

namespace {

// The destinations of a block's parts. codes: one per byte. factors: one or two float16 numbers.
struct Target {
  uint8_t *codes, *scales, *offsets;
  uint16_t* factors;
};

constexpr uint16_t SIGN = 0x8000;  // of a float16 number

inline uint16_t half_at(const uint8_t* x) {
  uint16_t value;
  memcpy(&value, x, 2);
  return value;
}

// Unpacks fields of BITS bits and adds them, times 2^SHIFT, to codes. For each RUN bytes, the lowest field of every
// byte comes first, then the next field of every byte, and so on.
template <int RUN, int BITS, int SHIFT, bool FIRST = SHIFT == 0>
inline void put_fields(const uint8_t* x, int bytes, uint8_t* codes) {
  constexpr int COUNT = 8 / BITS;
  for (int from = 0; from < bytes; from += RUN)
    for (int field = 0; field < COUNT; field++) {
      uint8_t* to = codes + from * COUNT + field * RUN;
      for (int i = 0; i < RUN; i++) {
        const uint8_t code = uint8_t((x[from + i] >> (BITS * field) & ((1 << BITS) - 1)) << SHIFT);
        to[i] = FIRST ? code : uint8_t(to[i] | code);
      }
    }
}

// Each type has ELEMENTS and BYTES of a block, WIDTH (bits of a code in memory), BASE (added to codes), SCALES (bytes
// of a block's scales), OFFSETS (whether it has them), FACTORS (their number), and `decode` for a block.

template <int BITS, bool HAS_MINIMUM>
struct Simple {  // Q4_0, Q4_1, Q5_0, Q5_1
  static constexpr int START = HAS_MINIMUM ? 4 : 2, ELEMENTS = 32, BYTES = START + (BITS == 5 ? 4 : 0) + 16;
  static constexpr int WIDTH = BITS == 5 ? 8 : 4, BASE = BITS == 5 && !HAS_MINIMUM ? 112 : 0;
  static constexpr int SCALES = 2, FACTORS = 0;
  static constexpr bool OFFSETS = HAS_MINIMUM;
  static void decode(const uint8_t* x, Target to) {
    put_fields<16, 4, 0>(x + BYTES - 16, 16, to.codes);
    if constexpr (BITS == 5) put_fields<1, 1, 4>(x + START, 4, to.codes);
    memcpy(to.scales, x, 2);
    if constexpr (HAS_MINIMUM) memcpy(to.offsets, x + 2, 2);
  }
};

struct Q8_0 {
  static constexpr int ELEMENTS = 32, BYTES = 34, WIDTH = 8, BASE = 128, SCALES = 2, FACTORS = 0;
  static constexpr bool OFFSETS = false;
  static void decode(const uint8_t* x, Target to) {
    memcpy(to.codes, x + 2, 32);  // signed codes; adding BASE (128) makes them unsigned
    memcpy(to.scales, x, 2);
  }
};

struct Q2_K {
  static constexpr int ELEMENTS = 256, BYTES = 84, WIDTH = 4, BASE = 0, SCALES = 16, FACTORS = 2;
  static constexpr bool OFFSETS = true;
  static void decode(const uint8_t* x, Target to) {
    put_fields<32, 2, 0>(x + 16, 64, to.codes);
    for (int i = 0; i < 16; i++) to.scales[i] = x[i] & 15, to.offsets[i] = x[i] >> 4;
    to.factors[0] = half_at(x + 80), to.factors[1] = half_at(x + 82) ^ SIGN;
  }
};

struct Q3_K {
  static constexpr int ELEMENTS = 256, BYTES = 110, WIDTH = 4, BASE = 4, SCALES = 16, FACTORS = 1;
  static constexpr bool OFFSETS = false;
  static void decode(const uint8_t* x, Target to) {
    put_fields<32, 2, 0>(x + 32, 64, to.codes);
    put_fields<32, 1, 2>(x, 32, to.codes);
    put_fields<8, 4, 0>(x + 96, 8, to.scales);
    put_fields<4, 2, 4>(x + 104, 4, to.scales);
    for (int i = 0; i < 16; i++) to.scales[i] = uint8_t(to.scales[i] - 32);
    to.factors[0] = half_at(x + 108);
  }
};

template <int BITS>
struct Q45_K {
  static constexpr int ELEMENTS = 256, BYTES = BITS == 5 ? 176 : 144, WIDTH = BITS == 5 ? 8 : 4, BASE = 0, SCALES = 8;
  static constexpr int FACTORS = 2;
  static constexpr bool OFFSETS = true;
  static void decode(const uint8_t* x, Target to) {
    put_fields<32, 4, 0>(x + BYTES - 128, 128, to.codes);
    if constexpr (BITS == 5) put_fields<32, 1, 4>(x + 16, 32, to.codes);
    for (int i = 0; i < 4; i++) {
      const uint8_t low = x[4 + i], minimum = x[8 + i], mixed = x[12 + i];
      to.scales[i] = low & 63, to.scales[4 + i] = uint8_t((mixed & 15) | (low >> 2 & 48));
      to.offsets[i] = minimum & 63, to.offsets[4 + i] = uint8_t(mixed >> 4 | (minimum >> 2 & 48));
    }
    to.factors[0] = half_at(x), to.factors[1] = half_at(x + 2) ^ SIGN;
  }
};

struct Q6_K {
  static constexpr int ELEMENTS = 256, BYTES = 210, WIDTH = 8, BASE = 96, SCALES = 16, FACTORS = 1;
  static constexpr bool OFFSETS = false;
  static void decode(const uint8_t* x, Target to) {
    put_fields<64, 4, 0>(x, 128, to.codes);
    put_fields<32, 2, 4>(x + 128, 64, to.codes);
    memcpy(to.scales, x + 192, 16);
    to.factors[0] = half_at(x + 208);
  }
};

template <class B>
void decode(const uint8_t* data, int64_t rows, int64_t blocks, Target all, int threads) {
  for_each(rows, threads, [=](int64_t row) {
    for (int64_t block = row * blocks; block < (row + 1) * blocks; block++) {
      uint8_t codes[B::ELEMENTS];
      B::decode(data + block * B::BYTES, {codes, all.scales + block * B::SCALES,
                                          B::OFFSETS ? all.offsets + block * B::SCALES : nullptr,
                                          B::FACTORS ? all.factors + block * B::FACTORS : nullptr});
      for (int i = 0; i < B::ELEMENTS; i++) codes[i] = uint8_t(codes[i] + B::BASE);
      uint8_t* to = all.codes + block * (B::ELEMENTS * B::WIDTH / 8);
      if constexpr (B::WIDTH == 8)
        memcpy(to, codes, sizeof(codes));
      else
        for (int i = 0; i < B::ELEMENTS / 2; i++) to[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
    }
  });
}

// Writes the values, times `factor` and plus `shift`, to out: [rows, blocks * ELEMENTS].
template <class B, class T>
void put_values(const uint8_t* data, int64_t rows, int64_t blocks, float factor, float shift, T* out, int threads) {
  constexpr bool HALVES = B::FACTORS == 0;  // float16 scales and offsets; otherwise integers times float16 factors
  constexpr int GROUPS = HALVES ? 1 : B::SCALES, GROUP = B::ELEMENTS / GROUPS, LANES = 16;
  constexpr int CENTRE = B::OFFSETS ? 0 : 1 << (B::WIDTH - 1);
  for_each(rows, threads, [=](int64_t row) {
    for (int64_t block = row * blocks; block < (row + 1) * blocks; block++) {
      uint8_t codes[B::ELEMENTS], scales[16], offsets[16];
      uint16_t halves[LANES] = {};
      B::decode(data + block * B::BYTES, {codes, scales, offsets, halves});
      if constexpr (HALVES) memcpy(halves, scales, 2);
      if constexpr (HALVES && B::OFFSETS) memcpy(halves + 1, offsets, 2);
      const f32x16 wide = widened_fp16(read<u16x16>(halves));
      for (int group = 0; group < GROUPS; group++) {
        float scale = wide[0], offset = wide[1];
        if constexpr (!HALVES) {
          scale = float(B::OFFSETS ? int(scales[group]) : int(int8_t(scales[group]))) * scale;
          if constexpr (B::OFFSETS) offset = float(offsets[group]) * offset;
        }
        for (int i = group * GROUP; i < (group + 1) * GROUP; i += LANES) {
          float code[LANES];
          for (int j = 0; j < LANES; j++) code[j] = float(int(uint8_t(codes[i + j] + B::BASE)) - CENTRE);
          f32x16 value = load(code) * scale;
          if constexpr (B::OFFSETS) value = value + offset;
          store_up_to(out + block * B::ELEMENTS + i, value * factor + shift, LANES);
        }
      }
    }
  });
}

// Calls f(B{}) for ggml's type number `type`.
template <class F>
void with_blocks(int type, F f) {
  switch (type) {
    case 2: return f(Simple<4, false>{});
    case 3: return f(Simple<4, true>{});
    case 6: return f(Simple<5, false>{});
    case 7: return f(Simple<5, true>{});
    case 8: return f(Q8_0{});
    case 10: return f(Q2_K{});
    case 11: return f(Q3_K{});
    case 12: return f(Q45_K<4>{});
    case 13: return f(Q45_K<5>{});
    case 14: return f(Q6_K{});
  }
}

}  // namespace

extern "C" {

// data: [rows, blocks] of ggml's type number `type`. codes: 4 bits each, two per byte, or 8 bits. offsets, factors:
// null for types without them.
void quire_gguf_blocks(int type, const uint8_t* data, int64_t rows, int64_t blocks, uint8_t* codes, uint8_t* scales,
                       uint8_t* offsets, uint16_t* factors, int threads) {
  with_blocks(type, [&](auto block) {
    decode<decltype(block)>(data, rows, blocks, {codes, scales, offsets, factors}, threads);
  });
}

// Writes the values of such data, times `factor` and plus `shift`, to out: [rows, inputs] of type `dtype`.
void quire_gguf_values(int type, int dtype, const uint8_t* data, int64_t rows, int64_t blocks, float factor,
                       float shift, void* out, int threads) {
  with_blocks(type, [&](auto block) {
    with_type(dtype, [&](auto value) {
      put_values<decltype(block)>(data, rows, blocks, factor, shift, (decltype(value)*)out, threads);
    });
  });
}
}
