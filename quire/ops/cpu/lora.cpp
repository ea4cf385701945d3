// Low-rank adapters: out += B A x, where each token may use a different adapter. Tokens with the same adapter are
// computed together, so that its matrices are read once. Tokens without an adapter cost nothing.
//
// Both products add in a fixed order (A x as in grouped_linear.cpp, B h by rank), so a token's result does not depend
// on the other tokens.
#include <algorithm>
#include <vector>

#include "replay.h"
#include "sums.h"
#include "team.h"
#include "vector.h"

using namespace quire;

namespace {

constexpr int TOKENS = 8 * MAX_ROWS;  // per item of work
constexpr int64_t OUTPUTS = 512;
constexpr int RANKS = 8;
constexpr int64_t PARALLEL_BYTES = 1 << 16;  // with less work, one thread finishes before a second one wakes up

template <class T>
struct AddLora {
  T* out;  // [tokens, outs]
  int64_t out_stride;
  const T* x;  // [tokens, in]
  int64_t x_stride;
  const T *a, *b;  // [slots, parts, rank, in], [slots, rank, outs]
  const int64_t *slots, *ranks, *bounds;
  int64_t tokens, parts, rank, in, outs;

  // Up to TOKENS tokens of one adapter: those in `order` from `first` on.
  struct Group {
    int64_t slot, first;
    int count;
  };
  struct Item {
    int group, part;
    int64_t begin, end;  // a range of ranks for products with A, or of outputs for products with B
  };

  // Computes A x for R tokens and C ranks: [tokens in order, parts, rank].
  template <int R, int C>
  void shrink(const int64_t* token, const T* w, float* result, int64_t stride) const {
    constexpr int STEP = LANES * PAIR<Factor<T>>;
    f32x16 sums[R][C] = {};
    const T* from[R];
    for (int r = 0; r < R; r++) from[r] = x + token[r] * x_stride;
    int64_t i = 0;
    for (; i + STEP <= in; i += STEP) {
      u32x16 lines[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        lines[c] = load_factors(w + c * in + i);
        __builtin_prefetch(w + (C + c) * in + i, 0, 2);
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        u32x16 line = load_factors(from[r] + i);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sums[r][c] = dot<Factor<T>>(sums[r][c], lines[c], line);
      }
    }
    for_lanes(in - i, [&](int64_t at, int n) {
      for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
          sums[r][c] = fma(load_up_to(from[r] + i + at, n), load_up_to(w + c * in + i + at, n), sums[r][c]);
    });
    for (int r = 0; r < R; r++) store_part(result + r * stride, sums_of<C>(sums[r]), C);
  }

  // Adds B h to C lines of outputs of R tokens. The last line may have fewer than 16 outputs. h: [R tokens][stride].
  template <int R, int C>
  void expand(const int64_t* token, const T* w, const float* h, int64_t stride, int64_t used, int64_t at, int last) const {
    f32x16 sums[R][C] = {};
    for (int64_t k = 0; k < used; k++) {
      const T* from = w + k * outs;
      f32x16 line[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) line[c] = c < C - 1 ? load(from + c * LANES) : load_up_to(from + c * LANES, last);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[r][c] = fma(line[c], splat(h[r * stride + k]), sums[r][c]);
    }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) {
        const int n = c < C - 1 ? LANES : last;
        T* to = out + token[r] * out_stride + at + c * LANES;
        store_up_to(to, load_up_to(to, n) + sums[r][c], n);
      }
  }

  void run(int threads) const {
    thread_local std::vector<int64_t> kept_order;
    thread_local std::vector<Group> kept_groups;
    thread_local std::vector<Item> kept_items;
    thread_local std::vector<float> kept_h;
    auto &order = kept_order;
    auto &groups = kept_groups;
    auto &items = kept_items;
    order.clear(), groups.clear(), items.clear();
    for (int64_t t = 0; t < tokens; t++)
      if (slots[t] >= 0 && ranks[slots[t]] > 0) order.push_back(t);
    if (order.empty()) return;
    std::stable_sort(order.begin(), order.end(), [&](int64_t s, int64_t t) { return slots[s] < slots[t]; });
    const int64_t count = order.size(), stride = parts * rank;
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; i++) {
      const int64_t slot = slots[order[i]];
      if (groups.empty() || groups.back().slot != slot || groups.back().count == TOKENS) {
        groups.push_back({slot, i, 0});
        bytes += ranks[slot] * (parts * in + outs) * sizeof(T);
      }
      groups.back().count++;
    }
    kept_h.resize(count * stride);
    float* h = kept_h.data();
    if (bytes < PARALLEL_BYTES) threads = 1;
    for (int g = 0; g < (int)groups.size(); g++)
      for (int part = 0; part < parts; part++)
        for (int64_t k = 0; k < ranks[groups[g].slot]; k += RANKS)
          items.push_back({g, part, k, std::min<int64_t>(k + RANKS, ranks[groups[g].slot])});
    const int64_t* tokens_in_order = order.data();
    const Group* all_groups = groups.data();
    const Item* all_items = items.data();
    for_each(items.size(), threads, [=](int64_t i) {
      const Item& item = all_items[i];
      const Group& group = all_groups[item.group];
      in_pieces<MAX_COLUMNS>(int(item.end - item.begin), [&](auto c, int k) {
        const int64_t at = item.part * rank + item.begin + k;
        in_pieces<MAX_ROWS>(group.count, [&](auto r, int row) {
          shrink<r.value, c.value>(tokens_in_order + group.first + row, a + (group.slot * stride + at) * in,
                                   h + (group.first + row) * stride + at, stride);
        });
      });
    });
    items.clear();
    for (int g = 0; g < (int)groups.size(); g++)
      for (int part = 0; part < parts; part++)
        for (int64_t o = bounds[part]; o < bounds[part + 1]; o += OUTPUTS)
          items.push_back({g, part, o, std::min(o + OUTPUTS, bounds[part + 1])});
    all_items = items.data();
    for_each(items.size(), threads, [=](int64_t i) {
      const Item& item = all_items[i];
      const Group& group = all_groups[item.group];
      const int lines = int(item.end - item.begin + LANES - 1) / LANES;
      in_pieces<MAX_COLUMNS>(lines, [&](auto c, int line) {
        const int64_t at = item.begin + line * LANES;
        const int last = int(std::min<int64_t>(LANES, item.end - at - (c.value - 1) * LANES));
        in_pieces<MAX_ROWS>(group.count, [&](auto r, int row) {
          expand<r.value, c.value>(tokens_in_order + group.first + row, b + group.slot * rank * outs + at,
                                   h + (group.first + row) * stride + item.part * rank, stride, ranks[group.slot], at,
                                   last);
        });
      });
    });
  }
};

}  // namespace

extern "C" void quire_add_lora(int dtype, void* out, int64_t out_stride, const void* x, int64_t x_stride,
                               const void* a, const void* b, const int64_t* slots, const int64_t* ranks,
                               const int64_t* bounds, int64_t tokens, int64_t parts, int64_t rank, int64_t in,
                               int64_t outs, int threads) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    AddLora<T>{(T*)out, out_stride, (const T*)x, x_stride, (const T*)a, (const T*)b, slots, ranks,
               bounds,  tokens,     parts,       rank,     in,          outs}
        .run(threads);
  });
}

RECORDABLE(quire_add_lora)
