// Norm and rotation of one vector: float32 arithmetic, rounded to the tensors' type where the reference rounds.
#pragma once

#include <cmath>

#include "vector.h"

namespace quire {

template <class T>
float inverse_rms(const T* x, int64_t dim, float eps) {
  f32x16 squares[4] = {};
  int64_t i = 0;
  for (; i + 4 * LANES <= dim; i += 4 * LANES)
    for (int j = 0; j < 4; j++) {
      f32x16 v = load(x + i + j * LANES);
      squares[j] = fma(v, v, squares[j]);
    }
  for_lanes(dim - i, [&](int64_t at, int n) {
    f32x16 v = load_up_to(x + i + at, n);
    squares[0] = fma(v, v, squares[0]);
  });
  return 1.0f / std::sqrt(sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / float(dim) + eps);
}

// If W is T, the normalized value is rounded before it is multiplied with the weight. If W is float, only the product
// is rounded.
template <class T, class W>
void norm_row(const T* x, const W* weight, T* out, int64_t dim, float eps) {
  f32x16 scale = splat(inverse_rms(x, dim, eps));
  for_lanes(dim, [&](int64_t i, int n) {
    f32x16 normed = rounded_to(load_up_to(x + i, n) * scale, W{});
    store_up_to(out + i, normed * load_up_to(weight + i, n), n);
  });
}

// Rotates x: [heads, head_dim] in place. cos, sin: [half].
template <class T>
void rotate_halves(T* x, int64_t heads, int64_t head_stride, const float* cos, const float* sin, int64_t half) {
  for (int64_t head = 0; head < heads; head++) {
    T* first = x + head * head_stride;
    T* second = first + half;
    for_lanes(half, [&](int64_t i, int n) {
      f32x16 a = load_up_to(first + i, n), b = load_up_to(second + i, n);
      f32x16 c = load_up_to(cos + i, n), s = load_up_to(sin + i, n);
      store_up_to(first + i, a * c - b * s, n);
      store_up_to(second + i, b * c + a * s, n);
    });
  }
}

// The same for interleaved pairs.
template <class T>
void rotate_pairs(T* x, int64_t heads, int64_t head_stride, const float* cos, const float* sin, int64_t half) {
  for (int64_t head = 0; head < heads; head++)
    for_lanes(half, [&](int64_t i, int n) {
      T part[2 * LANES] = {}, *at = x + head * head_stride + 2 * i, *pairs = n == LANES ? at : part;
      if (n < LANES) memcpy(part, at, 2 * n * sizeof(T));
      f32x16 low = load(pairs), high = load(pairs + LANES);
      f32x16 a = shuffle<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(low, high);
      f32x16 b = shuffle<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(low, high);
      f32x16 c = load_up_to(cos + i, n), s = load_up_to(sin + i, n);
      f32x16 first = a * c - b * s, second = b * c + a * s;
      store(pairs, shuffle<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(first, second));
      store(pairs + LANES,
            shuffle<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(first, second));
      if (n < LANES) memcpy(at, part, 2 * n * sizeof(T));
    });
}

}  // namespace quire
