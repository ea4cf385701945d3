// Norms, activation and rotary embedding: one pass over memory each, float32 arithmetic, rounded to the tensors' type
// at the same places as the reference does.
#include <cmath>

#include "vector.h"

using namespace quire;

namespace {

// Below this many elements one thread is done before a second one has woken up.
constexpr int64_t PARALLEL_ELEMENTS = 32768;

template <class F>
void for_rows(int64_t rows, int64_t elements_per_row, int threads, F f) {
  const bool pays = threads > 1 && rows * elements_per_row >= PARALLEL_ELEMENTS;
#pragma omp parallel for num_threads(threads) schedule(static) if (pays)
  for (int64_t row = 0; row < rows; row++) f(row);
}

template <class T>
float inverse_rms(const T* x, int64_t dim, float eps) {
  f32x16 squares[4] = {};
  int64_t i = 0;
  for (; i + 4 * LANES <= dim; i += 4 * LANES)
    for (int j = 0; j < 4; j++) {
      f32x16 v = load(x + i + j * LANES);
      squares[j] += v * v;
    }
  for_lanes(dim - i, [&](int64_t at, int n) {
    f32x16 v = load_up_to(x + i + at, n);
    squares[0] += v * v;
  });
  return 1.0f / std::sqrt(sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / float(dim) + eps);
}

template <class T>
void norm_row(const T* x, const T* weight, T* out, int64_t dim, float eps) {
  f32x16 scale = splat(inverse_rms(x, dim, eps));
  for_lanes(dim, [&](int64_t i, int n) {
    f32x16 normed = rounded_to(load_up_to(x + i, n) * scale, T{});
    store_up_to(out + i, normed * load_up_to(weight + i, n), n);
  });
}

// x: [outer, inner, dim] with strides; out: contiguous.
template <class T>
void rms_norm(const T* x, int64_t outer, int64_t inner, int64_t outer_stride, int64_t inner_stride, int64_t dim,
              const T* weight, float eps, T* out, int threads) {
  for_rows(outer * inner, dim, threads, [=](int64_t row) {
    norm_row(x + row / inner * outer_stride + row % inner * inner_stride, weight, out + row * dim, dim, eps);
  });
}

// In place: residual becomes x + residual, and x the norm of that.
template <class T>
void add_rms_norm(T* x, int64_t x_stride, T* residual, int64_t residual_stride, int64_t rows, int64_t dim,
                  const T* weight, float eps, int threads) {
  for_rows(rows, dim, threads, [=](int64_t row) {
    T* from = x + row * x_stride;
    T* to = residual + row * residual_stride;
    for_lanes(dim, [&](int64_t i, int n) { store_up_to(to + i, load_up_to(from + i, n) + load_up_to(to + i, n), n); });
    norm_row(to, weight, from, dim, eps);
  });
}

template <class T>
void silu_and_mul(const T* x, int64_t stride, int64_t rows, int64_t half, T* out, int threads) {
  constexpr float LOG2_E = 1.44269504f;
  for_rows(rows, 2 * half, threads, [=](int64_t row) {
    const T* gate = x + row * stride;
    for_lanes(half, [&](int64_t i, int n) {
      f32x16 g = load_up_to(gate + i, n);
      f32x16 floored = g > -87.0f ? g : splat(-87.0f);  // exp2 must not overflow; silu is less than 1e-35 there
      f32x16 silu = rounded_to(floored / (1.0f + exp2(floored * -LOG2_E)), T{});
      store_up_to(out + row * half + i, silu * load_up_to(gate + half + i, n), n);
    });
  });
}

// In place on x: [tokens, heads, head_dim]; cos, sin: [tokens, half].
template <class T>
void rotate_row(T* x, int64_t heads, int64_t head_stride, const float* cos, const float* sin, int64_t half) {
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

template <class T>
void rotary(T* q, int64_t q_stride, int64_t q_head_stride, int64_t heads, T* k, int64_t k_stride, int64_t k_head_stride,
            int64_t kv_heads, const float* cos, const float* sin, int64_t half, int64_t tokens, int threads) {
  for_rows(tokens, 2 * half * (heads + kv_heads), threads, [=](int64_t t) {
    rotate_row(q + t * q_stride, heads, q_head_stride, cos + t * half, sin + t * half, half);
    rotate_row(k + t * k_stride, kv_heads, k_head_stride, cos + t * half, sin + t * half, half);
  });
}

}  // namespace

extern "C" {

void quire_rms_norm(int is_bf16, const void* x, int64_t outer, int64_t inner, int64_t outer_stride,
                    int64_t inner_stride, int64_t dim, const void* weight, float eps, void* out, int threads) {
  if (is_bf16)
    rms_norm((const bf16*)x, outer, inner, outer_stride, inner_stride, dim, (const bf16*)weight, eps, (bf16*)out,
             threads);
  else
    rms_norm((const float*)x, outer, inner, outer_stride, inner_stride, dim, (const float*)weight, eps, (float*)out,
             threads);
}

void quire_add_rms_norm(int is_bf16, void* x, int64_t x_stride, void* residual, int64_t residual_stride, int64_t rows,
                        int64_t dim, const void* weight, float eps, int threads) {
  if (is_bf16)
    add_rms_norm((bf16*)x, x_stride, (bf16*)residual, residual_stride, rows, dim, (const bf16*)weight, eps, threads);
  else
    add_rms_norm((float*)x, x_stride, (float*)residual, residual_stride, rows, dim, (const float*)weight, eps, threads);
}

void quire_silu_and_mul(int is_bf16, const void* x, int64_t stride, int64_t rows, int64_t half, void* out,
                        int threads) {
  if (is_bf16) silu_and_mul((const bf16*)x, stride, rows, half, (bf16*)out, threads);
  else silu_and_mul((const float*)x, stride, rows, half, (float*)out, threads);
}

void quire_rotary(int is_bf16, void* q, int64_t q_stride, int64_t q_head_stride, int64_t heads, void* k,
                  int64_t k_stride, int64_t k_head_stride, int64_t kv_heads, const float* cos, const float* sin,
                  int64_t half, int64_t tokens, int threads) {
  if (is_bf16)
    rotary((bf16*)q, q_stride, q_head_stride, heads, (bf16*)k, k_stride, k_head_stride, kv_heads, cos, sin, half,
           tokens, threads);
  else
    rotary((float*)q, q_stride, q_head_stride, heads, (float*)k, k_stride, k_head_stride, kv_heads, cos, sin, half,
           tokens, threads);
}
}
