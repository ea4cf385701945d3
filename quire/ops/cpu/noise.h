// Random noise for sampling, generated where it is used: Philox4x32-10, as defined in ops/reference/sampling.py.
#pragma once

#include "vector.h"

namespace quire {

constexpr int GROUP = 32;  // tokens at a time: 8 counters with 4 words each

QUIRE_INLINE u64x8 multiply(uint32_t a, u64x8 b) {  // 32 x 32 -> 64 bits
#ifdef __AVX512F__
  return as<u64x8>(_mm512_mul_epu32(_mm512_set1_epi64(a), as<__m512i>(b)));
#elif defined(__AVX2__)
  return each<u64x8>([&](auto i) { return (u64x8::Part)_mm256_mul_epu32(_mm256_set1_epi64x(a), (__m256i)b.parts[i]); });
#elif defined(__ARM_NEON)
  return each<u64x8>([&](auto i) { return vmull_u32(vmovn_u64(b.parts[i]), vdup_n_u32(a)); });
#else
  return b * uint64_t(a);
#endif
}

// Generates the words of 8 consecutive counters in the order of token ids, 16 in each vector.
inline void philox(uint32_t first_counter, uint32_t position, uint64_t seed, u32x16 words[2]) {
  const u64x8 low = u64x8{} + 0xffffffffu;
  u64x8 c0 = (u64x8{0, 1, 2, 3, 4, 5, 6, 7} + uint64_t(first_counter)) & low;
  u64x8 c1 = u64x8{} + uint64_t(position), c2 = {}, c3 = {};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    u64x8 p0 = multiply(0xD2511F53u, c0), p1 = multiply(0xCD9E8D57u, c2);
    c0 = (p1 >> 32) ^ c1 ^ uint64_t(k0);
    c2 = (p0 >> 32) ^ c3 ^ uint64_t(k1);
    c1 = p1 & low;
    c3 = p0 & low;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  u64x8 front = c0 | c1 << 32, back = c2 | c3 << 32;
  words[0] = as<u32x16>(shuffle<0, 8, 1, 9, 2, 10, 3, 11>(front, back));
  words[1] = as<u32x16>(shuffle<4, 12, 5, 13, 6, 14, 7, 15>(front, back));
}

// Uniform noise, exact and inside (0, 1).
inline f32x16 uniform(u32x16 words) {
  return (to_float(as<i32x16>(words >> 9)) + 0.5f) * 0x1p-23f;
}

}  // namespace quire
