// Codes of 2, 3, 5 or 6 bits: so many words hold 32 of them. Products widen them to 4 or 8 bits, in whose words they are
// packed:
//
//     of 6 bits | words 0 ... 3: the lowest 4 bits of the codes | words 4 and 5: the other 2 bits |
//
// So a number of bits is a sum of 4, 2 and 1, and each of these has a plane of words. The word i of a plane of 2 bits
// has the bits of 4 (or 2) neighbouring words of 8 (or 4) bits: those of the first one in the lowest bits of each field of
// 8 (or 4), the next ones above them.
#pragma once

#include "vector.h"

namespace quire {

constexpr int wide_bits(int bits) { return bits < 4 ? 4 : 8; }

// A pattern in each field of `bits` bits of a word.
constexpr uint32_t in_each_field(int bits, uint32_t pattern) {
  uint32_t word = 0;
  for (int at = 0; at < 32; at += bits) word |= pattern << at;
  return word;
}

// f(Constant<bits of the plane>, Constant<its first bit in a code>). The number of its first word is that of the bit.
template <int BITS, class F>
QUIRE_INLINE void for_planes(F f) {
  constexpr int FIRST = BITS & 4, SECOND = BITS & 2;
  if constexpr (BITS & 4) f(Constant<4>{}, Constant<0>{});
  if constexpr (BITS & 2) f(Constant<2>{}, Constant<FIRST>{});
  if constexpr (BITS & 1) f(Constant<1>{}, Constant<FIRST + SECOND>{});
}

// BITS words -> words of 4 or 8 bits. V: uint32_t, or u32x16 for as many outputs. read(i): word i.
template <int BITS, class V, class F>
QUIRE_INLINE void widen_codes(F read, V (&wide)[wide_bits(BITS)]) {
  constexpr int FIELD = wide_bits(BITS);
  for_planes<BITS>([&](auto plane, auto bit) {
    constexpr int WIDTH = plane.value, BIT = bit.value, SHARE = FIELD / WIDTH;  // words that share a word of the plane
    constexpr uint32_t MASK = in_each_field(FIELD, ((1u << WIDTH) - 1) << BIT);
#pragma GCC unroll 4
    for (int i = 0; i < WIDTH; i++) {
      const V word = read(BIT + i);
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

// The other way.
template <int BITS>
inline void narrow_codes(const uint32_t (&wide)[wide_bits(BITS)], uint32_t (&narrow)[BITS]) {
  constexpr int FIELD = wide_bits(BITS);
  for_planes<BITS>([&](auto plane, auto bit) {
    constexpr int WIDTH = plane.value, BIT = bit.value, SHARE = FIELD / WIDTH;
    constexpr uint32_t MASK = in_each_field(FIELD, (1u << WIDTH) - 1);
    for (int i = 0; i < WIDTH; i++) {
      narrow[BIT + i] = 0;
      for (int j = 0; j < SHARE; j++) narrow[BIT + i] |= (wide[i * SHARE + j] >> BIT & MASK) << j * WIDTH;
    }
  });
}

// f(Constant<bits>)
template <class F>
void with_bits(int bits, F f) {
  if (bits == 2) f(Constant<2>{});
  if (bits == 3) f(Constant<3>{});
  if (bits == 5) f(Constant<5>{});
  if (bits == 6) f(Constant<6>{});
}

}  // namespace quire
