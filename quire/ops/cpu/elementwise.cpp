// Norms, activations and rotary embedding. Each kernel makes one pass over memory, computes in float32, and rounds to
// the tensors' type where the reference does.
#include "elementwise.h"
#include "replay.h"
#include "team.h"
#include "vector.h"

using namespace quire;

namespace {

// With fewer elements, one thread finishes before a second one wakes up.
constexpr int64_t PARALLEL_ELEMENTS = 32768;

template <class F>
void for_rows(int64_t rows, int64_t elements_per_row, int threads, F f) {
  for_each(rows, rows * elements_per_row >= PARALLEL_ELEMENTS ? threads : 1, f);
}

// x: [outer, inner, dim] with strides; out: contiguous.
template <class T, class W>
void rms_norm(const T* x, int64_t outer, int64_t inner, int64_t outer_stride, int64_t inner_stride, int64_t dim,
              const W* weight, float eps, T* out, int threads) {
  for_rows(outer * inner, dim, threads, [=](int64_t row) {
    norm_row(x + row / inner * outer_stride + row % inner * inner_stride, weight, out + row * dim, dim, eps);
  });
}

// In place: residual becomes x + residual, and x becomes the norm of this sum.
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

// out = the norm of x. With a residual: residual becomes x + residual, and out = the norm of this sum. residual,
// weights, bias: null for none. x: [outer, inner, dim] with strides; out: contiguous. weight_stride: elements between
// the weights of neighbouring inner indices; 0 for a shared weight.
template <class T>
void layer_norm(const T* x, int64_t outer, int64_t inner, int64_t stride, int64_t inner_stride, T* residual,
                int64_t residual_stride, int64_t dim, const T* weights, int64_t weight_stride, const T* bias, float eps,
                T* out, int threads) {
  for_rows(outer * inner, dim, threads, [=](int64_t row) {
    const T* from = x + row / inner * stride + row % inner * inner_stride;
    const T* weight = weights ? weights + row % inner * weight_stride : nullptr;
    if (residual) {
      T* to = residual + row * residual_stride;
      for_lanes(dim, [&](int64_t i, int n) { store_up_to(to + i, load_up_to(from + i, n) + load_up_to(to + i, n), n); });
      from = to;
    }
    f32x16 total = {}, squares = {};
    for_lanes(dim, [&](int64_t i, int n) { total += load_up_to(from + i, n); });
    const f32x16 mean = splat(sum(total) / float(dim));
    for_lanes(dim, [&](int64_t i, int n) {
      f32x16 v = load_up_to(from + i, n) - mean;
      if (n < LANES) v = where(LANE < n, v, f32x16{});
      squares = fma(v, v, squares);
    });
    const float scale = 1.0f / std::sqrt(sum(squares) / float(dim) + eps);
    for_lanes(dim, [&](int64_t i, int n) {
      f32x16 v = (load_up_to(from + i, n) - mean) * scale;
      if (weight) v *= load_up_to(weight + i, n);
      if (bias) v += load_up_to(bias + i, n);
      store_up_to(out + row * dim + i, v, n);
    });
  });
}

// out = x + y, all contiguous.
template <class T>
void add(const T* x, const T* y, int64_t size, T* out, int threads) {
  constexpr int64_t PIECE = 4096;
  for_rows((size + PIECE - 1) / PIECE, PIECE, threads, [=](int64_t piece) {
    const int64_t start = piece * PIECE;
    for_lanes(std::min(PIECE, size - start), [&](int64_t i, int n) {
      store_up_to(out + start + i, load_up_to(x + start + i, n) + load_up_to(y + start + i, n), n);
    });
  });
}

// out = x * number * factors. by_row: elements between the factors of neighbouring rows. by_column: 1 for a factor per
// column, 0 for one per row.
template <class T, class F>
void multiply(const T* x, int64_t stride, int64_t rows, int64_t dim, float number, const F* factors, int64_t by_row,
              int64_t by_column, T* out, int threads) {
  for_rows(rows, dim, threads, [=](int64_t row) {
    const F* own = factors ? factors + row * by_row : nullptr;
    const f32x16 same = own && !by_column ? splat(number * load_part(own, 1)[0]) : splat(number);
    for_lanes(dim, [&](int64_t i, int n) {
      f32x16 v = load_up_to(x + row * stride + i, n) * same;
      if (by_column) v *= load_up_to(own + i, n);
      store_up_to(out + row * dim + i, v, n);
    });
  });
}

// out = x + (y - x) * weights. x, y: [rows, dim]; weights: [mixes, 1 or rows, dim]; out: [mixes, rows, dim]; all
// contiguous.
template <class T, class W>
void lerp(const T* x, const T* y, int64_t mixes, int64_t rows, int64_t dim, const W* weights, int64_t weight_rows,
          T* out, int threads) {
  for_rows(mixes * rows, dim, threads, [=](int64_t made) {
    const int64_t row = made % rows;
    const W* weight = weights + (made / rows * weight_rows + row % weight_rows) * dim;
    for_lanes(dim, [&](int64_t i, int n) {
      const f32x16 from = load_up_to(x + row * dim + i, n);
      const f32x16 change = (load_up_to(y + row * dim + i, n) - from) * load_up_to(weight + i, n);
      store_up_to(out + made * dim + i, from + change, n);
    });
  });
}

constexpr float LOG2_E = 1.44269504f;

// 1 / (1 + exp(-x)). The exponent is clamped against overflow, so results stay above 1e-38.
QUIRE_INLINE f32x16 sigmoid(f32x16 x) {
  f32x16 exponent = x * -LOG2_E;
  return 1.0f / (1.0f + exp2(where(exponent > 126.0f, splat(126.0f), exponent)));
}

// Gated activations: functions of a gate and an up value. T: the tensors' type.
struct Silu {
  template <class T>
  QUIRE_INLINE f32x16 operator()(f32x16 gate, f32x16 up, T type) const {
    return rounded_to(gate * sigmoid(gate), type) * up;
  }
};

struct Gelu {
  template <class T>
  QUIRE_INLINE f32x16 operator()(f32x16 gate, f32x16 up, T type) const {
    return rounded_to(gate * normal_distribution(gate), type) * up;
  }
};

struct GeluTanh {  // (1 + tanh(y)) / 2 is the sigmoid of 2 y
  template <class T>
  QUIRE_INLINE f32x16 operator()(f32x16 gate, f32x16 up, T type) const {
    return rounded_to(gate * sigmoid(1.5957691216f * (gate + 0.044715f * gate * gate * gate)), type) * up;
  }
};

struct Sigmoid {
  template <class T>
  QUIRE_INLINE f32x16 operator()(f32x16 gate, f32x16 up, T) const {
    return sigmoid(gate) * up;
  }
};

struct Relu {
  template <class T>
  QUIRE_INLINE f32x16 operator()(f32x16 gate, f32x16 up, T) const {
    return where(gate > 0.0f, gate, f32x16{}) * up;
  }
};

struct Tanh {
  template <class T>
  QUIRE_INLINE f32x16 operator()(f32x16 gate, f32x16 up, T) const {
    return tanh(gate) * up;
  }
};

struct ReluSquared {
  template <class T>
  QUIRE_INLINE f32x16 operator()(f32x16 gate, f32x16 up, T type) const {
    const f32x16 positive = where(gate > 0.0f, gate, f32x16{});
    return rounded_to(positive * positive, type) * up;
  }
};

struct Clip {
  float most;
  template <class T>
  QUIRE_INLINE f32x16 operator()(f32x16 x, f32x16, T) const {
    return where(x > most, splat(most), where(x < -most, splat(-most), x));
  }
};

// xIELU, see the reference (ops/reference/elementwise.py).
struct Xielu {
  float positive, negative;
  template <class T>
  QUIRE_INLINE f32x16 operator()(f32x16 x, f32x16, T) const {
    const f32x16 low = where(x > -1e-6f, splat(-1e-6f), x);
    // e^x - 1 - x, from its series near 0, where the subtraction would lose digits.
    f32x16 series = splat(1.0f / 40320);
    for (float factor : {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f}) series = fma(series, low, factor);
    const f32x16 near = series * low * low, far = exp2(low * LOG2_E) - 1.0f;
    const f32x16 below = (where(low < -0.5f, far, near + low) - x) * negative;
    return where(x > 0.0f, positive * x * x, below) + 0.5f * x;
  }
};

struct SwigluOai {
  float alpha, limit;
  template <class T>
  QUIRE_INLINE f32x16 operator()(f32x16 gate, f32x16 up, T) const {
    gate = where(gate > limit, splat(limit), gate);
    up = where(up > limit, splat(limit), where(up < -limit, splat(-limit), up));
    return (up + 1.0f) * gate * sigmoid(alpha * gate);
  }
};

// silu(gate) * up: gates up to the limit, before or after silu, and up values within it.
struct LimitedSwiglu {
  float limit;
  bool after;
  template <class T>
  QUIRE_INLINE f32x16 operator()(f32x16 gate, f32x16 up, T) const {
    const f32x16 most = splat(limit);
    up = where(up > limit, most, where(up < -limit, -most, up));
    if (!after) gate = where(gate > limit, most, gate);
    gate = gate * sigmoid(gate);
    return where(gate > limit, most, gate) * up;
  }
};

// x: [rows, 2 * half], gates then up values; out: [rows, half].
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

// x: [rows, dim] -> out: [rows, dim]: the activation with x as the gate and 1 as the up value.
template <class T, class F>
void activate(const T* x, int64_t stride, int64_t rows, int64_t dim, T* out, int threads, F activation) {
  for_rows(rows, dim, threads, [=](int64_t row) {
    for_lanes(dim, [&](int64_t i, int n) {
      const f32x16 made = activation(load_up_to(x + row * stride + i, n), splat(1.0f), T{});
      store_up_to(out + row * dim + i, made, n);
    });
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

}  // namespace

extern "C" {

// wide_weight: whether the weight is float32, whatever the type of x.
void quire_rms_norm(int dtype, int wide_weight, const void* x, int64_t outer, int64_t inner, int64_t outer_stride,
                    int64_t inner_stride, int64_t dim, const void* weight, float eps, void* out, int threads) {
  with_types(dtype, wide_weight, [&](auto t, auto w) {
    using T = decltype(t);
    using W = decltype(w);
    rms_norm((const T*)x, outer, inner, outer_stride, inner_stride, dim, (const W*)weight, eps, (T*)out, threads);
  });
}

void quire_add_rms_norm(int dtype, int wide_weight, void* x, int64_t x_stride, void* residual,
                        int64_t residual_stride, int64_t rows, int64_t dim, const void* weight, float eps,
                        int threads) {
  with_types(dtype, wide_weight, [&](auto t, auto w) {
    using T = decltype(t);
    using W = decltype(w);
    add_rms_norm((T*)x, x_stride, (T*)residual, residual_stride, rows, dim, (const W*)weight, eps, threads);
  });
}

void quire_layer_norm(int dtype, const void* x, int64_t outer, int64_t inner, int64_t stride, int64_t inner_stride,
                      void* residual, int64_t residual_stride, int64_t dim, const void* weight, int64_t weight_stride,
                      const void* bias, float eps, void* out, int threads) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    layer_norm((const T*)x, outer, inner, stride, inner_stride, (T*)residual, residual_stride, dim, (const T*)weight,
               weight_stride, (const T*)bias, eps, (T*)out, threads);
  });
}

// Clamps each element to [-most, most]. x: [rows, dim].
void quire_clip(int dtype, const void* x, int64_t stride, int64_t rows, int64_t dim, float most, void* out,
                int threads) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    activate((const T*)x, stride, rows, dim, (T*)out, threads, Clip{most});
  });
}

void quire_xielu(int dtype, const void* x, int64_t stride, int64_t rows, int64_t dim, const float* positive,
                 const float* negative, void* out, int threads) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    activate((const T*)x, stride, rows, dim, (T*)out, threads, Xielu{*positive, *negative});
  });
}

void quire_add(int dtype, const void* x, const void* y, int64_t size, void* out, int threads) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    add((const T*)x, (const T*)y, size, (T*)out, threads);
  });
}

// factors: null for none.
void quire_multiply(int dtype, int wide_factors, const void* x, int64_t stride, int64_t rows, int64_t dim,
                    float number, const void* factors, int64_t by_row, int64_t by_column, void* out, int threads) {
  with_types(dtype, wide_factors, [&](auto t, auto f) {
    using T = decltype(t);
    using F = decltype(f);
    multiply((const T*)x, stride, rows, dim, number, (const F*)factors, by_row, by_column, (T*)out, threads);
  });
}

void quire_lerp(int dtype, int wide_weights, const void* x, const void* y, int64_t mixes, int64_t rows, int64_t dim,
                const void* weights, int64_t weight_rows, void* out, int threads) {
  with_types(dtype, wide_weights, [&](auto t, auto w) {
    using T = decltype(t);
    using W = decltype(w);
    lerp((const T*)x, (const T*)y, mixes, rows, dim, (const W*)weights, weight_rows, (T*)out, threads);
  });
}

void quire_row_sums(int dtype, const void* x, int64_t stride, int64_t rows, int64_t dim, float* out, int threads) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    for_rows(rows, dim, threads, [=](int64_t row) {
      f32x16 totals[4] = {};  // four partial sums, for smaller rounding errors
      for_lanes(dim, [&](int64_t i, int n) { totals[i / LANES % 4] += load_up_to((const T*)x + row * stride + i, n); });
      out[row] = sum((totals[0] + totals[1]) + (totals[2] + totals[3]));
    });
  });
}

// activation: numbered as in elementwise.py; alpha is SwigluOai's, limit also LimitedSwiglu's.
void quire_gate(int dtype, int activation, float alpha, float limit, const void* x, int64_t stride, int64_t rows,
                int64_t half, void* out, int threads) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    auto run = [&](auto f) { gate((const T*)x, stride, rows, half, (T*)out, threads, f); };
    switch (activation) {
      case 0: return run(Silu{});
      case 1: return run(Gelu{});
      case 2: return run(GeluTanh{});
      case 3: return run(SwigluOai{alpha, limit});
      case 4: return run(Relu{});
      case 5: return run(ReluSquared{});
      case 6: return run(LimitedSwiglu{limit, false});
      case 7: return run(LimitedSwiglu{limit, true});
    }
  });
}

// activation: numbered as in elementwise.py.
void quire_activate(int dtype, int activation, const void* x, int64_t stride, int64_t rows, int64_t dim, void* out,
                    int threads) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    auto run = [&](auto f) { activate((const T*)x, stride, rows, dim, (T*)out, threads, f); };
    switch (activation) {
      case 0: return run(Silu{});
      case 1: return run(GeluTanh{});
      case 2: return run(Sigmoid{});
      case 3: return run(Gelu{});
      case 4: return run(Relu{});
      case 5: return run(ReluSquared{});
      case 6: return run(Tanh{});
    }
  });
}

void quire_rotary(int dtype, void* q, int64_t q_stride, int64_t q_head_stride, int64_t heads, void* k,
                  int64_t k_stride, int64_t k_head_stride, int64_t kv_heads, const float* cos, const float* sin,
                  int64_t half, int64_t tokens, int interleaved, int threads) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    rotary((T*)q, q_stride, q_head_stride, heads, (T*)k, k_stride, k_head_stride, kv_heads, cos, sin, half, tokens,
           interleaved, threads);
  });
}
}

RECORDABLE(quire_rms_norm)
RECORDABLE(quire_add_rms_norm)
RECORDABLE(quire_add)
RECORDABLE(quire_multiply)
RECORDABLE(quire_lerp)
RECORDABLE(quire_row_sums)
RECORDABLE(quire_layer_norm)
RECORDABLE(quire_clip)
RECORDABLE(quire_xielu)
RECORDABLE(quire_gate)
RECORDABLE(quire_activate)
RECORDABLE(quire_rotary)
