// The format of a cache element: the model's type, float16 in a float32 model, or a one-byte cell, int8 or fp8 (e4m3).
// With one-byte cells, each token's key and value have one scale per head (defined in quire/attention/cells.py).
#pragma once

#include <algorithm>
#include <limits>

#include "vector.h"

namespace quire {

struct Int8 {
  static constexpr float LARGEST = 127;

  // Returns the value of the highest byte of each word; the other bytes are ignored.
  static QUIRE_INLINE f32x16 decode(u32x16 word) { return to_float(as<i32x16>(word) >> 24); }

  // Rounds x to nearest, ties to even, into the lowest byte. |x| must be at most LARGEST.
  static QUIRE_INLINE u32x16 encode(f32x16 x) {
    const f32x16 shift = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves an integer in the low bits
    return as<u32x16>(x + shift) & 0xff;
  }
#ifdef __AVX512VBMI__
  static __m512i without_sign(__m512i cells) { return _mm512_abs_epi8(cells); }  // -128 is never stored
#endif
};

// The e4m3 format of the Open Compute Project: 4 exponent bits, 3 fraction bits, no infinities. The codes of NaN, which
// are never stored, decode as +-480, so that unwritten memory contains no NaN: 0 * NaN would be NaN.
struct Fp8 {
  static constexpr float LARGEST = 448;

  static QUIRE_INLINE f32x16 decode(u32x16 word) {
    f32x16 size = as<f32x16>(word >> 4 & 0x07f00000u) * 0x1p120f;  // also correct for subnormal numbers
    return as<f32x16>(as<u32x16>(size) | (word & 0x80000000u));
  }

  static QUIRE_INLINE u32x16 encode(f32x16 x) {
    u32x16 bits = as<u32x16>(x), size = bits & 0x7fffffffu;
    u32x16 normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    u32x16 small = as<u32x16>(as<f32x16>(size) + 16384.0f) & 0xff;  // adding 2^14 leaves multiples of 2^-9
    return where(as<f32x16>(size) < 0x1p-6f, small, normal) | (bits >> 24 & 0x80);
  }
#ifdef __AVX512VBMI__
  static __m512i without_sign(__m512i cells) { return cells; }  // a look-up ignores the highest bit
#endif
};

// Expands a line of cells into lines of T: elements 0 and 1 of each word, then 2 and 3; for float32, one line per
// element.
template <class T, class Format>
struct Expand {
  void operator()(u32x16 cells, u32x16* lines) const {
    auto decode = [&](int i) { return as<u32x16>(Format::decode(cells << (24 - 8 * i))); };
    for (int j = 0; j < 4 / PAIR<T>; j++)
      if constexpr (PAIR<T> == 1) lines[j] = decode(j);
      else lines[j] = decode(2 * j) >> 16 | decode(2 * j + 1);  // exact: bfloat16 can represent every cell
  }
};

#ifdef __AVX512VBMI__
// Looks up the low and the high bytes of 64 cells' bfloat16 values with one instruction each. The tables are in
// registers.
template <class Format>
class Expand<bf16, Format> {
 public:
  void operator()(u32x16 stored, u32x16* lines) const {
    const __m512i cells = as<__m512i>(stored), index = Format::without_sign(cells);
    const __m512i low = _mm512_permutex2var_epi8(low_[0], index, low_[1]);
    __m512i high = _mm512_permutex2var_epi8(high_[0], index, high_[1]);
    high = _mm512_ternarylogic_epi64(high, cells, _mm512_set1_epi8(char(0x80)), 0xf8);  // high | (cells & 0x80)
    for (int j = 0; j < 2; j++) lines[j] = as<u32x16>(_mm512_permutex2var_epi8(low, zip_[j], high));
  }

 private:
  struct Tables {
    alignas(64) uint8_t low[128], high[128], zip[2][64];
    Tables() {
      for (uint32_t i = 0; i < 128; i++) {
        const uint32_t value = as<u32x16>(Format::decode(splat(i << 24)))[0];
        low[i] = value >> 16, high[i] = value >> 24;
      }
      for (int j = 0; j < 2; j++)  // positions of the j-th line's bytes in `low` followed by `high`
        for (int i = 0; i < 64; i++) zip[j][i] = i / 4 * 4 + 2 * j + i % 4 / 2 + i % 2 * 64;
    }
  };
  static inline const Tables tables;
  static __m512i line(const uint8_t* bytes) { return _mm512_load_si512(bytes); }

  const __m512i low_[2] = {line(tables.low), line(tables.low + 64)};
  const __m512i high_[2] = {line(tables.high), line(tables.high + 64)};
  const __m512i zip_[2] = {line(tables.zip[0]), line(tables.zip[1])};
};
#endif

// Limits on the rows and columns of sums in kernels that expand lines: expanded lines take registers, too.
constexpr int MOST_EXPANDED = MAX_COLUMNS > 1 ? 8 : MAX_ROWS;
constexpr int columns_expanded(int rows) { return std::min(MAX_COLUMNS, 16 / rows); }

// Cache elements in the model's own type, Type. T: the type used in products. LINES: lines of T per line of the cache.
template <class Type>
struct Whole {
  using Tensor = Type;
  using T = Factor<Type>;
  using Element = Type;
  static constexpr bool SCALED = false;
  static constexpr int LINES = UNPACKED<Type>;
  // The rows and columns of sums that fit into registers.
  static constexpr int ROWS = LINES > 1 ? MOST_EXPANDED : std::is_same_v<T, float> && MAX_COLUMNS == 1 ? 6 : MAX_ROWS;
  static constexpr int columns(int rows) {
    return LINES > 1 ? columns_expanded(rows) : rows <= 2 ? 2 * MAX_COLUMNS : MAX_COLUMNS;
  }

  struct Expand {
    void operator()(u32x16 stored, u32x16* lines) const { unpack<Type>(stored, lines); }
  };
  static void copy(const Type* from, int64_t n, Element* to) { memcpy(to, from, n * sizeof(Type)); }
  // x: [n] -> elements: [size], padded with zeros in `room`. Returns these, or x if no padding is needed.
  static const Type* encode(const Type* x, int n, int size, Element* room, float*) {
    return n == size ? x : (const Type*)memcpy(room, x, n * sizeof(Type));
  }
};

// The storage of float16 for a model with float32 tensors. Larger finite numbers become the largest float16.
struct Narrowed : Whole<fp16> {
  using Tensor = float;

  static void copy(const float* from, int64_t n, fp16* to) {
    constexpr float LARGEST = 65504, INFINITE = std::numeric_limits<float>::infinity();
    for_lanes(n, [&](int64_t i, int lanes) {
      f32x16 x = load_up_to(from + i, lanes);
      x = where((x > LARGEST) & (x < INFINITE), splat(LARGEST), x);
      store_up_to(to + i, where((x < -LARGEST) & (x > -INFINITE), splat(-LARGEST), x), lanes);
    });
  }
  static const fp16* encode(const float* x, int n, int, fp16* room, float*) {
    copy(x, n, room);
    return room;
  }
};

template <class Type, class Format>
struct Cells {
  using Tensor = Type;
  using T = Factor<Type>;
  using Element = uint8_t;
  static constexpr bool SCALED = true;
  static constexpr int LINES = 4 / PAIR<T>;
  static constexpr int ROWS = MOST_EXPANDED;
  static constexpr int columns(int rows) { return columns_expanded(rows); }

  using Expand = quire::Expand<T, Format>;

  // x: [n] -> cells: [n] and their scale. Returns the cells.
  static const Element* encode(const Type* x, int n, int, Element* cells, float* scale) {
    u32x16 largest = {};  // compared as bits, so that NaN counts as the largest
    auto larger = [](u32x16 a, u32x16 b) { return where(a > b, a, b); };
    for_lanes(n, [&](int64_t i, int lanes) {
      largest = larger(largest, as<u32x16>(load_up_to(x + i, lanes)) & 0x7fffffffu);
    });
    *scale = std::max(as<f32x16>(folded(largest, larger))[0] / Format::LARGEST, 0x1p-126f);
    for_lanes(n, [&](int64_t i, int lanes) {
      const u8x16 encoded = low_bytes(Format::encode(load_up_to(x + i, lanes) / *scale));
      memcpy(cells + i, &encoded, lanes);
    });
    return cells;
  }
};

}  // namespace quire
