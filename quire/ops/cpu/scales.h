// Scales and offsets of groups of inputs, in panels (panels.h) and in the checkpoint's types: floats, or bytes with a
// factor shared by several groups, as in GGUF's super-blocks. Visits read them as float32.
//
//                    output 0               output 1          ...
//     groups 0 ... 3 | s[0] s[1] s[2] s[3] | s[0] s[1] s[2] s[3] | ...   a row of the panel, if they are bytes
#pragma once

#include "panels.h"

namespace quire {

// Types of numbers, numbered as in quantized_linear.py. The first three are types of tensors, too.
enum Type { FLOAT32, BFLOAT16, FLOAT16, UNSIGNED, SIGNED };

constexpr int bits_of(int type) { return type == FLOAT32 ? 32 : type <= FLOAT16 ? 16 : 8; }

// Returns the number whose bits start at bit `shift` of each word. Infinities of float16 are not supported, since
// scales are finite.
template <int TYPE>
QUIRE_INLINE f32x16 number(u32x16 words, uint32_t shift) {
  if constexpr (TYPE == FLOAT32) return as<f32x16>(words);
  const u32x16 first = words << uint32_t(32 - bits_of(TYPE) - shift);  // moves the number to the highest bits
  if constexpr (TYPE == FLOAT16)  // the exponent of float32 is that of float16 plus 112
    return as<f32x16>(as<u32x16>(as<i32x16>(first) >> 3) & 0x8fffe000u) * splat(0x1p112f);
  if constexpr (TYPE == BFLOAT16) return as<f32x16>(first & 0xffff0000u);
  if constexpr (TYPE == UNSIGNED) return to_float(as<i32x16>(first >> 24));
  return to_float(as<i32x16>(first) >> 24);
}

// Panels of numbers: `columns` per output, padded to whole words.
struct Numbers {
  const uint32_t* words;  // null if there are none
  int type;
  int64_t columns;

  int64_t row_words() const { return (columns * bits_of(type) + 31) / 32; }
  const uint32_t* panel(int64_t number) const { return words + number * PANEL * row_words(); }

  void expect(int64_t panel, int lines) const {
    if (words) fetch_panel(words, panel, row_words(), lines);
  }
};

// Widens columns [first, stop) of a panel's numbers, times a factor per output: [stop - first, lines]. Parameters are
// plain values, since the compiler would reload fields of structures after each store.
template <int TYPE>
inline void widen_columns(const uint32_t* words, int64_t first, int64_t stop, int lines, const float* factors,
                          float* to, Ahead& ahead, Ahead::Pace& pace) {
  constexpr int IN_WORD = 32 / bits_of(TYPE);
  const int stride = lines * LANES;
  for (int64_t column = first; column < stop;) {
    const uint32_t* row = words + column / IN_WORD * stride;
    const uint32_t at = column % IN_WORD;
    if (at == 0 && column + IN_WORD <= stop) {  // shifts are constants
      for (int line = 0; line < stride; line += LANES) {
        const u32x16 word = load_words(row + line);
        const f32x16 factor = load(factors + line);
        ahead.fetch(pace);
#pragma GCC unroll 4
        for (int i = 0; i < IN_WORD; i++)
          store(to + i * stride + line, number<TYPE>(word, i * bits_of(TYPE)) * factor);
      }
      column += IN_WORD, to += IN_WORD * stride;
    } else {
      for (int line = 0; line < stride; line += LANES)
        store(to + line, number<TYPE>(load_words(row + line), at * bits_of(TYPE)) * load(factors + line));
      column++, to += stride;
    }
  }
}

inline void widen_columns(const Numbers& numbers, int64_t panel, int64_t first, int64_t stop, int lines,
                          const float* factors, float* to, Ahead& ahead, Ahead::Pace& pace) {
  const uint32_t* words = numbers.panel(panel);
  switch (numbers.type) {
    case FLOAT32: return widen_columns<FLOAT32>(words, first, stop, lines, factors, to, ahead, pace);
    case FLOAT16: return widen_columns<FLOAT16>(words, first, stop, lines, factors, to, ahead, pace);
    case BFLOAT16: return widen_columns<BFLOAT16>(words, first, stop, lines, factors, to, ahead, pace);
    case UNSIGNED: return widen_columns<UNSIGNED>(words, first, stop, lines, factors, to, ahead, pace);
    case SIGNED: return widen_columns<SIGNED>(words, first, stop, lines, factors, to, ahead, pace);
  }
}

// Numbers of groups, times factors that each cover a run of neighbouring groups.
struct Scales {
  Numbers numbers, factors;
  int64_t kinds = 1, kind = 0;  // factor columns alternate between `kinds` kinds; these numbers use `kind`

  void expect(int64_t panel, int lines) const { numbers.expect(panel, lines), factors.expect(panel, lines); }

  bool unpacks() const { return numbers.words && (numbers.type != FLOAT32 || factors.words); }

  // Returns the scales of `count` groups: [count, lines]. They stay in place if possible, or are widened into `kept`.
  const float* of(int64_t panel, int64_t first, int64_t count, int lines, std::vector<float>& kept,
                  Ahead ahead) const {
    if (!numbers.words) return nullptr;
    if (!unpacks()) return (const float*)numbers.panel(panel) + first * lines * LANES;
    float* const widened = room(kept, count * lines * LANES);
    const int64_t stop = first + count;
    const int64_t run = factors.words ? numbers.columns * kinds / factors.columns : numbers.columns;  // per factor
    alignas(64) float ones[PANEL], factor[PANEL];
    std::fill(ones, ones + PANEL, 1.0f), std::fill(factor, factor + PANEL, 1.0f);
    Ahead nothing{nullptr, 0};
    Ahead::Pace pace = ahead.pace(count * bits_of(numbers.type) / 32 * lines + 1), none = nothing.pace(1);
    for (int64_t g = first, r = first / run, end; g < stop; g = end, r++) {
      end = std::min((r + 1) * run, stop);
      const int64_t column = r * kinds + kind;
      if (factors.words) widen_columns(factors, panel, column, column + 1, lines, ones, factor, nothing, none);
      widen_columns(numbers, panel, g, end, lines, factor, widened + (g - first) * lines * LANES, ahead, pace);
    }
    return widened;
  }
};

// Reads a column of C lines.
template <int C>
QUIRE_INLINE void read_column(int type, const uint32_t* words, int64_t column, int stride, f32x16 (&to)[C]) {
  auto read = [&](auto constant) {
    constexpr int TYPE = constant.value, IN_WORD = 32 / bits_of(TYPE);
    const uint32_t* row = words + column / IN_WORD * stride;
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
      to[c] = number<TYPE>(load_words(row + c * LANES), uint32_t(column % IN_WORD) * bits_of(TYPE));
  };
  switch (type) {
    case FLOAT32: return read(Constant<FLOAT32>{});
    case FLOAT16: return read(Constant<FLOAT16>{});
    case BFLOAT16: return read(Constant<BFLOAT16>{});
    case UNSIGNED: return read(Constant<UNSIGNED>{});
    case SIGNED: return read(Constant<SIGNED>{});
  }
}

// Reads the scales of C lines from `line`, group by group. For a single row, which needs each scale only once.
template <int C>
class ScaleReader {
 public:
  ScaleReader(const Scales& scales, int64_t panel, int lines, int line)
      : scales_(scales), stride_(lines * LANES) {
    if (!scales.numbers.words) return;
    words_ = scales.numbers.panel(panel) + line * LANES;
    if (!scales.factors.words) return;
    factors_ = scales.factors.panel(panel) + line * LANES;
    run_ = scales.numbers.columns * scales.kinds / scales.factors.columns;
  }

  QUIRE_INLINE void read(int64_t group, f32x16 (&to)[C]) {
    read_column(scales_.numbers.type, words_, group, stride_, to);
    if (!factors_) return;
    if (group >= stop_) {
      const int64_t factor = group / run_;
      read_column(scales_.factors.type, factors_, factor * scales_.kinds + scales_.kind, stride_, factor_);
      stop_ = (factor + 1) * run_;
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) to[c] = to[c] * factor_[c];
  }

 private:
  const Scales scales_;
  const int stride_;
  const uint32_t *words_ = nullptr, *factors_ = nullptr;
  int64_t run_ = 1, stop_ = 0;
  f32x16 factor_[C];
};

}  // namespace quire
