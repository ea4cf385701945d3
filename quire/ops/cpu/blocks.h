// Sums of products with AArch64's matrix instructions BFMMLA and USMMLA. Each multiplies the weights of two outputs
// with two rows of x, for four bfloat16 or eight 8-bit inputs. Two lines of a panel, interleaved, form its operands:
//
//     line of inputs 0, 1 | v0[0 1] | v1[0 1] | ...      interleaved | v0[0 1 2 3] v1[0 1 2 3] | ...
//     line of inputs 2, 3 | v0[2 3] | v1[2 3] | ...      rows of x   | x0[0 1 2 3] x1[0 1 2 3] |
//
// BFMMLA adds pairs of products one after the other and rounds each time, as BFDOT does. So a row computed alone, with
// BFDOT, gives the same bits.
#pragma once

#include "vector.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#define QUIRE_BLOCKS

namespace quire {

QUIRE_INLINE f32x16::Part multiply_block(f32x16::Part sums, uint32x4_t weights, uint8x16_t rows) {
  return vbfmmlaq_f32(sums, as<bfloat16x8_t>(weights), as<bfloat16x8_t>(rows));
}

QUIRE_INLINE i32x16::Part multiply_block(i32x16::Part sums, uint32x4_t weights, uint8x16_t rows) {
  return vusmmlaq_s32(sums, as<uint8x16_t>(weights), as<int8x16_t>(rows));
}

// The sums of R rows and 16 outputs, in vectors of type V. Each block holds two outputs of two rows: [output][row].
template <int R, class V>
class Blocks {
 public:
  explicit QUIRE_INLINE Blocks(const V (&rows)[R][1]) {
#pragma GCC unroll 3
    for (int pair = 0; pair < PAIRS; pair++)
#pragma GCC unroll 4
      for (int part = 0; part < PARTS; part++) {
        const auto first = rows[2 * pair][0].parts[part], second = rows[other(pair)][0].parts[part];
        blocks_[pair][2 * part] = __builtin_shufflevector(first, second, 0, 4, 1, 5);
        blocks_[pair][2 * part + 1] = __builtin_shufflevector(first, second, 2, 6, 3, 7);
      }
  }

  QUIRE_INLINE void write(V (&rows)[R][1]) const {
#pragma GCC unroll 3
    for (int pair = 0; pair < PAIRS; pair++)
#pragma GCC unroll 4
      for (int part = 0; part < PARTS; part++) {
        const auto low = blocks_[pair][2 * part], high = blocks_[pair][2 * part + 1];
        rows[2 * pair][0].parts[part] = __builtin_shufflevector(low, high, 0, 2, 4, 6);
        if (2 * pair + 1 < R) rows[2 * pair + 1][0].parts[part] = __builtin_shufflevector(low, high, 1, 3, 5, 7);
      }
  }

  // Adds the products of two lines with 8 bytes of each row. x: the first row; rows are `stride` bytes apart.
  QUIRE_INLINE void add(u32x16 first, u32x16 second, const char* x, int64_t stride) {
    uint8x16_t rows[PAIRS];
#pragma GCC unroll 3
    for (int pair = 0; pair < PAIRS; pair++)
      rows[pair] = vcombine_u8(vld1_u8((const uint8_t*)x + 2 * pair * stride),
                               vld1_u8((const uint8_t*)x + other(pair) * stride));
    for_parts([&](auto part) {
      const uint32x4_t low = vzip1q_u32(first.parts[part], second.parts[part]);
      const uint32x4_t high = vzip2q_u32(first.parts[part], second.parts[part]);
#pragma GCC unroll 3
      for (int pair = 0; pair < PAIRS; pair++) {
        blocks_[pair][2 * part] = multiply_block(blocks_[pair][2 * part], low, rows[pair]);
        blocks_[pair][2 * part + 1] = multiply_block(blocks_[pair][2 * part + 1], high, rows[pair]);
      }
    });
  }

  // Adds the products of `count` lines, `distance` words apart, each with 4 bytes of every row. Calls visit() once per
  // line.
  template <class F>
  QUIRE_INLINE void add_lines(const uint32_t* lines, int64_t distance, int64_t count, const char* x, int64_t stride,
                              F visit) {
    int64_t i = 0;
    for (; i + 2 <= count; i += 2) {
      visit(), visit();
      add(load_words(lines + i * distance), load_words(lines + (i + 1) * distance), x + i * 4, stride);
    }
    if (i == count) return;
    visit();
    char padded[R][8] = {};
    for (int r = 0; r < R; r++) memcpy(padded[r], x + r * stride + i * 4, 4);
    add(load_words(lines + i * distance), u32x16{}, padded[0], 8);
  }

 private:
  static constexpr int PAIRS = (R + 1) / 2;
  static constexpr int other(int pair) { return 2 * pair + 1 < R ? 2 * pair + 1 : 2 * pair; }  // the pair's second row

  typename V::Part blocks_[PAIRS][2 * PARTS];
};

}  // namespace quire

#endif
