// Codes of 2, 3, 5 or 6 bits, in units of 16 or 32. They are packed from words of 4-bit or 8-bit codes, and products
// widen them to such words again:
//
//     16 codes of 6 bits | words 0 and 1: the lowest 4 bits of each | word 2: the other 2 bits |
//
// The bits of codes are divided into planes of 4, 2 or 1 bits (6 = 4 + 2), each with its own words. Word i of a 2-bit
// plane holds the bits of 4 (or 2) neighbouring words of 8-bit (or 4-bit) codes: the first word's bits are the lowest
// ones in each field of 8 (or 4) bits, the next word's bits are above them.
#pragma once

#include "vector.h"

namespace quire {

constexpr int wide_bits(int bits) { return bits < 4 ? 4 : 8; }

// Words per unit, as stored and when widened.
constexpr int stored_words(int bits) { return bits % 2 ? bits : bits / 2; }
constexpr int wide_words(int bits) { return wide_bits(bits) / (bits % 2 ? 1 : 2); }

// A word with `pattern` in each of its fields of `bits` bits.
constexpr uint32_t in_each_field(int bits, uint32_t pattern) {
  uint32_t word = 0;
  for (int at = 0; at < 32; at += bits) word |= pattern << at;
  return word;
}

// Calls f(Constant<bits of the plane>, Constant<its first bit in a code>) for each plane.
template <int BITS, class F>
QUIRE_INLINE void for_planes(F f) {
  if constexpr (BITS & 4) f(Constant<4>{}, Constant<0>{});
  if constexpr (BITS & 2) f(Constant<2>{}, Constant<(BITS & 4)>{});
  if constexpr (BITS & 1) f(Constant<1>{}, Constant<(BITS & 6)>{});
}

// Stored words -> wide words. V: uint32_t, or u32x16 for 16 outputs. read(i): returns stored word i.
template <int BITS, class V, class F>
QUIRE_INLINE void widen_codes(F read, V (&wide)[wide_words(BITS)]) {
  constexpr int FIELD = wide_bits(BITS);
  for_planes<BITS>([&](auto plane, auto bit) {
    constexpr int WIDTH = plane.value, BIT = bit.value, SHARE = FIELD / WIDTH;  // wide words per word of the plane
    constexpr int WORDS = wide_words(BITS) / SHARE, FIRST = BIT * stored_words(BITS) / BITS;
    constexpr uint32_t MASK = in_each_field(FIELD, ((1u << WIDTH) - 1) << BIT);
#pragma GCC unroll 4
    for (int i = 0; i < WORDS; i++) {
      const V word = read(FIRST + i);
#pragma GCC unroll 8
      for (int j = 0; j < SHARE; j++) {
        const int up = BIT - j * WIDTH;
        const V part = (up > 0 ? word << uint32_t(up) : word >> uint32_t(-up)) & MASK;
        V& to = wide[i * SHARE + j];
        to = BIT == 0 ? part : to | part;
      }
    }
  });
}

// Wide words -> stored words.
template <int BITS>
inline void narrow_codes(const uint32_t (&wide)[wide_words(BITS)], uint32_t (&stored)[stored_words(BITS)]) {
  constexpr int FIELD = wide_bits(BITS);
  for_planes<BITS>([&](auto plane, auto bit) {
    constexpr int WIDTH = plane.value, BIT = bit.value, SHARE = FIELD / WIDTH;
    constexpr int WORDS = wide_words(BITS) / SHARE, FIRST = BIT * stored_words(BITS) / BITS;
    constexpr uint32_t MASK = in_each_field(FIELD, (1u << WIDTH) - 1);
    for (int i = 0; i < WORDS; i++) {
      stored[FIRST + i] = 0;
      for (int j = 0; j < SHARE; j++) stored[FIRST + i] |= (wide[i * SHARE + j] >> BIT & MASK) << j * WIDTH;
    }
  });
}

// Calls f(Constant<bits>).
template <class F>
void with_bits(int bits, F f) {
  if (bits == 2) f(Constant<2>{});
  if (bits == 3) f(Constant<3>{});
  if (bits == 5) f(Constant<5>{});
  if (bits == 6) f(Constant<6>{});
}

}  // namespace quire
