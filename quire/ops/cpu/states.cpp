// Recurrent layers: a causal convolution, and a scan over a decaying state (defined in ops/reference/states.py).
//
// A sequence's tokens are processed one by one, so a token's result does not depend on how the sequence is divided into
// steps. Heads and columns of the state are independent, and are divided among threads: a task processes TILE columns
// of one head of one request for all tokens of the step, with the state in the L1 cache.
#include "replay.h"
#include "team.h"
#include "vector.h"

#include <algorithm>
#include <cmath>
#include <vector>

using namespace quire;

namespace {

constexpr int TILE = 64;  // columns per task: with 128 rows, 32 KB of state
constexpr float LOG2_E = 1.4426950408889634f;

struct Step {  // the _Step of ops/reference/states.py
  const int32_t *starts, *lengths, *table;
  int64_t table_stride;
  int32_t requests, block_size, drafts, threads;
};

// One request's part of a step, see Span in ops/reference/states.py.
struct Span {
  int64_t first, count, start, end, certain;  // first: index in the flat batch; start, end, certain: positions
  const int32_t* table;
  int32_t block_size;

  Span(const Step& step, int64_t r)
      : first(step.starts[r]), count(step.starts[r + 1] - step.starts[r]), start(step.lengths[r] - count),
        end(step.lengths[r]), certain(std::max(start + 1, end - step.drafts)), table(step.table + r * step.table_stride),
        block_size(step.block_size) {}

  int64_t source() const { return start ? table[(start - 1) / block_size] : 0; }

  // Calls f(block, number of tokens in its state) for each block in which the step stores a page.
  template <class F>
  void pages(F f) const {
    for (int64_t index = start / block_size; index * block_size < end; index++)
      if (const int32_t block = table[index]) f(int64_t(block), std::min((index + 1) * block_size, certain));
  }
};

f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp2(where(x < -80.0f, splat(-80.0f), x) * -LOG2_E)); }

// inputs: the pages' inputs, [blocks, rows, channels].
template <class T>
void causal_conv(const Step& step, const T* x, int64_t stride, int64_t channels, const float* weight, int64_t width,
                 const float* bias, float* inputs, int64_t page, bool silu, T* out) {
  const int64_t tail = width - 1, rows = tail + step.drafts, pieces = (channels + TILE - 1) / TILE;
  for_each(step.requests * pieces, step.threads, [&](int64_t task) {
    const Span span(step, task / pieces);
    if (!span.count) return;
    const int64_t from = task % pieces * TILE, to = std::min(channels, from + TILE);
    // The page's inputs at positions start - tail, ..., start - 1, copied before the page is overwritten.
    thread_local std::vector<float> before;
    before.assign(tail * TILE, 0.0f);
    const float* source = inputs + span.source() * page;
    for (int64_t back = 1; back <= std::min(tail, span.start); back++)
      memcpy(&before[(tail - back) * TILE], source + (span.start - back) % rows * channels + from,
             (to - from) * sizeof(float));
    auto input = [&](int64_t position, int64_t channel, int n) {
      const int64_t index = position - span.start;
      if (index < 0) return load_up_to(&before[(index + tail) * TILE] + channel - from, n);
      return load_up_to(x + (span.first + index) * stride + channel, n);
    };
    for_lanes(to - from, [&](int64_t lane, int n) {
      const int64_t channel = from + lane;
      f32x16 taps[16];
      for (int64_t k = 0; k < width; k++) taps[k] = load_up_to(weight + k * channels + channel, n);
      const f32x16 add = bias ? load_up_to(bias + channel, n) : f32x16{};
      for (int64_t position = span.start; position < span.end; position++) {
        f32x16 total = {};
        for (int64_t k = 0; k < width; k++) total = fma(input(position - tail + k, channel, n), taps[k], total);
        total += add;
        if (silu) total *= sigmoid(total);
        store_up_to(out + (span.first + position - span.start) * channels + channel, total, n);
      }
      span.pages([&](int64_t block, int64_t number) {
        const int64_t last = std::min(number + step.drafts, span.end);
        for (int64_t position = std::max<int64_t>(0, number - tail); position < last; position++)
          store_up_to(inputs + block * page + position % rows * channels + channel, input(position, channel, n), n);
      });
    });
  });
}

// log(1 + exp(x)), accurate also for small exp(x).
f32x16 softplus(f32x16 x) {
  const f32x16 e = exp2(where(x < 0.0f, x, -x) * LOG2_E), u = 1.0f + e;
  const f32x16 near = where(u == 1.0f, e, log(u) * e / (u - 1.0f));
  return where(x > 0.0f, x, f32x16{}) + near;
}

template <class T>
void time_steps(const T* x, int64_t stride, int64_t rows, int64_t n, const float* bias, const float* rate, float least,
                float most, float* steps, float* decay, int threads) {
  for_each(rows, rows * n >= 4096 ? threads : 1, [&](int64_t row) {
    for_lanes(n, [&](int64_t i, int lanes) {
      f32x16 s = softplus(load_up_to(x + row * stride + i, lanes) + load_up_to(bias + i, lanes));
      s = where(s < least, splat(least), s);
      s = where(s > most, splat(most), s);
      store_up_to(steps + row * n + i, s, lanes);
      const f32x16 speed = exp2(load_up_to(rate + i, lanes) * LOG2_E);
      store_up_to(decay + row * n + i, exp2(speed * s * -LOG2_E), lanes);
    });
  });
}

template <class T>
void bounded_decays(const T* x, int64_t stride, int64_t rows, int64_t n, const float* bias, const float* rate,
                    float bound, float* decay, int threads) {
  for_each(rows, rows * n >= 4096 ? threads : 1, [&](int64_t row) {
    for_lanes(n, [&](int64_t i, int lanes) {
      const f32x16 given = load_up_to(x + row * stride + i, lanes) + load_up_to(bias + i, lanes);
      const f32x16 speed = exp2(load_up_to(rate + i, lanes) * LOG2_E);
      store_up_to(decay + row * n + i, exp2(sigmoid(speed * given) * (bound * LOG2_E)), lanes);
    });
  });
}

// How a state is updated: by one of the scan's RULES, or by the selective scan, in which each element has its own decay
// rate and each column its own scale, the time step.
enum Rule { PLAIN, DELTA, REMOVAL, SELECTIVE };

struct Sizes {
  int64_t heads, key_heads, key_dim, value_dim, decays, scales;
  int64_t token() const { return key_heads * key_dim + heads * (value_dim + decays + scales); }
};

// Advances N vectors of columns of a head's state by one token. state: rows are TILE apart. decay: in a selective scan,
// the rates, whose rows are TILE apart, too. scale: with removal, [2, key_dim], the key to read with and the key to
// remove with. q, out: null for a token without output.
template <Rule RULE, int N>
void advance(float* state, int64_t key_dim, const float* k, const float* v, const float* decay, int64_t decay_stride,
             const float* scale, const float* q, float* out) {
  f32x16 change[N], by[N], known[N] = {}, found[N] = {};
#pragma GCC unroll 4
  for (int j = 0; j < N; j++) change[j] = load(v + j * LANES);
  if (RULE == DELTA) {
    for (int64_t i = 0; i < key_dim; i++) {
      const f32x16 factor = splat(decay[i * decay_stride]), key = splat(k[i]);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) {
        const f32x16 kept = load(state + i * TILE + j * LANES) * factor;
        store(state + i * TILE + j * LANES, kept);
        known[j] = fma(kept, key, known[j]);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) change[j] -= known[j];
  }
  for (int64_t i = 0; RULE == REMOVAL && i < key_dim; i++) {
    const f32x16 key = splat(scale[i]);
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) known[j] = fma(load(state + i * TILE + j * LANES), key, known[j]);
  }
#pragma GCC unroll 4
  for (int j = 0; RULE != REMOVAL && j < N; j++) {
    by[j] = RULE == SELECTIVE ? load(scale + j * LANES) : splat(*scale);
    change[j] *= by[j];
    by[j] *= -LOG2_E;
  }
  for (int64_t i = 0; i < key_dim; i++) {
    const f32x16 factor = splat(decay[i * decay_stride]), key = splat(k[i]), query = splat(q ? q[i] : 0.0f);
    const f32x16 removed = splat(RULE == REMOVAL ? -scale[key_dim + i] : 0.0f);
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) {
      f32x16 s = load(state + i * TILE + j * LANES);
      if (RULE == PLAIN || RULE == REMOVAL) s *= factor;
      if (RULE == REMOVAL) s = fma(known[j], removed, s);
      if (RULE == SELECTIVE) s *= exp2(load(decay + i * TILE + j * LANES) * by[j]);
      s = fma(change[j], key, s);
      store(state + i * TILE + j * LANES, s);
      found[j] = fma(s, query, found[j]);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; out && j < N; j++) store(out + j * LANES, found[j]);
}

// decay: in a selective scan, the rates [key_dim, value_dim].
template <class T, class S, Rule RULE>
void scan(const Step& step, const Sizes& z, const T* q, int64_t q_stride, int64_t q_head, const T* k, int64_t k_stride,
          int64_t k_head, const T* v, int64_t v_stride, const float* decay, const S* scale, int64_t scale_stride,
          const float* skip, float* pages, int64_t page, float* behind, int32_t* number, T* out) {
  const int64_t tiles = (z.value_dim + TILE - 1) / TILE, token = z.token(), ratio = z.heads / z.key_heads;
  const int64_t at_v = z.key_heads * z.key_dim, at_decay = at_v + z.heads * z.value_dim;
  const int64_t at_scale = at_decay + z.heads * z.decays;
  for_each(step.requests * z.heads * tiles, step.threads, [&](int64_t task) {
    const Span span(step, task / (z.heads * tiles));
    if (!span.count) return;
    const int64_t head = task / tiles % z.heads, from = task % tiles * TILE;
    const int64_t columns = std::min<int64_t>(TILE, z.value_dim - from);
    const int64_t in_page = head * z.key_dim * z.value_dim + from;
    thread_local std::vector<float> memory;
    const int64_t rate_rows = RULE == SELECTIVE ? z.key_dim : 0;
    memory.assign((z.key_dim + rate_rows + 3) * TILE + 4 * (z.key_dim + LANES), 0.0f);
    float *state = memory.data(), *value = state + z.key_dim * TILE, *found = value + TILE, *factor = found + TILE;
    float *rates = factor + TILE + 2 * (z.key_dim + LANES), *key = rates + rate_rows * TILE;
    float* query = key + z.key_dim + LANES;
    // The task's scales: its head's, or its columns'.
    const int64_t scale_at = head * z.scales + (RULE == SELECTIVE ? from : 0);
    const int64_t scales = RULE == SELECTIVE ? columns : z.scales;
    for (int64_t i = 0; i < rate_rows; i++)
      memcpy(rates + i * TILE, decay + i * z.value_dim + from, columns * sizeof(float));
    int64_t at = span.start;
    auto take = [&](const float* k, const float* decay, const float* q, float* result) {
      in_pieces<TILE / LANES>(int((columns + LANES - 1) / LANES), [&](auto vectors, int first) {
        const int64_t c = first * LANES;
        const bool by_column = RULE == SELECTIVE;
        advance<RULE, vectors.value>(state + c, z.key_dim, k, value + c, by_column ? rates + c : decay, z.decays > 1,
                                     by_column ? factor + c : factor, q, result ? result + c : nullptr);
      });
    };
    auto store_pages = [&] {  // of the state after `at` tokens
      span.pages([&](int64_t block, int64_t reached) {
        if (reached != at) return;
        for (int64_t i = 0; i < z.key_dim; i++)
          memcpy(pages + block * page + in_page + i * z.value_dim, state + i * TILE, columns * sizeof(float));
      });
    };
    if (span.start) {
      const int64_t source = span.source();
      for (int64_t i = 0; i < z.key_dim; i++)
        memcpy(state + i * TILE, pages + source * page + in_page + i * z.value_dim, columns * sizeof(float));
      for (at = number[source * page]; at < span.start; at++) {  // tokens of earlier steps that were not certain then
        const float* row = behind + source * page + at % step.drafts * token;
        memcpy(value, row + at_v + head * z.value_dim + from, columns * sizeof(float));
        memcpy(factor, row + at_scale + scale_at, scales * sizeof(float));
        take(row + head / ratio * z.key_dim, row + at_decay + head * z.decays, nullptr, nullptr);
      }
    }
    for (; at < span.end;) {
      const int64_t index = span.first + at - span.start;
      for_lanes(z.key_dim, [&](int64_t i, int n) {
        store(key + i, load_up_to(k + index * k_stride + head / ratio * k_head + i, n));
        store(query + i, load_up_to(q + index * q_stride + head / ratio * q_head + i, n));
      });
      const T* given = v + index * v_stride + head * z.value_dim + from;
      for_lanes(columns, [&](int64_t c, int n) { store(value + c, load_up_to(given + c, n)); });  // padded with zeros
      for_lanes(scales, [&](int64_t c, int n) {
        store(factor + c, load_up_to(scale + index * scale_stride + scale_at + c, n));
      });
      take(key, decay + (index * z.heads + head) * z.decays, query, found);
      for_lanes(columns, [&](int64_t c, int n) {
        f32x16 result = load(found + c);
        if (RULE == SELECTIVE) result = fma(load(value + c), load_up_to(skip + from + c, n), result);
        else if (skip) result = fma(load(value + c), splat(skip[head]), result);
        store_up_to(out + (index * z.heads + head) * z.value_dim + from + c, result, n);
      });
      at++;
      store_pages();
    }
  });
  // Stores the tokens that follow each page's state. This comes last, since other tasks read the previous ones.
  for (int64_t r = 0; r < step.requests; r++) {
    const Span span(step, r);
    if (!span.count) continue;
    span.pages([&](int64_t block, int64_t reached) {
      number[block * page] = int32_t(reached);
      for (int64_t position = reached; position < std::min(reached + step.drafts, span.end); position++) {
        const int64_t index = span.first + position - span.start;
        float* row = behind + block * page + position % step.drafts * token;
        for (int64_t g = 0; g < z.key_heads; g++)
          for_lanes(z.key_dim, [&](int64_t i, int n) {
            store_up_to(row + g * z.key_dim + i, load_up_to(k + index * k_stride + g * k_head + i, n), n);
          });
        for_lanes(z.heads * z.value_dim, [&](int64_t i, int n) {
          store_up_to(row + at_v + i, load_up_to(v + index * v_stride + i, n), n);
        });
        memcpy(row + at_decay, decay + index * z.heads * z.decays, z.heads * z.decays * sizeof(float));
        for_lanes(z.heads * z.scales, [&](int64_t i, int n) {
          store_up_to(row + at_scale + i, load_up_to(scale + index * scale_stride + i, n), n);
        });
      }
    });
  }
}

template <class T>
void gated_norm(const T* x, int64_t x_stride, const T* gate, int64_t gate_stride, int64_t rows, int64_t n,
                const T* weight, float eps, int64_t size, bool gate_first, bool silu, T* out, int threads) {
  const int64_t groups = n / size;
  for_each(rows * groups, rows * n >= 16384 ? threads : 1, [&](int64_t task) {
    const int64_t row = task / groups, at = task % groups * size;
    const T *from = x + row * x_stride + at, *by = gate + row * gate_stride + at;
    auto factor = [&](int64_t i, int lanes) {
      const f32x16 g = load_up_to(by + i, lanes);
      return silu ? sigmoid(g) * g : sigmoid(g);
    };
    f32x16 squares = {};
    if (weight)
      for_lanes(size, [&](int64_t i, int lanes) {
        f32x16 y = load_up_to(from + i, lanes);
        if (gate_first) y *= factor(i, lanes);
        squares = fma(y, y, squares);
      });
    const float scale = weight ? 1.0f / std::sqrt(sum(squares) / float(size) + eps) : 1.0f;
    for_lanes(size, [&](int64_t i, int lanes) {
      f32x16 y = load_up_to(from + i, lanes);
      if (gate_first) y *= factor(i, lanes);
      if (weight) y = rounded_to(y * scale, T{}) * load_up_to(weight + at + i, lanes);
      if (!gate_first) y = (weight ? rounded_to(y, T{}) : y) * factor(i, lanes);
      store_up_to(out + row * n + at + i, y, lanes);
    });
  });
}

// For RWKV-7, see the references. A task is one head of one token; all tensors are contiguous.
template <class T>
void removal_keys(int64_t tokens, int64_t heads, int64_t dim, const T* r, const T* k, const T* read, const T* decay,
                  const T* rate, const float* rate_scale, const float* bonus, T* keys, float* decays, float* scale,
                  float* products, int threads) {
  const float most = -std::exp(-0.5f) * LOG2_E;
  for_each(tokens * heads, tokens * heads * dim >= 4096 ? threads : 1, [=](int64_t task) {
    for_lanes(dim, [&](int64_t i, int n) {
      const int64_t at = task * dim + i, column = task % heads * dim + i, removal = 2 * task * dim + i;
      const f32x16 by = sigmoid(load_up_to(rate + at, n)), found = load_up_to(read + at, n);
      const f32x16 kept = 1.0f + (by - 1.0f) * load_up_to(rate_scale + column, n);
      const f32x16 key = rounded_to(load_up_to(k + at, n) * kept, T{});
      store_up_to(keys + at, key, n);
      store_up_to(decays + at, exp2(sigmoid(load_up_to(decay + at, n)) * most), n);
      store_up_to(scale + removal, found, n);
      store_up_to(scale + removal + dim, found * by, n);
      store_up_to(products + at, load_up_to(r + at, n) * key * load_up_to(bonus + column, n), n);
    });
  });
}

template <class T>
void add_bonus(int64_t rows, int64_t heads, int64_t dim, const T* y, const float* weight, const float* bias,
               const float* bonus, const T* v, const T* gate, T* out, int threads) {
  for_each(rows, rows * dim >= 16384 ? threads : 1, [=](int64_t row) {
    for_lanes(dim, [&](int64_t i, int n) {
      const int64_t at = row * dim + i, column = row % heads * dim + i;
      const f32x16 normed = load_up_to(y + at, n) * load_up_to(weight + column, n) + load_up_to(bias + column, n);
      store_up_to(out + at, (normed + load_up_to(v + at, n) * bonus[row]) * load_up_to(gate + at, n), n);
    });
  });
}

}  // namespace

extern "C" void quire_causal_conv(const Step* step, int silu, int dtype, const void* x, int64_t stride,
                                  int64_t channels, const float* weight, int64_t width, const float* bias,
                                  float* inputs, int64_t page, void* out) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    causal_conv(*step, static_cast<const T*>(x), stride, channels, weight, width, bias, inputs, page, silu,
                static_cast<T*>(out));
  });
}

extern "C" void quire_time_steps(int dtype, const void* x, int64_t stride, int64_t rows, int64_t n, const float* bias,
                                 const float* rate, float least, float most, float* steps, float* decay, int threads) {
  with_type(dtype, [&](auto type) {
    time_steps(static_cast<const decltype(type)*>(x), stride, rows, n, bias, rate, least, most, steps, decay, threads);
  });
}

extern "C" void quire_bounded_decays(int dtype, const void* x, int64_t stride, int64_t rows, int64_t n,
                                     const float* bias, const float* rate, float bound, float* decay, int threads) {
  with_type(dtype, [&](auto type) {
    bounded_decays(static_cast<const decltype(type)*>(x), stride, rows, n, bias, rate, bound, decay, threads);
  });
}

extern "C" void quire_scan(const Step* step, int dtype, int wide_scale, int rule, int64_t heads, int64_t key_heads,
                           int64_t key_dim, int64_t value_dim, int64_t decays, const void* q, int64_t q_stride,
                           int64_t q_head, const void* k, int64_t k_stride, int64_t k_head, const void* v,
                           int64_t v_stride, const float* decay, const void* scale, int64_t scale_stride,
                           const float* skip, float* pages, int64_t page, float* behind, int32_t* number, void* out) {
  const Sizes sizes{heads, key_heads, key_dim, value_dim, decays, rule == REMOVAL ? 2 * key_dim : 1};
  with_types(dtype, wide_scale, [&](auto type, auto of_scale) {
    using T = decltype(type);
    using S = decltype(of_scale);
    auto run = [&](auto fixed) {
      scan<T, S, fixed.value>(*step, sizes, static_cast<const T*>(q), q_stride, q_head, static_cast<const T*>(k),
                             k_stride, k_head, static_cast<const T*>(v), v_stride, decay,
                             static_cast<const S*>(scale), scale_stride, skip, pages, page, behind, number,
                             static_cast<T*>(out));
    };
    if (rule == DELTA) run(std::integral_constant<Rule, DELTA>{});
    else if (rule == REMOVAL) run(std::integral_constant<Rule, REMOVAL>{});
    else run(std::integral_constant<Rule, PLAIN>{});
  });
}

extern "C" void quire_selective_scan(const Step* step, int dtype, int64_t key_dim, int64_t channels, const void* q,
                                     int64_t q_stride, const void* k, int64_t k_stride, const void* v,
                                     int64_t v_stride, const float* steps, const float* rate, const float* skip,
                                     float* pages, int64_t page, float* behind, int32_t* number, void* out) {
  const Sizes sizes{1, 1, key_dim, channels, 0, channels};
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    scan<T, float, SELECTIVE>(*step, sizes, static_cast<const T*>(q), q_stride, 0, static_cast<const T*>(k), k_stride,
                              0, static_cast<const T*>(v), v_stride, rate, steps, channels, skip, pages, page, behind,
                              number, static_cast<T*>(out));
  });
}

extern "C" void quire_gated_norm(int dtype, const void* x, int64_t x_stride, const void* gate, int64_t gate_stride,
                                 int64_t rows, int64_t n, const void* weight, float eps, int64_t size, int gate_first,
                                 int silu, void* out, int threads) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    gated_norm(static_cast<const T*>(x), x_stride, static_cast<const T*>(gate), gate_stride, rows, n,
               static_cast<const T*>(weight), eps, size, gate_first, silu, static_cast<T*>(out), threads);
  });
}

extern "C" void quire_removal_keys(int dtype, int64_t tokens, int64_t heads, int64_t dim, const void* r,
                                   const void* k, const void* read, const void* decay, const void* rate,
                                   const float* rate_scale, const float* bonus, void* keys, float* decays,
                                   float* scale, float* products, int threads) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    removal_keys(tokens, heads, dim, static_cast<const T*>(r), static_cast<const T*>(k), static_cast<const T*>(read),
                 static_cast<const T*>(decay), static_cast<const T*>(rate), rate_scale, bonus, static_cast<T*>(keys),
                 decays, scale, products, threads);
  });
}

extern "C" void quire_add_bonus(int dtype, int64_t rows, int64_t heads, int64_t dim, const void* y,
                                const float* weight, const float* bias, const float* bonus, const void* v,
                                const void* gate, void* out, int threads) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    add_bonus(rows, heads, dim, static_cast<const T*>(y), weight, bias, bonus, static_cast<const T*>(v),
              static_cast<const T*>(gate), static_cast<T*>(out), threads);
  });
}

RECORDABLE(quire_causal_conv)
RECORDABLE(quire_time_steps)
RECORDABLE(quire_bounded_decays)
RECORDABLE(quire_scan)
RECORDABLE(quire_selective_scan)
RECORDABLE(quire_gated_norm)
RECORDABLE(quire_removal_keys)
RECORDABLE(quire_add_bonus)
