// Visits of panels with quantized weights (quantized_linear.cpp) on processors that multiply bytes in pairs, or in
// fours with AVX2 registers (byte_pairs.h). These have half as many registers as processors with AVX-512, of half the
// size, so:
//
// - For several rows, codes are unpacked once.
// - A single row reads a run of words in memory order, but keeps only one line's sums in registers at a time.
#pragma once

#include "byte_products.h"
#include "narrow_codes.h"
#include "scales.h"

namespace quire {

#ifdef QUIRE_PAIRS

// Format: a Quantized, which derives from this class. BITS: the width of its codes.
template <class Format, int BITS>
struct PairVisits {
  static constexpr int INPUTS = 32 / BITS, X_WORDS = INPUTS / 4;  // per word of codes
  static constexpr bool IS_WIDE = BITS == 8 && !SUMS_ARE_WIDE;    // codes stored in 8 bits become halves of words
  static constexpr int PAIR_LINES = BITS == 4 ? 2 : 1;            // lines of bytes per line of codes

  struct Blocking {
    static constexpr int COLUMNS = 4;
    static constexpr bool FETCHES = true, BY_LINE = false;
    static constexpr int TOGETHER = 0;
    // For many rows, unpacking doubles the bytes of a part, which should stay in or near the L1 cache.
    static int64_t chunk(int pieces) { return pieces > 1 ? 1 << 14 : 1 << 15; }
  };

  const Format& format() const { return static_cast<const Format&>(*this); }

  // Unpacks codes for multiplication in pairs: to one byte per code, or to 16-bit halves of words for 8-bit codes.
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

  // Stores codes in the form in which they are multiplied. IN_HALVES: 8-bit codes in 16-bit halves of words.
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
    if constexpr (R > 1) format().expect_results(part, row, R);
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

  // Adds the products of `count` words of codes, four bytes each, to the sums of R rows.
  template <int R>
  static QUIRE_INLINE void add_run(u32x16 (&pairs)[R], const uint32_t*& w, int stride, const int8_t*& codes,
                                   int64_t x_stride, int64_t count) {
    auto add = [&] __attribute__((always_inline)) {
      const u32x16 line = load_words(w);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) pairs[r] = kept(add_pairs(pairs[r], line, splat_word(codes + r * x_stride)));
      w += stride, codes += 4;
    };
    for (; count >= 4; count -= 4) add(), add(), add(), add();
    for (; count > 0; count--) add();
  }

  // Visits several rows with a line of bytes.
  template <int R>
  __attribute__((noinline)) void visit_pairs(const Part& part, int64_t row, int line, float* sums, Ahead& ahead,
                                             Ahead::Pace& pace) const {
    constexpr int IN_WORD = INPUTS / 4;  // words of bytes per word of codes
    const Activations& x = format().x;
    const Runs run(format().bits, format().has_offsets());
    const int stride = part.stride();
    const int64_t words = part.words * IN_WORD, in_group = format().group_words * IN_WORD, x_stride = x.stride;
    const int64_t in_run = run.words, x_rows = x.rows;
    const int64_t first_group = part.word / format().group_words;
    const uint32_t* w = part.weights + line * LANES;
    const int8_t* codes = x.codes.data() + row * x_stride + part.word * INPUTS;
    const uint32_t* beginnings = x.beginnings.data() + x.at(first_group * x.runs, row);
    uint32_t earlier[R * LANES] = {};  // sums of all runs of a group but the last
    auto loaded = [&](int r) __attribute__((always_inline)) { return as<i32x16>(load_words(earlier + r * LANES)); };
    GroupEnds<R> ends(format(), part, row, first_group, line, sums);
    for (int64_t left = words; left > 0; left -= in_group) {
      int64_t in_this = std::min(in_group, left);
      const bool has_runs = in_this > in_run;  // the last group of a row may be shorter than the others
      ahead.fetch(pace);
      u32x16 pairs[R];
      i32x16 sum[R];
      for (bool is_first = true;; is_first = false) {
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) pairs[r] = splat(beginnings[r]);
        beginnings += x_rows;
        add_run(pairs, w, stride, codes, x_stride, std::min(in_run, in_this));
        if ((in_this -= in_run) <= 0) break;
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) store(earlier + r * LANES, as<u32x16>(is_first ? total(pairs[r]) : loaded(r) + total(pairs[r])));
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) sum[r] = total(pairs[r]);
      if (has_runs)
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) sum[r] += loaded(r);
      ends.add(sum, run.rest);
    }
  }

  // Visits several rows with a line of 8-bit codes, widened to 16 bits.
  template <int R>
  __attribute__((noinline)) void visit_wide(const Part& part, int64_t row, int line, float* sums, Ahead& ahead,
                                            Ahead::Pace& pace) const {
    const Activations& x = format().x;
    const int64_t group_words = format().group_words, x_stride = x.stride;
    const int stride = part.stride();
    const uint32_t* w = part.weights + line * LANES;
    const int16_t* codes = x.wide.data() + row * x_stride + part.word * 4;
    const int32_t centre = format().has_offsets() ? 0 : format().centre();
    GroupEnds<R> ends(format(), part, row, part.word / group_words, line, sums);
    for (int64_t left = part.words; left > 0; left -= group_words) {
      i32x16 sum[R] = {};
      ahead.fetch(pace);
#pragma GCC unroll 2
      for (int64_t i = std::min(group_words, left); i > 0; i--, w += 2 * stride, codes += 4) {
        const u32x16 even = load_words(w), odd = load_words(w + stride);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
          sum[r] = add_wide(sum[r], even, splat_word(codes + r * x_stride));
          sum[r] = add_wide(sum[r], odd, splat_word(codes + r * x_stride + 2));
        }
      }
      ends.add(sum, -centre);
    }
  }

  // Adds the sums of R rows and a line to `sums`, group by group. All pointers are copied into members, since the
  // compiler would reload those in structures after each store.
  template <int R>
  class GroupEnds {
   public:
    GroupEnds(const Format& format, const Part& part, int64_t row, int64_t group, int line, float* sums)
        : x_rows_(format.x.rows), stride_(part.stride()), x_scales_(format.x.scales.data() + format.x.at(group, row)),
          x_totals_(format.x.totals.data() + format.x.at(group, row)),
          x_sums_(format.x.sums.data() + format.x.at(group, row)), scales_(part.scales + line * LANES),
          offsets_(part.offsets ? part.offsets + line * LANES : nullptr), sums_(sums) {
      if (!part.is_first()) return;
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) store(sums + r * PANEL, f32x16{});
    }

    // Adds the next group's sums. rest: the multiple of the sum of x to add to each.
    QUIRE_INLINE void add(i32x16 (&sum)[R], int32_t rest) {
      if (rest)
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) sum[r] += splat(rest * x_sums_[r]);
      const f32x16 scales = load(scales_);
      auto added = [&](int r) __attribute__((always_inline)) {
        return fma(to_float(sum[r]), scales * x_scales_[r], load((const float*)sums_ + r * PANEL));
      };
      if (offsets_) {
        const f32x16 offsets = load(offsets_);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
          store(sums_ + r * PANEL, fma(offsets, splat(x_totals_[r]), added(r)));
        offsets_ += stride_;
      } else {
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) store(sums_ + r * PANEL, added(r));
      }
      x_scales_ += x_rows_, x_totals_ += x_rows_, x_sums_ += x_rows_, scales_ += stride_;
    }

   private:
    const int64_t x_rows_;
    const int stride_;
    const float *x_scales_, *x_totals_;
    const int32_t* x_sums_;
    const float *scales_, *offsets_;
    float* const sums_;
  };

  // Visits a single row. Its N-bit codes are widened in registers, since each is needed only once.
  template <int N, int C>
  __attribute__((noinline)) void visit_row(const Part& part, int64_t row, int line, float* sums, Ahead& ahead) const {
    constexpr bool IS_NARROW = N < BITS, HAS_HALVES = IS_NARROW && N % 2;  // units of 32 codes, instead of 16
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
      const uint32_t* beginning = x.beginnings.data() + x.at(g * x.runs, row);
      i32x16 sum[1][C];
      format().begin_group(row, g, sum);
      for (int64_t first = begin; first < end; first += run_words, beginning += x.rows) {
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
        for (int c = 0; c < C; c++) sum[0][c] += splat(run.rest * x.sums[x.at(g, row)]);
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
