// Biases on each head's scores, by the distance from query to key (layers/distance_bias.py).
#pragma once

#include "vector.h"

#include <algorithm>

namespace quire {

struct Biases {
  const float* table;  // [heads, 2 * reach + 1], by key position minus query position, from -reach to reach; or null
  int reach;           // keys farther away get the bias at this distance

  // The biases of 16 consecutive keys, the first of which is `ahead` tokens after the query.
  f32x16 of(int head, int ahead) const {
    const float* middle = table + int64_t(head) * (2 * reach + 1) + reach;
    if (ahead >= -reach && ahead + LANES - 1 <= reach) return load(middle + ahead);
    if (ahead + LANES - 1 <= -reach) return splat(middle[-reach]);
    if (ahead >= reach) return splat(middle[reach]);
    float x[LANES];
    for (int i = 0; i < LANES; i++) x[i] = middle[std::clamp(ahead + i, -reach, reach)];
    return load(x);
  }
};

}  // namespace quire
