// The product with float8 (e4m3) weights in panels (panels.h). bfloat16 activations are used directly. A float16 row is
// split into two bfloat16 rows: the rounded numbers, and the remainders.
//
//   result[m, n] = sum over groups g of  scale[n, g] * sum code * x
//
// A word holds the codes of four inputs. In registers they become two words of bfloat16, which can represent all float8
// values:
//
//     word of codes | w[0] w[1] w[2] w[3] |      words of bfloat16 | w[0] w[2] | and | w[1] w[3] |
//
// Pairs of neighbouring inputs would take more instructions. x is copied with its inputs in the same order.
#include "blocks.h"
#include "panels.h"
#include "replay.h"

using namespace quire;

namespace {

// The codes of NaN, which weights never contain, are read as 480 and -480.
#ifdef __AVX512VBMI__

// The low and high bytes of each code's bfloat16 value, without the sign.
struct Values {
  alignas(64) uint8_t low[128] = {}, high[128] = {};

  constexpr Values() {
    for (int code = 1; code < 128; code++) {
      int exponent = 120, digits = code;
      for (; digits < 8; exponent--) digits *= 2;  // float8's subnormal numbers are normal in bfloat16
      const int bits = (exponent << 7) + (digits << 4);
      low[code] = uint8_t(bits), high[code] = uint8_t(bits >> 8);
    }
  }
};
constexpr Values VALUES;

// Looks up the lowest seven bits of each code in a table of 128 bytes.
QUIRE_INLINE u32x16 looked_up(u32x16 codes, const uint8_t* table) {
  const auto first = as<__m512i>(read<u32x16>(table)), second = as<__m512i>(read<u32x16>(table + 64));
  return as<u32x16>(_mm512_permutex2var_epi8(first, as<__m512i>(codes), second));
}

QUIRE_INLINE void widen(u32x16 codes, u32x16 (&pairs)[2]) {
  const u32x16 low = looked_up(codes, VALUES.low), high = looked_up(codes, VALUES.high) | (codes & 0x80808080u);
  pairs[0] = (high << 8 & 0xff00ff00u) | (low & 0x00ff00ffu);
  pairs[1] = (high & 0xff00ff00u) | (low >> 8 & 0x00ff00ffu);
}

#else

// The lowest byte as bfloat16, in the upper half of each lane. Its bits are first placed in a float32 that is 2^120
// times too small. The product restores the scale: bfloat16 instructions would treat the smallest numbers as 0.
QUIRE_INLINE u32x16 value(u32x16 code) {
  return as<u32x16>(as<f32x16>((code & 0x80u) << 24 | (code & 0x7fu) << 20) * splat(0x1p120f));
}

QUIRE_INLINE void widen(u32x16 codes, u32x16 (&pairs)[2]) {
  pairs[0] = value(codes >> 16) | value(codes) >> 16;
  pairs[1] = value(codes >> 24) | value(codes >> 8) >> 16;
}

#endif

struct Float8 {
  static constexpr int INPUTS = 4;  // per word of codes

  const uint32_t* weights;
  const float* scales;  // panels of [groups, outputs]
  const uint64_t* x;    // [rows, row_words], four inputs per word
  int dtype;            // of bias and result
  int parts;            // rows of x per row of activations: 2 for float16, otherwise 1
  const void* bias;     // [out] or null
  void* result;         // [rows / parts, out]
  int64_t out, row_words, group_words, groups;

  // A single scale for all inputs is applied to the complete sums, so a row can be visited in parts of any size.
  bool scaled_last() const { return groups == 1; }

#ifdef QUIRE_TILES
  static constexpr int STEP = TILE / 2;  // words that fill a tile

  // Used for any number of rows, since tiles add in another order than `visit`.
  bool in_tiles(int64_t) const { return has_tiles(); }
  int64_t step() const { return scaled_last() ? STEP : group_words; }

  void visit_tiles(Tiles& tiles, const Part& part, int64_t row, int count, int line, float* sums, Ahead& ahead) const {
    tiles.configure(count);
    const int stride = part.stride(), both = std::min(2, part.lines - line);
    const int64_t words = part.words;
    const uint64_t* inputs = x + row * row_words + part.word;
    alignas(64) float products[AMX_ROWS][2 * LANES];
    alignas(64) uint32_t unpacked[TILE][2 * LANES];
    Ahead nothing{nullptr, 0};
    const int64_t length = std::min(group_words, words), number = (words + length - 1) / length;
    Ahead::Pace pace = ahead.pace(number * ((length + STEP - 1) / STEP));
    auto place = [&](int r, int l) { return sums + r * PANEL + l * LANES; };
    for (int64_t begin = 0, at = line * LANES; begin < words; begin += length, at += stride) {
      const int64_t end = std::min(begin + length, words);
      tiles.for_sums(both, [&](auto tile, int r, int l) {
        if (scaled_last() && !part.is_first()) load_tile<tile.value>(place(r, l), PANEL * sizeof(float));
        else zero_tile<tile.value>();
      });
      for (int64_t i = begin; i < end; i += STEP) {
        ahead.fetch(pace);
        const int some = int(std::min<int64_t>(STEP, end - i));
        const uint32_t* pairs = part.weights + (part.is_wide ? 2 : 1) * i * stride + line * LANES;
        if (!part.is_wide) widen_lines(pairs, stride, some, both, unpacked[0], nothing);
        tiles.multiply<true>((const char*)(inputs + i), row_words * sizeof(*x), part.is_wide ? pairs : unpacked[0],
                             part.is_wide ? stride : both * LANES, 2 * some, both);
      }
      tiles.for_sums(both, [&](auto tile, int r, int l) {
        if (scaled_last()) store_tile<tile.value>(place(r, l), PANEL * sizeof(float));
        else store_tile<tile.value>(&products[r][l * LANES], sizeof(products[0]));
      });
      if (!scaled_last())
        for (int r = 0; r < count; r++)
          for (int l = 0; l < both; l++)
            add_group(load(&products[r][l * LANES]), part.scales + at + l * LANES, part.is_first() && begin == 0,
                      place(r, l));
    }
  }
#else
  int64_t step() const { return scaled_last() ? 1 : group_words; }
#endif

  void expect(int64_t panel, int lines) const { fetch_panel((const uint32_t*)scales, panel, groups, lines); }

  // Widening takes as long as multiplying with two or three rows.
  bool unpacks(int pieces, bool) const { return pieces > 1; }

  Part part(int64_t panel, int64_t word, int64_t words, int lines, int pieces, bool, Unpacked& unpacked,
            Ahead& ahead) const {
    Part part{panel, lines, word, words, weights + panel * PANEL * row_words + word * lines * LANES};
    part.scales = scales + panel * PANEL * groups + word / group_words * part.stride();
    if (unpacks(pieces, false)) {
      uint32_t* wide = room(unpacked.words, 2 * words * part.stride());
      widen_lines(part.weights, part.stride(), words, lines, wide, ahead);
      part.weights = wide, part.is_wide = true;
    }
    return part;
  }

  // Widens [words, lines] codes to bfloat16 pairs: [2 * words, lines].
  static void widen_lines(const uint32_t* from, int stride, int64_t words, int lines, uint32_t* to, Ahead& ahead) {
    Ahead::Pace pace = ahead.pace(words);
    for (int64_t i = 0; i < words; i++, from += stride, to += 2 * lines * LANES) {
      ahead.fetch(pace);
      for (int line = 0; line < lines; line++) {
        u32x16 pairs[2];
        widen(load_words(from + line * LANES), pairs);
        store(to + line * LANES, pairs[0]), store(to + (lines + line) * LANES, pairs[1]);
      }
    }
  }

  template <int R, int C>
  void visit(const Part& part, int64_t row, int line, float* sums, Ahead& ahead) const {
    if (part.is_wide) {
      visit<R, C, true>(part, row, line, sums, ahead);
    } else if constexpr (R > 2 && C > 2) {  // values, their tables and the sums would not fit into the registers
      visit<R, C - 2, false>(part, row, line, sums, ahead);
      visit<R, 2, false>(part, row, line + C - 2, sums + (C - 2) * LANES, ahead);
    } else {
      visit<R, C, false>(part, row, line, sums, ahead);
    }
  }

  template <bool IS_WIDE>
  static QUIRE_INLINE void load_pairs(const uint32_t* w, int64_t i, int stride, u32x16 (&pairs)[2]) {
    if constexpr (IS_WIDE) pairs[0] = load_words(w + 2 * i * stride), pairs[1] = load_words(w + (2 * i + 1) * stride);
    else widen(load_words(w + i * stride), pairs);
  }

  template <int R, int C, bool IS_WIDE>
  void visit(const Part& part, int64_t row, int line, float* sums, Ahead& ahead) const {
    const int stride = part.stride();
    const int64_t words = part.words;
    Ahead::Pace pace = ahead.pace(words);
    const uint32_t* w = part.weights + line * LANES;
    const char* inputs = (const char*)(x + row * row_words + part.word);
    const int64_t bytes = row_words * sizeof(*x);
    for (int64_t begin = 0, at = line * LANES; begin < words; begin += group_words, at += stride) {
      const int64_t end = std::min(begin + group_words, words);
      f32x16 sum[R][C];
#pragma GCC unroll 6
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++)
          sum[r][c] = scaled_last() && !part.is_first() ? load(sums + r * PANEL + c * LANES) : f32x16{};
#ifdef QUIRE_BLOCKS
      if constexpr (R > 1) {
        Blocks<R, f32x16> blocks(sum);
        for (int64_t i = begin; i < end; i++) {
          u32x16 pairs[2];
          load_pairs<IS_WIDE>(w, i, stride, pairs);
          ahead.fetch(pace);
          blocks.add(pairs[0], pairs[1], inputs + i * sizeof(*x), bytes);
        }
        blocks.write(sum);
      } else
#endif
      for (int64_t i = begin; i < end; i++) {
        ahead.fetch(pace);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          u32x16 pairs[2];
          load_pairs<IS_WIDE>(w + c * LANES, i, stride, pairs);
#pragma GCC unroll 2
          for (int half = 0; half < 2; half++)
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
              uint32_t pair;
              memcpy(&pair, inputs + r * bytes + i * sizeof(*x) + half * 4, 4);
              sum[r][c] = dot<bf16>(sum[r][c], pairs[half], splat(pair));
            }
        }
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          float* to = sums + r * PANEL + c * LANES;
          if (scaled_last()) store(to, sum[r][c]);
          else add_group(sum[r][c], part.scales + at + c * LANES, part.is_first() && begin == 0, to);
        }
    }
  }

  static QUIRE_INLINE void add_group(f32x16 sum, const float* scale, bool is_first, float* to) {
    store(to, fma(sum, load(scale), is_first ? f32x16{} : load(to)));
  }

  void finish(int64_t panel, int64_t first, int rows, float* sums) const {
    const Shape shape{0, out, row_words};
    if (scaled_last())
      for (int line = 0; line < shape.lines(panel % shape.panels()); line++) {
        const f32x16 scale = load(scales + panel * PANEL + line * LANES);
        for (int r = 0; r < rows; r++) {
          float* to = sums + r * PANEL + line * LANES;
          store(to, load(to) * scale);
        }
      }
    for (int i = 0; parts == 2 && i < rows / 2 * PANEL; i += LANES) {
      const float* pair = sums + i / PANEL * 2 * PANEL + i % PANEL;
      store(sums + i, load(pair) + load(pair + PANEL));
    }
    write_sums(dtype, sums, panel, first / parts, rows / parts, bias, result, out);
  }
};

// Packs x into words of four inputs, in the order 0, 2, 1, 3, padded with zeros.
void reorder(const bf16* x, int64_t in, uint64_t* to) {
  auto reordered = [](uint64_t four) {
    return (four & 0xffff00000000ffff) | (four & 0xffff0000) << 16 | (four >> 16 & 0xffff0000);
  };
  for (int64_t word = 0; word < in / 4; word++) {
    uint64_t four;
    memcpy(&four, x + 4 * word, 8);
    to[word] = reordered(four);
  }
  if (in % 4) {
    uint64_t four = 0;
    memcpy(&four, x + in / 4 * 4, in % 4 * sizeof(bf16));
    to[in / 4] = reordered(four);
  }
}

// Writes two rows: the numbers rounded to bfloat16, then the remainders.
void reorder(const fp16* x, int64_t in, uint64_t* to) {
  thread_local std::vector<bf16> kept;
  kept.resize(2 * in);
  bf16 *rounded = kept.data(), *rest = rounded + in;
  for_lanes(in, [&](int64_t i, int n) {
    const f32x16 v = load_up_to(x + i, n);
    store_up_to(rounded + i, v, n), store_up_to(rest + i, v - rounded_to(v, bf16{}), n);
  });
  reorder(rounded, in, to), reorder(rest, in, to + (in + 3) / 4);
}

void reorder(const float*, int64_t, uint64_t*) {}

}  // namespace

// x: [rows, in] -> result: [rows, out]. codes, scales: from quire_panels. group: inputs per scale, a multiple of 4
// unless there is only one group. bounds: see Shape, or null.
extern "C" void quire_float8_linear(int dtype, const void* x, int64_t x_stride, int64_t rows, const void* codes,
                                    const float* scales, int64_t out, int64_t in, int64_t group, const void* bias,
                                    const int64_t* bounds, int64_t experts, void* result, int threads) {
  thread_local std::vector<uint64_t> reordered;  // kept between calls
  thread_local std::vector<int64_t> kept_bounds;
  const int64_t words = (in + Float8::INPUTS - 1) / Float8::INPUTS;
  const int parts = dtype == 2 ? 2 : 1;
  reordered.resize(parts * rows * words);
  uint64_t* to = reordered.data();
  with_type(dtype, [=](auto type) {
    for_each(rows, rows * in > 32768 ? threads : 1, [=](int64_t row) {
      reorder((const decltype(type)*)x + row * x_stride, in, to + row * parts * words);
    });
  });
  if (bounds && parts == 2) {
    kept_bounds.assign(bounds, bounds + experts + 1);
    for (int64_t& bound : kept_bounds) bound *= parts;
    bounds = kept_bounds.data();
  }
  const int64_t group_words = std::min((group + Float8::INPUTS - 1) / Float8::INPUTS, words);
  const Float8 format{(const uint32_t*)codes, scales, to,    dtype,       parts, bias, result,
                      out,                    words,  group_words, (in + group - 1) / group};
  multiply(format, {parts * rows, out, words, bounds, experts}, threads);
}

RECORDABLE(quire_float8_linear)
