// Sums of products with weights in their original order, one row per output.
#pragma once

#include "vector.h"

namespace quire {

// Returns the sum of each of up to four vectors, in the first C lanes.
template <int C>
inline f32x16 sums_of(const f32x16* v) {
  const f32x16 a = v[0], b = C > 1 ? v[1] : f32x16{}, c = C > 2 ? v[2] : f32x16{}, d = C > 3 ? v[3] : f32x16{};
  f32x16 ab = shuffle<0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30>(a, b) +
              shuffle<1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31>(a, b);
  f32x16 cd = shuffle<0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30>(c, d) +
              shuffle<1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31>(c, d);
  f32x16 all = shuffle<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(ab, cd) +
               shuffle<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(ab, cd);
  all += shuffle<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(all, all);
  return all + shuffle<4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11>(all, all);
}

}  // namespace quire
