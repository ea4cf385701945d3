// Sums of products of bytes, and the quantization of activations to 8 bits (quantized_linear.cpp).
#pragma once

#include <algorithm>
#include <vector>

#include "byte_pairs.h"
#include "team.h"
#include "vector.h"

namespace quire {

// Subtracted from 8-bit codes on processors that can only multiply signed bytes with signed bytes.
#if defined(__ARM_NEON) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int LESS = 128;
#else
constexpr int LESS = 0;
#endif

// Adds the products of the four bytes of `codes` and `x` to each lane. Bytes of `codes` are unsigned if LESS is 0;
// those of `x` are signed.
QUIRE_INLINE i32x16 dot_bytes(i32x16 sum, u32x16 codes, uint32_t x) {
#if defined(__AVX512VNNI__)
  return as<i32x16>(_mm512_dpbusd_epi32(as<__m512i>(sum), as<__m512i>(codes), _mm512_set1_epi32(int(x))));
#elif defined(__AVX2__)
  // Even and odd bytes are multiplied as 16-bit numbers: pairs of 8-bit products would overflow.
  const uint32_t even = (uint32_t(int8_t(x)) & 0xffff) | uint32_t(int8_t(x >> 16)) << 16;
  const uint32_t odd = (uint32_t(int8_t(x >> 8)) & 0xffff) | uint32_t(int8_t(x >> 24)) << 16;
  const u32x16 low = codes & 0x00ff00ffu, high = codes >> 8 & 0x00ff00ffu;
  __m256i parts[2], lows[2], highs[2];
  memcpy(parts, &sum, 64), memcpy(lows, &low, 64), memcpy(highs, &high, 64);
  for (int i = 0; i < 2; i++) {
    parts[i] = _mm256_add_epi32(parts[i], _mm256_madd_epi16(lows[i], _mm256_set1_epi32(int(even))));
    parts[i] = _mm256_add_epi32(parts[i], _mm256_madd_epi16(highs[i], _mm256_set1_epi32(int(odd))));
  }
  memcpy(&sum, parts, 64);
  return sum;
#elif defined(__ARM_NEON)
  const int8x16_t by = as<int8x16_t>(vdupq_n_u32(x));
  return each<i32x16>([&](auto i) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(sum.parts[i], as<uint8x16_t>(codes.parts[i]), by);
#elif defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sum.parts[i], as<int8x16_t>(codes.parts[i]), by);
#else  // two products fit into 16 bits, since no byte of x is -128
    const int8x16_t part = as<int8x16_t>(codes.parts[i]);
    const int16x8_t low = vmull_s8(vget_low_s8(part), vget_low_s8(by)), high = vmull_high_s8(part, by);
    return vpadalq_s16(sum.parts[i], vpaddq_s16(low, high));
#endif
  });
#else
  for (int i = 0; i < 4; i++) sum += as<i32x16>(codes >> 8 * i & 0xffu) * int32_t(int8_t(x >> 8 * i));
  return sum;
#endif
}

QUIRE_INLINE i32x16 dot_word(i32x16 sum, u32x16 codes, const uint32_t* x, std::integral_constant<int, 8>) {
  return dot_bytes(sum, LESS ? codes ^ 0x80808080u : codes, *x);
}

QUIRE_INLINE i32x16 dot_word(i32x16 sum, u32x16 codes, const uint32_t* x, std::integral_constant<int, 4>) {
  return dot_bytes(dot_bytes(sum, codes & 0x0f0f0f0fu, x[0]), codes >> 4 & 0x0f0f0f0fu, x[1]);
}

// Activations quantized to 8 bits. codes: [rows, stride]. scales, sums (of codes) and totals (scales * sums): [groups,
// rows], since visits read those of neighbouring rows. With QUIRE_PAIRS also `beginnings`, the initial sums of runs:
// [groups, runs, rows], or `wide`, the codes in 16 bits: [rows, stride].
struct Activations {
  int64_t stride = 0, rows = 0, runs = 0;
  std::vector<int8_t> codes;
  std::vector<float> scales, totals;
  std::vector<int32_t> sums;
  std::vector<uint32_t> beginnings;
  std::vector<int16_t> wide;

  int64_t at(int64_t group, int64_t row) const { return group * rows + row; }

  // bits: of the weight's codes in memory; wide_bits: of these codes when they are multiplied.
  template <class T>
  void quantize(const T* x, int64_t x_stride, int64_t x_rows, int64_t in, int64_t group, int bits, int wide_bits,
                bool has_offsets, int threads) {
    stride = in + 2 * LANES;  // a group is written in steps of 16
    rows = x_rows;
    const int64_t groups = (in + group - 1) / group;
    codes.resize(rows * stride), scales.resize(rows * groups), sums.resize(rows * groups), totals.resize(rows * groups);
#ifdef QUIRE_PAIRS
    const Runs run(bits, has_offsets);
    const bool is_wide = bits == 8 && !SUMS_ARE_WIDE;
    runs = is_wide ? 0 : (std::min(group, in) + 4 * run.words - 1) / (4 * run.words);
    beginnings.resize(rows * groups * runs), wide.resize(is_wide ? rows * stride : 0);
#endif
    for_each(rows, rows * in > 32768 ? threads : 1, [&](int64_t row) {
      int8_t* const to = codes.data() + row * stride;
      memset(to + in, 0, stride - in);  // zeros to multiply the padding of the weight's last unit with
      for (int64_t g = 0, from = 0; g < groups; g++, from += group) {
        const int64_t count = std::min(group, in - from);
        const int64_t i = at(g, row);
        quantize_group(x + row * x_stride + from, count, wide_bits, to + from, scales[i], sums[i]);
        totals[i] = scales[i] * float(sums[i]);
#ifdef QUIRE_PAIRS
        for (int64_t r = 0; r < runs; r++) {
          const int64_t first = 4 * run.words * r, bytes = std::min<int64_t>(4 * run.words, (count - first + 15) & -16);
          beginnings[at(g * runs + r, row)] = beginning(to + from + first, bytes, run.centre);
        }
#endif
      }
#ifdef QUIRE_PAIRS
      if (is_wide)
        for (int64_t i = 0; i + LANES <= stride; i += LANES) widen_x(to + i, wide.data() + row * stride + i);
#endif
    });
  }

  template <class T>
  static void quantize_group(const T* x, int64_t n, int bits, int8_t* to, float& scale, int32_t& sum) {
    f32x16 top = {};
    for_lanes(n, [&](int64_t i, int count) {
      top = larger(top, as<f32x16>(as<u32x16>(load_up_to(x + i, count)) & 0x7fffffffu));
    });
    const float largest = maximum(top), inverse = largest > 0 ? 127 / largest : 0;
    scale = largest / 127;
    const f32x16 shift = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    i32x16 total = {};
    for_lanes(n, [&](int64_t i, int count) {
      const i32x16 code = as<i32x16>(load_up_to(x + i, count) * inverse + shift) - as<i32x16>(shift);
      total += code;
      u8x16 bytes = low_bytes(as<u32x16>(code));
      if (bits == 4) bytes = __builtin_shufflevector(bytes, bytes, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
      memcpy(to + i, &bytes, sizeof(bytes));
    });
    sum = folded(total, [](i32x16 a, i32x16 b) { return a + b; })[0];
  }
};

}  // namespace quire
