// Norms, activations and rotary embedding: one pass over memory each, float32 arithmetic, rounded to the tensors' type
// at the same places as the reference does.
#include <cmath>

#include "team.h"
#include "vector.h"

using namespace quire;

namespace {

// Below this many elements one thread is done before a second one has woken up.
constexpr int64_t PARALLEL_ELEMENTS = 32768;

template <class F>
void for_rows(int64_t rows, int64_t elements_per_row, int threads, F f) {
  for_each(rows, rows * elements_per_row >= PARALLEL_ELEMENTS ? threads : 1, f);
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

// W is T, and what is normed is rounded before it meets the weight, or float, and their product is rounded.
template <class T, class W>
void norm_row(const T* x, const W* weight, T* out, int64_t dim, float eps) {
  f32x16 scale = splat(inverse_rms(x, dim, eps));
  for_lanes(dim, [&](int64_t i, int n) {
    f32x16 normed = rounded_to(load_up_to(x + i, n) * scale, W{});
    store_up_to(out + i, normed * load_up_to(weight + i, n), n);
  });
}

// x: [outer, inner, dim] with strides; out: contiguous.
template <class T, class W>
void rms_norm(const T* x, int64_t outer, int64_t inner, int64_t outer_stride, int64_t inner_stride, int64_t dim,
              const W* weight, float eps, T* out, int threads) {
  for_rows(outer * inner, dim, threads, [=](int64_t row) {
    norm_row(x + row / inner * outer_stride + row % inner * inner_stride, weight, out + row * dim, dim, eps);
  });
}

// In place: residual becomes x + residual, and x the norm of that.
template <class T, class W>
void add_rms_norm(T* x, int64_t x_stride, T* residual, int64_t residual_stride, int64_t rows, int64_t dim,
                  const W* weight, float eps, int threads) {
  for_rows(rows, dim, threads, [=](int64_t row) {
    T* from = x + row * x_stride;
    T* to = residual + row * residual_stride;
    for_lanes(dim, [&](int64_t i, int n) { store_up_to(to + i, load_up_to(from + i, n) + load_up_to(to + i, n), n); });
    norm_row(to, weight, from, dim, eps);
  });
}

constexpr float LOG2_E = 1.44269504f;

// 1 / (1 + exp(-x)), by an exponent that is kept from overflowing: below 1e-37 it stays what it is there.
inline f32x16 sigmoid(f32x16 x) {
  f32x16 exponent = x * -LOG2_E;
  return 1.0f / (1.0f + exp2(exponent > 126.0f ? splat(126.0f) : exponent));
}

// The gated activations: what becomes of a gate and the value beside it. T is the type of the tensors.
struct Silu {
  template <class T>
  f32x16 operator()(f32x16 gate, f32x16 up, T type) const {
    return rounded_to(gate * sigmoid(gate), type) * up;
  }
};

struct Gelu {
  template <class T>
  f32x16 operator()(f32x16 gate, f32x16 up, T type) const {
    return rounded_to(gate * normal_distribution(gate), type) * up;
  }
};

struct GeluTanh {  // (1 + tanh(y)) / 2 is the sigmoid of 2 y
  template <class T>
  f32x16 operator()(f32x16 gate, f32x16 up, T type) const {
    return rounded_to(gate * sigmoid(1.5957691216f * (gate + 0.044715f * gate * gate * gate)), type) * up;
  }
};

struct SwigluOai {
  float alpha, limit;
  template <class T>
  f32x16 operator()(f32x16 gate, f32x16 up, T) const {
    gate = gate > limit ? splat(limit) : gate;
    up = up > limit ? splat(limit) : up < -limit ? splat(-limit) : up;
    return (up + 1.0f) * gate * sigmoid(alpha * gate);
  }
};

// x: [rows, 2 * half] of gates and values; out: [rows, half].
template <class T, class F>
void gate(const T* x, int64_t stride, int64_t rows, int64_t half, T* out, int threads, F activation) {
  for_rows(rows, 2 * half, threads, [=](int64_t row) {
    const T* gates = x + row * stride;
    for_lanes(half, [&](int64_t i, int n) {
      f32x16 made = activation(load_up_to(gates + i, n), load_up_to(gates + half + i, n), T{});
      store_up_to(out + row * half + i, made, n);
    });
  });
}

// In place on x: [heads, head_dim]; cos, sin: [half].
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

// The same, of pairs that lie side by side.
template <class T>
void rotate_pairs(T* x, int64_t heads, int64_t head_stride, const float* cos, const float* sin, int64_t half) {
  for (int64_t head = 0; head < heads; head++)
    for_lanes(half, [&](int64_t i, int n) {
      T part[2 * LANES] = {}, *at = x + head * head_stride + 2 * i, *pairs = n == LANES ? at : part;
      if (n < LANES) memcpy(part, at, 2 * n * sizeof(T));
      f32x16 low = load(pairs), high = load(pairs + LANES);
      f32x16 a = __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      f32x16 b = __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
      f32x16 c = load_up_to(cos + i, n), s = load_up_to(sin + i, n);
      f32x16 first = a * c - b * s, second = b * c + a * s;
      store(pairs, __builtin_shufflevector(first, second, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
      store(pairs + LANES,
            __builtin_shufflevector(first, second, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
      if (n < LANES) memcpy(at, part, 2 * n * sizeof(T));
    });
}

template <class T>
void rotary(T* q, int64_t q_stride, int64_t q_head_stride, int64_t heads, T* k, int64_t k_stride, int64_t k_head_stride,
            int64_t kv_heads, const float* cos, const float* sin, int64_t half, int64_t tokens, bool interleaved,
            int threads) {
  const auto rotate = interleaved ? rotate_pairs<T> : rotate_halves<T>;
  for_rows(tokens, 2 * half * (heads + kv_heads), threads, [=](int64_t t) {
    rotate(q + t * q_stride, heads, q_head_stride, cos + t * half, sin + t * half, half);
    rotate(k + t * k_stride, kv_heads, k_head_stride, cos + t * half, sin + t * half, half);
  });
}

// f(the tensors' type, the weight's type)
template <class F>
void with_types(int is_bf16, int wide_weight, F f) {
  if (!is_bf16) f(float{}, float{});
  else if (wide_weight) f(bf16{}, float{});
  else f(bf16{}, bf16{});
}

}  // namespace

extern "C" {

// wide_weight: it is float32, whatever x is.
void quire_rms_norm(int is_bf16, int wide_weight, const void* x, int64_t outer, int64_t inner, int64_t outer_stride,
                    int64_t inner_stride, int64_t dim, const void* weight, float eps, void* out, int threads) {
  with_types(is_bf16, wide_weight, [&](auto t, auto w) {
    using T = decltype(t);
    using W = decltype(w);
    rms_norm((const T*)x, outer, inner, outer_stride, inner_stride, dim, (const W*)weight, eps, (T*)out, threads);
  });
}

void quire_add_rms_norm(int is_bf16, int wide_weight, void* x, int64_t x_stride, void* residual,
                        int64_t residual_stride, int64_t rows, int64_t dim, const void* weight, float eps,
                        int threads) {
  with_types(is_bf16, wide_weight, [&](auto t, auto w) {
    using T = decltype(t);
    using W = decltype(w);
    add_rms_norm((T*)x, x_stride, (T*)residual, residual_stride, rows, dim, (const W*)weight, eps, threads);
  });
}

// activation: numbered as in elementwise.py; alpha and limit are SwigluOai's.
void quire_gate(int is_bf16, int activation, float alpha, float limit, const void* x, int64_t stride, int64_t rows,
                int64_t half, void* out, int threads) {
  with_types(is_bf16, false, [&](auto t, auto) {
    using T = decltype(t);
    auto run = [&](auto f) { gate((const T*)x, stride, rows, half, (T*)out, threads, f); };
    switch (activation) {
      case 0: return run(Silu{});
      case 1: return run(Gelu{});
      case 2: return run(GeluTanh{});
      case 3: return run(SwigluOai{alpha, limit});
    }
  });
}

void quire_rotary(int is_bf16, void* q, int64_t q_stride, int64_t q_head_stride, int64_t heads, void* k,
                  int64_t k_stride, int64_t k_head_stride, int64_t kv_heads, const float* cos, const float* sin,
                  int64_t half, int64_t tokens, int interleaved, int threads) {
  with_types(is_bf16, false, [&](auto t, auto) {
    using T = decltype(t);
    rotary((T*)q, q_stride, q_head_stride, heads, (T*)k, k_stride, k_head_stride, kv_heads, cos, sin, half, tokens,
           interleaved, threads);
  });
}
}
