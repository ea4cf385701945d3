// Visits of panels with quantized weights (quantized_linear.cpp) on processors that multiply bytes in pairs, or in fours
// but in registers of AVX2 (byte_pairs.h). They have half as many registers as those with AVX-512, of half the size:
//
// - Several rows meet codes that were unpacked once for all of them.
// - One row reads a run of words in the order of memory, but keeps the sums of one line at a time in registers.
#pragma once

#include "byte_products.h"
#include "narrow_codes.h"
#include "scales.h"

namespace quire {

#ifdef QUIRE_PAIRS

// Format: a Quantized, which derives from this. BITS: of its codes.
template <class Format, int BITS>
struct PairVisits {
  static constexpr int INPUTS = 32 / BITS, X_WORDS = INPUTS / 4;  // of a word of codes
  static constexpr bool IS_WIDE = BITS == 8 && !SUMS_ARE_WIDE;    // codes, if they are not narrow, become halves of words
  static constexpr int PAIR_LINES = BITS == 4 ? 2 : 1;            // lines of bytes that a line of codes becomes

  struct Blocking {
    static constexpr int COLUMNS = 4;
    static constexpr bool FETCHES = true;
    // Unpacked, a part for many rows has twice as many bytes. It stays in the first-level cache or near to it.
    static int64_t chunk(int pieces) { return pieces > 1 ? 1 << 14 : 1 << 15; }
  };

  const Format& format() const { return static_cast<const Format&>(*this); }

  // What pairs are made of: bytes of one code each, or halves of words if codes have 8 bits.
  const uint32_t* in_pairs(const uint32_t* from, int64_t words, int lines, std::vector<uint32_t>& kept,
                           Ahead ahead) const {
    const int stride = lines * LANES;
    uint32_t* const all = room(kept, words * 2 * stride);
    Ahead::Pace pace = ahead.pace(words);
    uint32_t* to = all;
    for (int64_t i = 0; i < words; i++, from += stride, to += 2 * stride) {
      ahead.fetch(pace);
      for (int line = 0; line < stride; line += LANES) split<IS_WIDE>(load_words(from + line), to + line, stride);
    }
    return all;
  }

  // Codes as they are multiplied. IN_HALVES: of 8 bits.
  template <bool IN_HALVES>
  static QUIRE_INLINE void split(u32x16 codes, uint32_t* to, int stride) {
    if constexpr (IN_HALVES) store(to, even_bytes(codes)), store(to + stride, odd_bytes(codes));
    else if constexpr (BITS == 4) store(to, codes & 0x0f0f0f0fu), store(to + stride, codes >> 4 & 0x0f0f0f0fu);
    else store(to, codes);
  }

  template <int R, int C>
  void visit(const Part& part, int64_t row, int line, float* sums, Ahead& ahead) const {
    if constexpr (R == 1)
      if (!part.is_wide) {
        if (!format().is_narrow()) return visit_row<BITS, C>(part, row, line, sums, ahead);
        return with_bits(format().bits, [&](auto constant) {
          constexpr int N = constant.value;
          if constexpr (wide_bits(N) == BITS) visit_row<N, C>(part, row, line, sums, ahead);
        });
      }
    const int64_t group_words = format().group_words;
    Ahead::Pace pace = ahead.pace((part.words + group_words - 1) / group_words * C);
    for (int c = 0; c < C; c++) {
      if (IS_WIDE && !format().is_narrow()) {
        if constexpr (R > 1) visit_wide<R>(part, row, line + c, sums + c * LANES, ahead, pace);
      } else {
        visit_pairs<R>(part, row, line + c, sums + c * LANES, ahead, pace);
      }
    }
  }

  // Several rows with a line of bytes.
  template <int R>
  __attribute__((noinline)) void visit_pairs(const Part& part, int64_t row, int line, float* sums, Ahead& ahead,
                                             Ahead::Pace& pace) const {
    constexpr int IN_WORD = INPUTS / 4;  // words of bytes in a word
    const Activations& x = format().x;
    const int64_t group_words = format().group_words;
    const Runs run(format().bits, format().has_offsets());
    const int stride = part.stride();
    const int64_t words = part.words * IN_WORD, in_group = group_words * IN_WORD, x_runs = x.groups * x.runs;
    const int64_t x_stride = x.stride;
    const uint32_t* w = part.weights + line * LANES;
    const int8_t* codes = x.codes.data() + row * x_stride + part.word * INPUTS;
    int64_t g = part.word / group_words, at = line * LANES;
    for (int64_t begin = 0; begin < words; begin += in_group, g++, at += stride) {
      const int64_t end = std::min(begin + in_group, words);
      const uint32_t* beginning = x.beginnings.data() + row * x_runs + g * x.runs;
      i32x16 sum[R][1];
      ahead.fetch(pace);
      for (int64_t first = begin; first < end; first += run.words, beginning++) {
        const int64_t stop = std::min(first + run.words, end);
        u32x16 pairs[R];
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) pairs[r] = splat(beginning[r * x_runs]);
#pragma GCC unroll 2
        for (int64_t i = first; i < stop; i++, w += stride, codes += 4) {
          const u32x16 line = load_words(w);
#pragma GCC unroll 6
          for (int r = 0; r < R; r++) pairs[r] = add_pairs(pairs[r], line, splat_word(codes + r * x_stride));
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) sum[r][0] = first == begin ? total(pairs[r]) : sum[r][0] + total(pairs[r]);
      }
      if (run.rest)
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) sum[r][0] += splat(run.rest * x.sums[(row + r) * x.groups + g]);
      format().end_group(part, row, g, at, sum, sums);
    }
  }

  // Several rows with a line of codes of 8 bits.
  template <int R>
  __attribute__((noinline)) void visit_wide(const Part& part, int64_t row, int line, float* sums, Ahead& ahead,
                                            Ahead::Pace& pace) const {
    const Activations& x = format().x;
    const int64_t group_words = format().group_words;
    const int stride = part.stride();
    const int64_t words = part.words, x_stride = x.stride;
    const uint32_t* w = part.weights + line * LANES;
    const int16_t* codes = x.wide.data() + row * x_stride + part.word * 4;
    int64_t g = part.word / group_words, at = line * LANES;
    for (int64_t begin = 0; begin < words; begin += group_words, g++, at += stride) {
      const int64_t end = std::min(begin + group_words, words);
      i32x16 sum[R][1];
      ahead.fetch(pace);
      format().begin_group(row, g, sum);
#pragma GCC unroll 2
      for (int64_t i = begin; i < end; i++, w += 2 * stride, codes += 4) {
        const u32x16 even = load_words(w), odd = load_words(w + stride);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
          sum[r][0] = add_wide(sum[r][0], even, splat_word(codes + r * x_stride));
          sum[r][0] = add_wide(sum[r][0], odd, splat_word(codes + r * x_stride + 2));
        }
      }
      format().end_group(part, row, g, at, sum, sums);
    }
  }

  // One row, whose codes, of N bits, are widened in registers: it needs each of them once.
  template <int N, int C>
  __attribute__((noinline)) void visit_row(const Part& part, int64_t row, int line, float* sums, Ahead& ahead) const {
    constexpr bool IS_NARROW = N < BITS, HAS_HALVES = IS_NARROW && N % 2;  // units of 32 codes, or of 16
    constexpr int WIDE = IS_NARROW ? wide_words(N) : 1, TAKEN = HAS_HALVES ? WIDE / 2 : WIDE;
    constexpr int STORED = IS_NARROW ? stored_words(N) : 1;
    constexpr bool HALVES = N == 8 && IS_WIDE;
    const Activations& x = format().x;
    const int64_t group_words = format().group_words;
    const Runs run(format().bits, format().has_offsets());
    const int stride = part.stride();
    const int64_t run_words = HALVES ? 8 : run.words / X_WORDS;
    Ahead::Pace pace = ahead.pace((part.words + run_words - 1) / run_words * C);
    const uint32_t* w = part.weights + line * LANES;
    int64_t g = part.word / group_words, at = line * LANES;
    for (int64_t begin = 0; begin < part.words; begin += group_words, g++, at += stride) {
      const int64_t end = std::min(begin + group_words, part.words);
      const uint32_t* beginning = x.beginnings.data() + (row * x.groups + g) * x.runs;
      i32x16 sum[1][C];
      format().begin_group(row, g, sum);
      for (int64_t first = begin; first < end; first += run_words, beginning++) {
        const int64_t stop = std::min(first + run_words, end);
        const bool is_second = HAS_HALVES && (part.word + first) / TAKEN % 2;
        const uint32_t* next = w;
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          ahead.fetch(pace);
          next = w + c * LANES;
          if constexpr (HALVES) {
            const int16_t* codes = x.wide.data() + row * x.stride + (part.word + first) * 4;
            for (int64_t i = first; i < stop; i++, next += stride, codes += 4) {
              const u32x16 bytes = load_words(next);
              sum[0][c] = add_wide(sum[0][c], even_bytes(bytes), splat_word(codes));
              sum[0][c] = add_wide(sum[0][c], odd_bytes(bytes), splat_word(codes + 2));
            }
          } else {
            const int8_t* codes = x.codes.data() + row * x.stride + (part.word + first) * INPUTS;
            u32x16 pairs = splat(*beginning);
            bool is_later = is_second;
            for (int64_t i = first; i < stop; i += TAKEN, codes += TAKEN * INPUTS) {
              u32x16 wide[WIDE];
              auto load_word = [&](int word) { return load_words(next + word * stride); };
              if constexpr (IS_NARROW) widen_codes<N>(load_word, wide);
              else wide[0] = load_word(0);
              auto add = [&](auto from) __attribute__((always_inline)) {
#pragma GCC unroll 8
                for (int word = 0; word < TAKEN; word++) {
                  const u32x16 bytes = wide[from.value + word];
                  const int8_t* of_x = codes + word * INPUTS;
                  if constexpr (BITS == 4) {
                    pairs = add_pairs(pairs, bytes & 0x0f0f0f0fu, splat_word(of_x));
                    pairs = add_pairs(pairs, bytes >> 4 & 0x0f0f0f0fu, splat_word(of_x + 4));
                  } else {
                    pairs = add_pairs(pairs, bytes, splat_word(of_x));
                  }
                }
              };
              if (is_later) add(Constant<WIDE - TAKEN>{});
              else add(Constant<0>{});
              if (is_later || !HAS_HALVES) next += STORED * stride;
              if (HAS_HALVES) is_later = !is_later;
            }
            sum[0][c] = first == begin ? total(pairs) : sum[0][c] + total(pairs);
          }
        }
        w = next - (C - 1) * LANES;
      }
      if (!HALVES && run.rest)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sum[0][c] += splat(run.rest * x.sums[row * x.groups + g]);
      format().end_group(part, row, g, at, sum, sums);
    }
  }
};

#else

template <class Format, int BITS>
struct PairVisits {
  static constexpr int PAIR_LINES = 1;
};

#endif

}  // namespace quire
