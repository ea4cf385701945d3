// Products of bytes on processors with AVX2 but without 512-bit VNNI. vpmaddubsw multiplies unsigned bytes with signed
// ones and adds neighbouring products in 16 bits. The words of a run are added up in 16 bits, and the sums of runs in
// 32 bits.
//
//     word of codes  | c0 c1 c2 c3 |      sums of a run | c0 x0 + c1 x1 + c4 x4 + ... | c2 x2 + c3 x3 + ... |
//     word of x      | x0 x1 x2 x3 |
//
// 16-bit sums wrap around, so they are right if the final sum of a run fits. A run therefore starts from -centre * x:
// the sum of (code - centre) * x is at most half as large. Pairs of products of 8-bit codes do not fit into 16 bits, so
// these codes are widened to 16 bits first, for vpmaddwd.
//
// With AVX-VNNI, vpdpbusd adds all four products of a word in 32 bits, whatever the codes are.
#pragma once

#include "panels.h"

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && defined(__AVX512BW__) == defined(__AVX512F__)
#define QUIRE_PAIRS
#endif

namespace quire {

#ifdef __AVXVNNI__
constexpr bool SUMS_ARE_WIDE = true;  // of 32 bits
#else
constexpr bool SUMS_ARE_WIDE = false;
#endif

// How codes of `bits` bits are added up in runs. words: the length of a run, in words of four codes.
struct Runs {
  int words;
  int32_t centre;  // subtracted from each code within a run
  int32_t rest;    // added back to each code after the last run: with offsets, codes are not centred

  Runs(int bits, bool has_offsets) {
    // The codes of x are at most 127, and 2 * 8 * 127 * 16 = 32,512 fits. Codes up to 15 need no centre if runs are
    // half as long.
    const bool is_plain = has_offsets && (bits <= 4 || SUMS_ARE_WIDE);
    words = SUMS_ARE_WIDE || bits == 5 || is_plain ? 8 : bits <= 4 ? 16 : 4;
    centre = is_plain ? 0 : 1 << (bits - 1);
    rest = has_offsets ? centre : 0;
  }
};

#ifdef QUIRE_PAIRS

#ifdef __AVX512F__
QUIRE_INLINE u32x16 add_pairs(u32x16 sums, u32x16 codes, u32x16 x) {
  return as<u32x16>(_mm512_add_epi16(as<__m512i>(sums), _mm512_maddubs_epi16(as<__m512i>(codes), as<__m512i>(x))));
}
QUIRE_INLINE i32x16 add_wide(i32x16 sums, u32x16 codes, u32x16 x) {
  return as<i32x16>(_mm512_add_epi32(as<__m512i>(sums), _mm512_madd_epi16(as<__m512i>(codes), as<__m512i>(x))));
}
QUIRE_INLINE i32x16 total(u32x16 sums) {
  return as<i32x16>(_mm512_madd_epi16(as<__m512i>(sums), _mm512_set1_epi16(1)));
}
QUIRE_INLINE u32x16 odd_bytes(u32x16 codes) { return as<u32x16>(_mm512_srli_epi16(as<__m512i>(codes), 8)); }
#else
// Adds the products of pairs of bytes to 16-bit sums (with AVX-VNNI, of four bytes to 32-bit sums).
QUIRE_INLINE u32x16 add_pairs(u32x16 sums, u32x16 codes, u32x16 x) {
  return each<u32x16>([&](auto i) {
#ifdef __AVXVNNI__
    const __m256i before = (__m256i)sums.parts[i], by = (__m256i)x.parts[i];
    return (u32x16::Part)_mm256_dpbusd_avx_epi32(before, (__m256i)codes.parts[i], by);
#else
    const __m256i products = _mm256_maddubs_epi16((__m256i)codes.parts[i], (__m256i)x.parts[i]);
    return (u32x16::Part)_mm256_add_epi16((__m256i)sums.parts[i], products);
#endif
  });
}
// Adds the products of 16-bit halves of words to 32-bit sums.
QUIRE_INLINE i32x16 add_wide(i32x16 sums, u32x16 codes, u32x16 x) {
  return each<i32x16>([&](auto i) {
    const __m256i products = _mm256_madd_epi16((__m256i)codes.parts[i], (__m256i)x.parts[i]);
    return (i32x16::Part)_mm256_add_epi32((__m256i)sums.parts[i], products);
  });
}
// Adds the two 16-bit sums of each word.
QUIRE_INLINE i32x16 total(u32x16 sums) {
  if constexpr (SUMS_ARE_WIDE) return as<i32x16>(sums);
  return each<i32x16>([&](auto i) {
    return (i32x16::Part)_mm256_madd_epi16((__m256i)sums.parts[i], _mm256_set1_epi16(1));
  });
}
QUIRE_INLINE u32x16 odd_bytes(u32x16 codes) {
  return each<u32x16>([&](auto i) { return (u32x16::Part)_mm256_srli_epi16((__m256i)codes.parts[i], 8); });
}
#endif

QUIRE_INLINE u32x16 even_bytes(u32x16 codes) { return codes & 0x00ff00ffu; }

// Returns `sums`, forced into registers. Otherwise gcc adds up the products of several words first and runs out of
// registers.
QUIRE_INLINE u32x16 kept(u32x16 sums) {
#ifdef __AVX512F__
  asm volatile("" : "+v"(sums));
#else
  for_parts([&](auto i) { asm volatile("" : "+x"(sums.parts[i.value])); });
#endif
  return sums;
}

QUIRE_INLINE u32x16 splat_word(const void* p) {
  uint32_t word;
  memcpy(&word, p, sizeof(word));
  return splat(word);
}

// Returns the sums that a run begins with: the codes of x in the run times -centre. bytes: a multiple of 16.
inline uint32_t beginning(const int8_t* x, int64_t bytes, int32_t centre) {
  __m128i sums = _mm_setzero_si128();
  for (int64_t i = 0; i < bytes; i += 16) {
    const __m128i codes = _mm_loadu_si128((const __m128i*)(x + i));
    sums = _mm_add_epi16(sums, _mm_maddubs_epi16(_mm_set1_epi8(1), codes));
  }
  if constexpr (SUMS_ARE_WIDE) sums = _mm_madd_epi16(sums, _mm_set1_epi16(1));
  const auto add = [](__m128i a, __m128i b) { return SUMS_ARE_WIDE ? _mm_add_epi32(a, b) : _mm_add_epi16(a, b); };
  sums = add(sums, _mm_shuffle_epi32(sums, 0x4e));
  sums = add(sums, _mm_shuffle_epi32(sums, 0xb1));
  if constexpr (SUMS_ARE_WIDE) return uint32_t(_mm_cvtsi128_si32(sums) * -centre);
  return uint32_t(_mm_cvtsi128_si32(_mm_mullo_epi16(sums, _mm_set1_epi16(int16_t(-centre)))));
}

// Widens 16 codes of x to 16 bits. Of each four, the even ones come first, then the odd ones.
inline void widen_x(const int8_t* x, int16_t* to) {
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  const __m128i codes = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)x), order);
  _mm256_storeu_si256((__m256i*)to, _mm256_cvtepi8_epi16(codes));
}

#endif

}  // namespace quire
