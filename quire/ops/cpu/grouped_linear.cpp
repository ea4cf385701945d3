// Products of groups of rows, each group with its own unpacked weight: experts or attention heads. A group usually has
// few rows, so reading the weights takes nearly all the time. They are read once, in memory order, and multiplied with
// as many rows at a time as there are registers for sums. Groups of many rows are divided into blocks that stay in the
// cache.
//
// A sum has 16 lanes, each for every 16th input (bfloat16: every 16th pair). The lanes are added at the end, always in
// the same order: a row's result does not depend on the other rows.
#include <algorithm>
#include <vector>

#include "replay.h"
#include "sums.h"
#include "team.h"
#include "vector.h"

using namespace quire;

namespace {

constexpr int TILE_OUTPUTS = 32;
constexpr int64_t BLOCK_BYTES = 1 << 18;  // of the rows in a block
constexpr int64_t PARALLEL_BYTES = 1 << 16;  // with less work, one thread finishes before a second one wakes up

template <class T>
struct GroupedLinear {
  const T* x;  // [rows, in]
  int64_t x_stride;
  const T* weight;  // [experts, out, in]
  int64_t expert_stride, output_stride;
  const T* bias;  // [experts, out] or null
  const int64_t* offsets;  // null: every group has the same rows of x, but its own columns
  int64_t rows, x_group;   // without offsets: the number of rows, and the distance between the columns of groups
  int64_t in, out;
  T* result;  // [rows, out], or without offsets [rows, groups, out]
  int64_t result_stride;

  // Computes R rows by C outputs. fetch: whether to prefetch the weights of the next C outputs, which the hardware
  // prefetcher misses (up to twice as fast with one row per expert).
  template <int R, int C>
  void piece(int64_t expert, int64_t row, int64_t output, bool fetch) const {
    constexpr int STEP = LANES * PAIR<Factor<T>>;
    const T *from = x + expert * x_group + row * x_stride, *w = weight + expert * expert_stride + output * output_stride;
    f32x16 sums[R][C] = {};
    int64_t i = 0;
    for (; i + STEP <= in; i += STEP) {
      u32x16 lines[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) lines[c] = load_factors(w + c * output_stride + i);
      if (fetch)
        for (int c = 0; c < C; c++) __builtin_prefetch(w + (C + c) * output_stride + i, 0, 2);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        u32x16 line = load_factors(from + r * x_stride + i);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sums[r][c] = dot<Factor<T>>(sums[r][c], lines[c], line);
      }
    }
    for_lanes(in - i, [&](int64_t at, int n) {
      for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
          sums[r][c] = fma(load_up_to(from + r * x_stride + i + at, n),
                           load_up_to(w + c * output_stride + i + at, n), sums[r][c]);
    });
    T* to = result + (offsets ? 0 : expert * out) + output;
    const f32x16 added = bias ? load_part(bias + expert * out + output, C) : f32x16{};
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) store_part(to + (row + r) * result_stride, sums_of<C>(sums[r]) + added, C);
  }

  int64_t rows_of(int64_t expert) const { return offsets ? offsets[expert + 1] - offsets[expert] : rows; }

  void tile(int64_t expert, int64_t first) const {
    const int64_t start = offsets ? offsets[expert] : 0, rows = rows_of(expert);
    const int outputs = int(std::min<int64_t>(TILE_OUTPUTS, out - first));
    const int64_t block = std::max<int64_t>(BLOCK_BYTES / (in * int64_t(sizeof(T))) / MAX_ROWS, 1) * MAX_ROWS;
    for (int64_t from = 0; from < rows; from += block)
      in_pieces<MAX_COLUMNS>(outputs, [&](auto c, int output) {
        in_pieces<MAX_ROWS>(int(std::min(block, rows - from)), [&](auto r, int row) {
          piece<r.value, c.value>(expert, start + from + row, first + output, from + row == 0);
        });
      });
  }

  void run(int64_t experts, int threads) const {
    struct Item { int64_t expert, first; };
    thread_local std::vector<Item> kept;
    kept.clear();
    for (int64_t e = 0; e < experts; e++)
      if (rows_of(e))
        for (int64_t first = 0; first < out; first += TILE_OUTPUTS) kept.push_back({e, first});
    const Item* items = kept.data();
    const int64_t count = kept.size();
    const bool pays = threads > 1 && count * TILE_OUTPUTS * in * int64_t(sizeof(T)) >= PARALLEL_BYTES;
    for_each(count, pays ? threads : 1, [&](int64_t i) { tile(items[i].expert, items[i].first); });
  }
};

// out: [tokens * top_k, dim], where row i is for the (token, choice) order[i] -> result: [tokens, dim], weighted sums
// in the order of choices. weights: [tokens, top_k], first rounded to T; null for all 1.
template <class T>
void combine(const T* out, const int64_t* order, const float* weights, int64_t tokens, int64_t top_k, int64_t dim,
             T* result, int threads) {
  thread_local std::vector<int64_t> kept;
  kept.resize(tokens * top_k);
  int64_t* rows = kept.data();
  for (int64_t i = 0; i < tokens * top_k; i++) rows[order[i]] = i;
  for_each(tokens, tokens * top_k * dim >= 32768 ? threads : 1, [=](int64_t token) {
    for_lanes(dim, [&](int64_t i, int n) {
      f32x16 sum = {};
      for (int64_t j = token * top_k; j < (token + 1) * top_k; j++)
        sum = fma(rounded_to(splat(weights ? weights[j] : 1.0f), T{}), load_up_to(out + rows[j] * dim + i, n), sum);
      store_up_to(result + token * dim + i, sum, n);
    });
  });
}

}  // namespace

extern "C" void quire_combine_experts(int dtype, const void* out, const int64_t* order, const float* weights,
                                      int64_t tokens, int64_t top_k, int64_t dim, void* result, int threads) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    combine((const T*)out, order, weights, tokens, top_k, dim, (T*)result, threads);
  });
}

extern "C" void quire_grouped_linear(int dtype, const void* x, int64_t x_stride, const void* weight,
                                     int64_t expert_stride, int64_t output_stride, const void* bias,
                                     const int64_t* offsets, int64_t experts, int64_t in, int64_t out, void* result,
                                     int threads) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    GroupedLinear<T>{(const T*)x, x_stride, (const T*)weight, expert_stride, output_stride, (const T*)bias, offsets, 0,
                     0, in, out, (T*)result, out}
        .run(experts, threads);
  });
}

// x: [tokens, heads, in], weight: [heads, out, in] -> [tokens, heads, out]
extern "C" void quire_linear_by_head(int dtype, const void* x, int64_t x_stride, int64_t x_head, int64_t tokens,
                                     const void* weight, int64_t head_stride, int64_t output_stride, int64_t heads,
                                     int64_t in, int64_t out, void* result, int threads) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    GroupedLinear<T>{(const T*)x, x_stride, (const T*)weight, head_stride, output_stride, nullptr, nullptr, tokens,
                     x_head, in, out, (T*)result, heads * out}
        .run(heads, threads);
  });
}

RECORDABLE(quire_combine_experts)
RECORDABLE(quire_grouped_linear)
RECORDABLE(quire_linear_by_head)
