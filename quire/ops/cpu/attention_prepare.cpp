// What comes before a step attends: cutting it into tasks, and storing its keys and values.
#include "attention.h"

#include <sys/mman.h>

#include <algorithm>

using namespace quire;

namespace {

template <class T>
void store_tokens(const Geometry& g, T* cache, const T* k, int64_t k_stride, int64_t k_head_stride, const T* v,
                  int64_t v_stride, int64_t v_head_stride, const int64_t* slots, int64_t tokens, int threads) {
  constexpr int P = PAIR<T>;
  const int64_t chunk = int64_t(g.block_size) * g.dim;
  // Heads outside: a thread's consecutive tokens then fall into the same cache lines.
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static) if (threads > 1 && tokens * g.kv_heads >= 32)
  for (int64_t head = 0; head < g.kv_heads; head++)
    for (int64_t t = 0; t < tokens; t++) {
      if (slots[t] < 0) continue;
      const int64_t offset = slots[t] % g.block_size;
      T* keys = cache + (slots[t] / g.block_size * g.kv_heads + head) * g.planes() * chunk + offset * P;
      const T *from_k = k + t * k_stride + head * k_head_stride, *from_v = v + t * v_stride + head * v_head_stride;
      auto key_at = [&](int d) -> T& { return keys[d / P * g.block_size * P + d % P]; };
      for (int d = g.head_dim; d < g.dim; d++) key_at(d) = T{};
      if (g.is_latent) {
        for (int d = 0; d < g.head_dim; d++) key_at(d) = from_k[d];
        continue;
      }
      T* values = keys - offset * P + chunk + offset / P * g.dim * P + offset % P;
      for (int d = g.head_dim; d < g.dim; d++) values[d * P] = T{};
      for (int d = 0; d < g.head_dim; d++) {
        key_at(d) = from_k[d];
        values[d * P] = from_v[d];
      }
    }
}

}  // namespace

extern "C" {

// Cuts a step into tasks, dearest first; step's tasks and merges must have room (see cpu.py), the rest of it is set.
void quire_attention_plan(const Geometry* g, const int32_t* query_start, const int32_t* lengths, int32_t requests,
                          int32_t threads, Task* tasks, Merge* merges, Step* step) {
  const int group = g->group(), tile = std::max(1, TILE_ROWS / group);
  // Reading keys for a few rows takes as long as for one.
  auto cost_of = [&](int tokens, int keys) { return int64_t(std::max(tokens * group, 8)) * keys; };
  auto for_tiles = [&](auto f) {
    for (int r = 0; r < requests; r++) {
      const int count = query_start[r + 1] - query_start[r], cached = lengths[r] - count;
      for (int i = 0; i < count; i += tile) {
        const int tokens = std::min(tile, count - i);
        f(r, query_start[r] + i, tokens, cached + i, cost_of(tokens, cached + i + tokens));
      }
    }
  };
  int64_t total = 0;
  for_tiles([&](int, int, int, int, int64_t cost) { total += cost * g->kv_heads; });
  const int64_t share = total / (threads * TASKS_PER_THREAD) + 1;
  *step = {step->block_table, step->table_stride, tasks, merges, 0, 0, 0, total < PARALLEL_COST ? 1 : threads};
  for_tiles([&](int request, int token, int tokens, int position, int64_t cost) {
    const int keys = position + tokens, rows = tokens * group;
    const int wanted = threads == 1 ? 1 : std::min<int64_t>((cost + share - 1) / share, keys / MIN_SPLIT_KEYS);
    const int size = ((keys - 1) / std::max(wanted, 1) / TILE_KEYS + 1) * TILE_KEYS, splits = (keys + size - 1) / size;
    const int32_t cost_of_split = std::min<int64_t>(cost / splits, INT32_MAX);
    for (int i = 0; i < splits; i++) {
      const int partial = splits > 1 ? step->partial_rows + i * rows : -1, end = std::min((i + 1) * size, keys);
      tasks[step->num_tasks++] = {request, token, tokens, position, i * size, end, partial, cost_of_split};
    }
    if (splits > 1) {
      merges[step->num_merges++] = {token, tokens, step->partial_rows, splits};
      step->partial_rows += splits * rows;
    }
  });
  std::stable_sort(tasks, tasks + step->num_tasks, [](const Task& a, const Task& b) { return a.cost > b.cost; });
}

void quire_attention_store(const Geometry* g, void* cache, const void* k, int64_t k_stride, int64_t k_head_stride,
                           const void* v, int64_t v_stride, int64_t v_head_stride, const int64_t* slots, int64_t tokens,
                           int32_t threads) {
  auto store = [&](auto type) {
    using T = decltype(type);
    store_tokens(*g, (T*)cache, (const T*)k, k_stride, k_head_stride, (const T*)v, v_stride, v_head_stride, slots,
                 tokens, threads);
  };
  g->is_bf16 ? store(bf16{}) : store(float{});
}

// Asks for huge pages, which make reading a large cache 7-12 % faster. To be called before the memory is first used.
void quire_advise_huge_pages(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t page = 4096, begin = (uintptr_t(memory) + page - 1) / page * page;
  const uintptr_t end = (uintptr_t(memory) + bytes) / page * page;
  if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}
}
