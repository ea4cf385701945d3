// Scales and offsets of groups of inputs, in panels (panels.h) and in the types that a checkpoint has: bytes that are
// multiplied with a factor of several groups, as in GGUF's super-blocks, or floats. Visits read them as float32.
//
//                    output 0               output 1          ...
//     groups 0 ... 3 | s[0] s[1] s[2] s[3] | s[0] s[1] s[2] s[3] | ...   a row of the panel, if they are bytes
#pragma once

#include "panels.h"

namespace quire {

// Types of numbers, as quantized_linear.py counts them.
enum Type { FLOAT32, FLOAT16, BFLOAT16, UNSIGNED, SIGNED };

constexpr int bits_of(int type) { return type == FLOAT32 ? 32 : type <= BFLOAT16 ? 16 : 8; }

// The number whose bits begin at bit `shift` of each word. float16 has no infinities here, which no scales are.
template <int TYPE>
QUIRE_INLINE f32x16 number(u32x16 words, uint32_t shift) {
  if constexpr (TYPE == FLOAT32) return as<f32x16>(words);
  const u32x16 bits = words >> shift;
  if constexpr (TYPE == FLOAT16)  // the exponent of float32 is that of float16 and 112
    return as<f32x16>((bits & 0x7fffu) << 13 | (bits & 0x8000u) << 16) * splat(0x1p112f);
  if constexpr (TYPE == BFLOAT16) return as<f32x16>(bits << 16);
  if constexpr (TYPE == UNSIGNED) return to_float(as<i32x16>(bits & 0xffu));
  return to_float(as<i32x16>(bits << 24) >> 24);
}

// f(Constant<type>).
template <class F>
void with_number_type(int type, F f) {
  if (type == FLOAT32) f(Constant<FLOAT32>{});
  if (type == FLOAT16) f(Constant<FLOAT16>{});
  if (type == BFLOAT16) f(Constant<BFLOAT16>{});
  if (type == UNSIGNED) f(Constant<UNSIGNED>{});
  if (type == SIGNED) f(Constant<SIGNED>{});
}

// Panels of numbers: `columns` for each output, in whole words.
struct Numbers {
  const uint32_t* words;  // null if there are none
  int type;
  int64_t columns;

  int64_t in_word() const { return 32 / bits_of(type); }
  int64_t row_words() const { return (columns + in_word() - 1) / in_word(); }

  void expect(int64_t panel, int lines) const {
    if (words) fetch_panel(words, panel, row_words(), lines);
  }

  u32x16 line(int64_t panel, int64_t column, int lines, int line) const {
    return load_words(words + panel * PANEL * row_words() + (column / in_word() * lines + line) * LANES);
  }

  f32x16 at(int64_t panel, int64_t column, int lines, int line_of_column) const {
    f32x16 numbers;
    with_number_type(type, [&](auto t) {
      numbers = number<t.value>(line(panel, column, lines, line_of_column), column % in_word() * bits_of(t.value));
    });
    return numbers;
  }
};

// Numbers of groups, times those of as many neighbouring groups as have one factor.
struct Scales {
  Numbers numbers, factors;   // factors of several kinds, if their columns are several times as many
  int64_t kinds = 1, kind = 0;  // the columns of the factors are those of the kinds in turn, and these have this one

  void expect(int64_t panel, int lines) const { numbers.expect(panel, lines), factors.expect(panel, lines); }

  // Those of `count` groups: [count, lines]. They are where they lie, if that is possible, or in `kept`.
  const float* of(int64_t panel, int64_t first, int64_t count, int lines, std::vector<float>& kept) const {
    if (!numbers.words) return nullptr;
    if (numbers.type == FLOAT32 && !factors.words)
      return (const float*)numbers.words + panel * PANEL * numbers.columns + first * lines * LANES;
    float* const widened = room(kept, count * lines * LANES);
    const int64_t stop = first + count, in_word = numbers.in_word();
    const int64_t run = factors.words ? numbers.columns * kinds / factors.columns : numbers.columns;  // with one factor
    with_number_type(numbers.type, [&](auto type) {
      for (int64_t g = first, end; g < stop; g = end) {
        end = std::min({(g / in_word + 1) * in_word, (g / run + 1) * run, stop});
        for (int line = 0; line < lines; line++) {
          const u32x16 word = numbers.line(panel, g, lines, line);
          const f32x16 factor = factors.words ? factors.at(panel, g / run * kinds + kind, lines, line) : splat(1.0f);
          for (int64_t i = g; i < end; i++)
            store(widened + ((i - first) * lines + line) * LANES,
                  number<type.value>(word, i % in_word * bits_of(type.value)) * factor);
        }
      }
    });
    return widened;
  }
};

}  // namespace quire
