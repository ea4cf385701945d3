// Integer products with 8-bit or 4-bit weights in panels (panels.h). Activations are quantized to 8 bits on the fly,
// with a scale for each row and each of the weights' groups of inputs.
//
//   result[m, n] = sum over groups g of  x_scale[m, g] * (scale[n, g] * sum (code - centre) * x_code
//                                                         + offset[n, g] * sum x_code)
//
// A word holds four 8-bit codes, or eight 4-bit codes. For 4-bit codes, x is reordered to match the halves of bytes: of
// each eight inputs, the even ones come first, then the odd ones.
//
// 4-bit codes that index a table are not multiplied as integers: their values are looked up, sixteen per instruction,
// and multiplied with the unquantized activations.
#include <numeric>

#include "blocks.h"
#include "byte_products.h"
#include "narrow_codes.h"
#include "panels.h"
#include "quantized_pairs.h"
#include "replay.h"
#include "scales.h"

using namespace quire;

namespace {

// BITS: the width of codes as visits read them.
template <int BITS>
struct Quantized : PairVisits<Quantized<BITS>, BITS> {
  using Visits = PairVisits<Quantized<BITS>, BITS>;
  static constexpr int INPUTS = 32 / BITS, X_WORDS = INPUTS / 4;  // per word of codes
  static constexpr int SHIFT = BITS == 8 ? LESS : 0;              // subtracted from codes when they are multiplied

  const uint32_t* weights;
  int bits;  // of the codes in memory, at most BITS
  Scales scales, offsets;
  const Activations& x;
  int dtype;         // of bias and result
  const void* bias;  // [out] or null
  void* result;      // [rows, out]
  int64_t out, row_words, group_words;  // in words of BITS-bit codes

  int32_t centre() const { return 1 << (bits - 1); }  // the code for 0 if there are no offsets
  bool is_narrow() const { return bits < BITS; }
  int64_t stored(int64_t words) const {
    return is_narrow() ? (words + wide_words(bits) - 1) / wide_words(bits) * stored_words(bits) : words;
  }
  int64_t step() const { return is_narrow() ? stored(std::lcm(group_words, int64_t(wide_words(bits)))) : group_words; }

  // Whether codes are widened in memory. A single row widens them in registers if groups are multiples of 16 inputs.
  bool widens_codes(bool is_row) const {
    return is_narrow() && !(is_row && (group_words * INPUTS % 16 == 0 || group_words == row_words));
  }
  bool has_offsets() const { return offsets.numbers.words; }
  bool widens_scales() const { return scales.unpacks() || offsets.unpacks(); }
#ifdef QUIRE_PAIRS
  bool unpacks(int, bool is_row) const { return !is_row || widens_codes(true); }
#else
  bool unpacks(int, bool is_row) const { return widens_codes(is_row) || (widens_scales() && !is_row); }
#endif

  void expect(int64_t panel, int lines) const { scales.expect(panel, lines), offsets.numbers.expect(panel, lines); }

  Part part(int64_t panel, int64_t word, int64_t words, int lines, int, bool is_row, Unpacked& unpacked,
            Ahead& ahead) const {
    Part part{panel, lines, word, words, weights + panel * PANEL * stored(row_words) + word * lines * LANES};
    if (is_narrow()) {
      const int64_t units = words / stored_words(bits);
      part.word = word / stored_words(bits) * wide_words(bits);
      part.words = std::min(units * wide_words(bits), row_words - part.word);
      part.is_wide = widens_codes(is_row);
      if (part.is_wide) part.weights = widened(part.weights, units, lines, unpacked.words, ahead.portion(2));
    }
#ifdef QUIRE_PAIRS
    if (!is_row && !part.is_wide && (BITS == 4 || Visits::IS_WIDE))
      part.weights = Visits::in_pairs(part.weights, words, lines, unpacked.words, ahead.portion(2));
#else
    if (is_row && (is_narrow() || widens_scales())) return part;  // for visit_row
#endif
    const int64_t first = part.word / group_words, groups = (part.words + group_words - 1) / group_words;
    part.scales = scales.of(panel, first, groups, lines, unpacked.scales, ahead.portion(offsets.unpacks() ? 2 : 1));
    part.offsets = offsets.of(panel, first, groups, lines, unpacked.offsets, ahead);
    return part;
  }

  const uint32_t* widened(const uint32_t* from, int64_t units, int lines, std::vector<uint32_t>& kept,
                          Ahead ahead) const {
    constexpr int MADE = Visits::PAIR_LINES;  // lines stored per line of wide codes
    const int stride = lines * LANES;
    uint32_t* const all = room(kept, units * wide_words(bits) * MADE * stride);
    Ahead::Pace pace = ahead.pace(units * lines);
    with_bits(bits, [=](auto constant) mutable {
      constexpr int N = constant.value, WIDE = wide_words(N);
      uint32_t* to = all;
      for (int64_t unit = 0; unit < units; unit++, from += stored_words(N) * stride, to += WIDE * MADE * stride)
        for (int line = 0; line < stride; line += LANES) {
          u32x16 wide[WIDE];
          widen_codes<N>([&](int word) { return load_words(from + word * stride + line); }, wide);
          ahead.fetch(pace);
#pragma GCC unroll 8
          for (int word = 0; word < WIDE; word++) {
#ifdef QUIRE_PAIRS
            Visits::template split<false>(wide[word], to + word * MADE * stride + line, stride);
#else
            store(to + word * stride + line, wide[word]);
#endif
          }
        }
    });
    return all;
  }

#ifndef QUIRE_PAIRS
  template <int R, int C>
  void visit(const Part& part, int64_t row, int line, float* sums, Ahead& ahead) const {
    if constexpr (R == 1)
      if (!part.scales) {
        if (!is_narrow() || part.is_wide) return visit_row<BITS, C>(part, row, line, sums, ahead);
        return with_bits(bits, [&](auto constant) {
          constexpr int N = constant.value;
          if constexpr (wide_bits(N) == BITS) visit_row<N, C>(part, row, line, sums, ahead);
        });
      }
    const int stride = part.stride();
    const int64_t word = part.word, words = part.words;
    Ahead::Pace pace = ahead.pace(words);
    const uint32_t* w = part.weights + line * LANES;
    const int8_t* codes = x.codes.data() + row * x.stride;
    for (int64_t begin = 0, g = word / group_words, at = line * LANES; begin < words;
         begin += group_words, g++, at += stride) {
      const int64_t end = std::min(begin + group_words, words);
      i32x16 sum[R][C];
      begin_group(row, g, sum);
#ifdef QUIRE_BLOCKS
      if constexpr (R > 1)
        add_blocks<R>(w + begin * stride, stride, end - begin, word + begin, codes, sum, ahead, pace);
      else
#endif
      for (int64_t i = begin; i < end; i++) {
        u32x16 line[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) line[c] = load_words(w + i * stride + c * LANES);
        ahead.fetch(pace);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
          uint32_t word_of_x[X_WORDS];
          memcpy(word_of_x, codes + r * x.stride + (word + i) * INPUTS, INPUTS);
#pragma GCC unroll 4
          for (int c = 0; c < C; c++)
            sum[r][c] = dot_word(sum[r][c], line[c], word_of_x, std::integral_constant<int, BITS>{});
        }
      }
      end_group(part, row, g, at, sum, sums);
    }
  }

  // Visits a single row. Its N-bit codes and its scales are widened in registers, since each is needed only once.
  template <int N, int C>
  void visit_row(const Part& part, int64_t row, int line, float* sums, Ahead& ahead) const {
    constexpr bool IS_NARROW = N < BITS, HAS_HALVES = IS_NARROW && N % 2;  // units of 32 codes, instead of 16
    constexpr int WIDE = IS_NARROW ? wide_words(N) : 1, TAKEN = HAS_HALVES ? WIDE / 2 : WIDE;
    constexpr int STORED = IS_NARROW ? stored_words(N) : 1;
    const int stride = part.stride();
    Ahead::Pace pace = ahead.pace(part.words / TAKEN + 1);
    const uint32_t* w = part.weights + line * LANES;
    const int8_t* codes = x.codes.data() + row * x.stride + part.word * INPUTS;
    ScaleReader<C> scale(scales, part.panel, part.lines, line), offset(offsets, part.panel, part.lines, line);
    for (int64_t begin = 0, g = part.word / group_words; begin < part.words; begin += group_words, g++) {
      const int64_t end = std::min(begin + group_words, part.words);
      i32x16 sum[1][C];
      begin_group(row, g, sum);
      for (int64_t i = begin; i < end; i += TAKEN) {
        ahead.fetch(pace);
        uint32_t word_of_x[TAKEN][X_WORDS];
        memcpy(word_of_x, codes + i * INPUTS, sizeof(word_of_x));
        auto add = [&](auto first) {
#pragma GCC unroll 4
          for (int c = 0; c < C; c++) {
            u32x16 wide[WIDE];
            auto load_word = [&](int word) { return load_words(w + word * stride + c * LANES); };
            if constexpr (IS_NARROW) widen_codes<N>(load_word, wide);
            else wide[0] = load_word(0);
#pragma GCC unroll 8
            for (int word = 0; word < TAKEN; word++)
              sum[0][c] = dot_word(sum[0][c], wide[first.value + word], word_of_x[word], Constant<BITS>{});
          }
        };
        const bool is_second = HAS_HALVES && (part.word + i) / TAKEN % 2;
        if (is_second) add(Constant<WIDE - TAKEN>{});
        else add(Constant<0>{});
        if (is_second || !HAS_HALVES) w += STORED * stride;
      }
      f32x16 by[C], more[C];
      scale.read(g, by);
      if (has_offsets()) offset.read(g, more);
      const float x_scale = x.scales[x.at(g, row)], x_sum = x.totals[x.at(g, row)];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        f32x16 all = g == 0 ? f32x16{} : load(sums + c * LANES);
        all = fma(to_float(sum[0][c]), by[c] * x_scale, all);
        if (has_offsets()) all = fma(more[c], splat(x_sum), all);
        store(sums + c * LANES, all);
      }
    }
  }

#endif

  template <int R, int C>
  QUIRE_INLINE void begin_group(int64_t row, int64_t g, i32x16 (&sum)[R][C]) const {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const int32_t zero =
          has_offsets() && !SHIFT ? 0 : (has_offsets() ? SHIFT : SHIFT - centre()) * x.sums[x.at(g, row + r)];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sum[r][c] = splat(zero);
    }
  }

  template <int R, int C>
  QUIRE_INLINE void end_group(const Part& part, int64_t row, int64_t g, int64_t at, i32x16 (&sum)[R][C],
                              float* sums) const {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const float x_scale = x.scales[x.at(g, row + r)];
      const float x_sum = x.totals[x.at(g, row + r)];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        float* to = sums + r * PANEL + c * LANES;
        f32x16 all = g == 0 ? f32x16{} : load(to);
        all = fma(to_float(sum[r][c]), load(part.scales + at + c * LANES) * x_scale, all);
        if (part.offsets) all = fma(load(part.offsets + at + c * LANES), splat(x_sum), all);
        store(to, all);
      }
    }
  }

#ifdef QUIRE_TILES
  // Tiles give the same results, but are slower for few rows.
  bool in_tiles(int64_t rows) const { return rows > MAX_ROWS && has_tiles(); }

  void visit_tiles(Tiles& tiles, const Part& part, int64_t row, int count, int line, float* sums, Ahead& ahead) const {
    const int stride = part.stride(), both = std::min(2, part.lines - line);
    const int64_t word = part.word, words = part.words;
    // Words of codes and of x multiplied at a time: one group, or a part of it.
    const int step = int(std::min<int64_t>(TILE / X_WORDS, std::min(group_words, words)));
    tiles.configure(count, step * X_WORDS);
    // Of two groups. The last rows are not used: at a distance of 4,096 bytes, loads would wait for the other's stores.
    alignas(64) int32_t products[2][2 * AMX_ROWS + 9][LANES];
    alignas(64) uint32_t unpacked[TILE][2 * LANES];
    const int64_t groups = (words + group_words - 1) / group_words;
    Ahead::Pace pace = ahead.pace(groups * ((std::min(group_words, words) + step - 1) / step));
    // Adds a group's products to the sums after the tiles have begun with the next group.
    auto add = [&](int64_t g) {
      for (int l = 0; l < both; l++)
        add_group(part, products[g % 2][l * AMX_ROWS], row, count, g, line + l, sums + l * LANES);
    };
    int64_t g = word / group_words;
    for (int64_t begin = 0; begin < words; begin += group_words, g++) {
      const int64_t end = std::min(begin + group_words, words);
      tiles.for_sums(both, [](auto tile, int, int) { zero_tile<tile.value>(); });
      for (int64_t i = begin; i < end; i += step) {
        ahead.fetch(pace);
        const int some = int(std::min<int64_t>(step, end - i));
        const uint32_t* from = part.weights + i * stride + line * LANES;
        int64_t distance = stride;
        if constexpr (BITS == 4) {
          for (int j = 0; j < some; j++)
            for (int l = 0; l < both; l++) {
              const u32x16 codes = load_words(from + j * stride + l * LANES);
              store(&unpacked[2 * j][l * LANES], codes & 0x0f0f0f0fu);
              store(&unpacked[2 * j + 1][l * LANES], codes >> 4 & 0x0f0f0f0fu);
            }
          from = unpacked[0], distance = 2 * LANES;
        }
        const char* inputs = (const char*)x.codes.data() + row * x.stride + (word + i) * INPUTS;
        tiles.multiply<false>(inputs, x.stride, from, distance, some * X_WORDS, both);
      }
      tiles.for_sums(both, [&](auto tile, int r, int l) {
        store_tile<tile.value>(products[g % 2][l * AMX_ROWS + r], sizeof(products[0][0]));
      });
      if (begin) add(g - 1);
    }
    add(g - 1);
  }

  // Adds a group's products, [count, LANES], to a line of the sums of `count` rows. The pointers are local variables,
  // since the compiler would reload those in structures after each store.
  void add_group(const Part& part, const int32_t* products, int64_t row, int count, int64_t g, int line,
                 float* to) const {
    const int64_t at = (g - part.word / group_words) * part.stride() + line * LANES;
    const int32_t* x_sums = x.sums.data() + x.at(g, row);
    const float *x_scales = x.scales.data() + x.at(g, row), *x_totals = x.totals.data() + x.at(g, row);
    const f32x16 scales = load(part.scales + at);
    auto before = [&](int r) { return g == 0 ? f32x16{} : load(to + r * PANEL); };
    if (part.offsets) {
      const f32x16 offsets = load(part.offsets + at);
      for (int r = 0; r < count; r++, products += LANES) {
        const f32x16 sum = to_float(as<i32x16>(load_words((const uint32_t*)products)));
        store(to + r * PANEL, fma(offsets, splat(x_totals[r]), fma(sum, scales * x_scales[r], before(r))));
      }
    } else {
      const int32_t rest = -centre();
      for (int r = 0; r < count; r++, products += LANES) {
        const i32x16 sum = as<i32x16>(load_words((const uint32_t*)products)) + splat(rest * x_sums[r]);
        store(to + r * PANEL, fma(to_float(sum), scales * x_scales[r], before(r)));
      }
    }
  }
#endif

#ifdef QUIRE_BLOCKS
  // Adds the products of a group's words for R rows. first: index of the group's first word.
  template <int R>
  QUIRE_INLINE void add_blocks(const uint32_t* w, int stride, int64_t words, int64_t first, const int8_t* codes,
                               i32x16 (&sum)[R][1], Ahead& ahead, Ahead::Pace& pace) const {
    Blocks<R, i32x16> blocks(sum);
    const char* from = (const char*)codes + first * INPUTS;
    if constexpr (BITS == 8) {
      blocks.add_lines(w, stride, words, from, x.stride, [&] { ahead.fetch(pace); });
    } else {
      for (int64_t i = 0; i < words; i++) {
        const u32x16 line = load_words(w + i * stride);
        ahead.fetch(pace);
        blocks.add(line & 0x0f0f0f0fu, line >> 4 & 0x0f0f0f0fu, from + i * INPUTS, x.stride);
      }
    }
    blocks.write(sum);
  }
#endif

  // Prefetches the memory that `finish` writes results to, while rows visit the last part. Without this, a product with
  // 512 rows would spend a fifth of its time waiting for that memory.
  void expect_results(const Part& part, int64_t row, int rows) const {
    if (part.word + part.words < row_words) return;
    const int64_t panels = (out + PANEL - 1) / PANEL, output = part.panel % panels * PANEL, size = dtype == 0 ? 4 : 2;
    const int64_t bytes = std::min<int64_t>(PANEL, out - output) * size;
    const char* to = (const char*)result + (row * out + output) * size;
    for (int r = 0; r < rows; r++, to += out * size)
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(to + i, 1, 2);
  }

  void finish(int64_t panel, int64_t first, int rows, const float* sums) const {
    write_sums(dtype, sums, panel, first, rows, bias, result, out);
  }
};

// Looks up the values of the codes in the lowest four bits of each lane.
struct Table {
  f32x16 values;

  QUIRE_INLINE f32x16 operator[](u32x16 codes) const {
#if defined(__AVX512F__)
    return as<f32x16>(_mm512_permutexvar_ps(as<__m512i>(codes), as<__m512>(values)));
#elif defined(__AVX2__)
    return each<f32x16>([&](auto i) {
      const __m256i code = (__m256i)codes.parts[i];
      const __m256 is_upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));  // blendv tests the sign: bit 3
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(values.parts[0], code),
                              _mm256_permutevar8x32_ps(values.parts[1], code), is_upper);
    });
#elif defined(__ARM_NEON)
    const uint8x16x4_t table = {{as<uint8x16_t>(values.parts[0]), as<uint8x16_t>(values.parts[1]),
                                 as<uint8x16_t>(values.parts[2]), as<uint8x16_t>(values.parts[3])}};
    const u32x16 bytes = (codes & 15) * 0x04040404u + 0x03020100u;  // indices of each value's bytes
    return each<f32x16>([&](auto i) {
      return as<f32x16::Part>(vqtbl4q_u8(table, as<uint8x16_t>(bytes.parts[i])));
    });
#else
    float looked_up[LANES];
    for (int i = 0; i < LANES; i++) looked_up[i] = values[codes[i] & 15];
    return load(looked_up);
#endif
  }
};

// result[m, n] = sum over groups g of  scale[n, g] * sum table[code] * x
struct Tabled {
  static constexpr int INPUTS = 8;  // per word of codes

  const uint32_t* weights;
  Scales scales;
  Widened x;  // [rows, inputs in whole words], padded with zeros, since codes of padding are arbitrary
  Table table;
  int dtype;         // of bias and result
  const void* bias;  // [out] or null
  void* result;      // [rows, out]
  int64_t out, row_words, group_words;

  int64_t step() const { return group_words; }
  bool unpacks(int, bool) const { return scales.unpacks(); }

#ifdef QUIRE_TILES
  bool in_tiles(int64_t) const { return false; }
  void visit_tiles(Tiles&, const Part&, int64_t, int, int, float*, Ahead&) const {}
#endif

  void expect(int64_t panel, int lines) const { scales.expect(panel, lines); }

  Part part(int64_t panel, int64_t word, int64_t words, int lines, int, bool, Unpacked& unpacked,
            Ahead& ahead) const {
    const int64_t first = word / group_words, groups = (words + group_words - 1) / group_words;
    return {panel, lines, word, words, weights + panel * PANEL * row_words + word * lines * LANES,
            scales.of(panel, first, groups, lines, unpacked.scales, ahead)};
  }

  template <int R, int C>
  void visit(const Part& part, int64_t row, int line, float* sums, Ahead& ahead) const {
    const int stride = part.stride();
    const int64_t x_stride = x.stride, words = part.words;
    Ahead::Pace pace = ahead.pace(words);
    const uint32_t* w = part.weights + line * LANES;
    const float* inputs = x.rows + row * x_stride + part.word * INPUTS;
    for (int64_t begin = 0, at = line * LANES; begin < words; begin += group_words, at += stride) {
      const int64_t end = std::min(begin + group_words, words);
      f32x16 sum[R][C] = {};
      for (int64_t i = begin; i < end; i++) {
        u32x16 codes[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) codes[c] = load_words(w + i * stride + c * LANES);
        ahead.fetch(pace);
        for (int j = 0; j < INPUTS; j++)
#pragma GCC unroll 4
          for (int c = 0; c < C; c++) {
            const f32x16 values = table[codes[c]];
            codes[c] >>= 4;
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) sum[r][c] = fma(values, splat(inputs[r * x_stride + i * INPUTS + j]), sum[r][c]);
          }
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          float* to = sums + r * PANEL + c * LANES;
          const f32x16 before = part.is_first() && begin == 0 ? f32x16{} : load(to);
          store(to, fma(sum[r][c], load(part.scales + at + c * LANES), before));
        }
    }
  }

  void finish(int64_t panel, int64_t first, int rows, const float* sums) const {
    write_sums(dtype, sums, panel, first, rows, bias, result, out);
  }
};

void multiply_tabled(const void* x, int64_t x_stride, const Shape& shape, Tabled format, int64_t in, int threads) {
  const int64_t width = format.row_words * Tabled::INPUTS;
  with_type(format.dtype, [&](auto type) {
    format.x = widened_rows((const decltype(type)*)x, x_stride, shape.rows, in, width, threads);
  });
  multiply(format, shape, threads);
}

}  // namespace

// x: [rows, in] -> result: [rows, out]. codes (of `bits` bits), scales, offsets, factors: from quire_panels; the last
// three have types from scales.h. kinds: 1, or 2 if offsets have their own factors. table: 16 values or null. group:
// inputs per scale, in whole words. bounds: see Shape, or null.
extern "C" void quire_quantized_linear(int dtype, int bits, const void* x, int64_t x_stride, int64_t rows, const void* codes,
                            const void* scales, int scale_type, const void* offsets, int offset_type,
                            const void* factors, int factor_type, int64_t factor_columns, int64_t kinds,
                            const float* table, int64_t out, int64_t in, int64_t group, const void* bias,
                            const int64_t* bounds, int64_t experts, void* result, int threads) {
  const int64_t groups = (in + group - 1) / group;
  const Numbers factor{(const uint32_t*)factors, factor_type, factor_columns};
  const Scales scale{{(const uint32_t*)scales, scale_type, groups}, factor, kinds, 0};
  if (table) {
    const int64_t words = (in + 7) / 8, group_words = std::min((group + 7) / 8, words);
    multiply_tabled(x, x_stride, {rows, out, words, bounds, experts},
                    {(const uint32_t*)codes, scale, {}, {load(table)}, dtype, bias, result, out, words,
                     group_words},
                    in, threads);
    return;
  }
  const Scales offset{{(const uint32_t*)offsets, offset_type, groups}, factor, kinds, kinds - 1};
  thread_local Activations activations;  // kept between calls
  auto run = [&](auto wide) {
    constexpr int BITS = wide.value, INPUTS = 32 / BITS;
    with_type(dtype, [&](auto type) {
      activations.quantize((const decltype(type)*)x, x_stride, rows, in, group, bits, BITS, offsets, threads);
    });
    const int64_t words = (in + INPUTS - 1) / INPUTS, group_words = std::min((group + INPUTS - 1) / INPUTS, words);
    const Quantized<BITS> format{{}, (const uint32_t*)codes, bits, scale, offset, activations, dtype, bias, result,
                                 out, words, group_words};
    multiply(format, {rows, out, format.stored(words), bounds, experts}, threads);
  };
  bits <= 4 ? run(Constant<4>{}) : run(Constant<8>{});
}

RECORDABLE(quire_quantized_linear)
