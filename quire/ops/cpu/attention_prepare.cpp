// Prepares a step's attention: divides it into tasks, and stores its keys and values.
#include "attention.h"
#include "elementwise.h"
#include "replay.h"
#include "team.h"

#include <sys/mman.h>

#include <algorithm>
#include <vector>

using namespace quire;

namespace {

constexpr int64_t STORE_TOKENS = 64;
// How many tokens ahead to prefetch. The hardware prefetcher does not help, since tokens are kilobytes apart: without
// this, preparing one token of each of 64 requests takes 1.1 times as long.
constexpr int64_t TOKENS_AHEAD = 2;

inline void fetch_row(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)row + i);
}

// Whether 16 slots are consecutive.
inline bool follow(const int64_t* slots) {
  for (int i = 1; i < LANES; i++)
    if (slots[i] != slots[0] + i) return false;
  return true;
}

// Copies n elements in the storage format, followed by zeros.
template <class S, int N>
QUIRE_INLINE void copy_elements(const typename S::Tensor* from, int n, typename S::Element (&to)[N]) {
  if (n == N) return S::copy(from, N, to);
  memset(to, 0, sizeof(to));
  S::copy(from, n, to);
}

// Stores 16 consecutive tokens in 16 consecutive slots of a block, whole lines at a time. Not for one-byte cells.
template <class S, class T = typename S::Tensor>
void store_lines(const T* k, int64_t k_stride, const T* v, int64_t v_stride, int head_dim, int dim, int block_size,
                 int offset, uint32_t* keys, uint32_t* values) {
  using Element = typename S::Element;
  constexpr int P = PAIR<Element>, WORDS = LANES;
  for (int w = 0; w < dim / P; w += WORDS) {  // with pairs, only half of the last 16 words may exist
    u32x16 lines[LANES];
    const int count = std::clamp(head_dim - w * P, 0, LANES * P);
    for (int t = 0; t < LANES; t++) {
      Element part[LANES * P];
      copy_elements<S>(k + t * k_stride + w * P, count, part);
      memcpy(&lines[t], part, sizeof(part));
    }
    transpose(lines);
    for (int i = 0; i < std::min(WORDS, dim / P - w); i++)
      store(keys + (w + i) * block_size + offset, lines[i]);
  }
  if (!values) return;
  for (int t = 0; t < LANES; t += P)
    for (int d = 0; d < dim; d += LANES) {
      u32x16 words = {};
      const int n = std::clamp(head_dim - d, 0, LANES);
      for (int i = 0; i < P; i++) {
        Element part[LANES];
        copy_elements<S>(v + (t + i) * v_stride + d, n, part);
        words |= load_bits(part) << 16 * i;
      }
      store(values + (offset + t) / P * dim + d, words);
    }
}

// Applies the norm and the rotary embedding to each query and key head, in place.
template <class T>
struct Preparation {
  T *q, *k;
  int64_t q_stride, q_head_stride, k_stride, k_head_stride;
  const void *q_weight, *k_weight;  // null for no norm
  bool wide_weight;
  float eps;
  const float *cos, *sin;  // [tokens, half]; null for no rotation
  int64_t half;
  bool interleaved;

  // Prepares one token's key head `kv_head` and the query heads that share it.
  void run(const Geometry& g, int64_t token, int64_t kv_head) const {
    for (int i = 0; i < g.group(); i++)
      one(q + token * q_stride + (kv_head * g.group() + i) * q_head_stride, q_weight, token, g.head_dim);
    one(k + token * k_stride + kv_head * k_head_stride, k_weight, token, g.head_dim);
  }

  // Prefetches the data that `run` reads.
  void fetch(const Geometry& g, int64_t token, int64_t kv_head) const {
    for (int i = 0; i < g.group(); i++)
      fetch_row(q + token * q_stride + (kv_head * g.group() + i) * q_head_stride, g.head_dim * sizeof(T));
    fetch_row(k + token * k_stride + kv_head * k_head_stride, g.head_dim * sizeof(T));
  }

  void one(T* x, const void* weight, int64_t token, int64_t dim) const {
    if (weight && wide_weight) norm_row(x, (const float*)weight, x, dim, eps);
    else if (weight) norm_row(x, (const T*)weight, x, dim, eps);
    if (!cos) return;
    (interleaved ? rotate_pairs<T> : rotate_halves<T>)(x, 1, 0, cos + token * half, sin + token * half, half);
  }
};

template <class S, class T = typename S::Tensor>
void store_tokens(const Geometry& g, uint32_t* cache, int64_t block_stride, const T* k, int64_t k_stride,
                  int64_t k_head_stride, const T* v, int64_t v_stride, int64_t v_head_stride, const int64_t* slots,
                  int64_t tokens, int threads, const Preparation<T>* preparation = nullptr) {
  using Element = typename S::Element;
  constexpr int N = TOKENS<S>;  // elements per word
  // Heads are the outer loop and tokens come in runs, so that a thread's consecutive stores fall into the same cache
  // lines.
  const int64_t runs = (tokens + STORE_TOKENS - 1) / STORE_TOKENS;
  for_each(g.kv_heads * runs, tokens * g.kv_heads >= 32 ? threads : 1, [&](int64_t item) {
    const int64_t head = item / runs, first = item % runs * STORE_TOKENS;
    const int dim = g.dim, block_size = g.block_size;
    const int64_t plane = plane_words<S>(g), scales = plane - (S::SCALED ? block_size : 0);
    thread_local std::vector<Element> padded;
    padded.assign(dim, Element{});
    Element* const room = padded.data();
    const int64_t last = std::min(first + STORE_TOKENS, tokens);
    auto keys_of = [&](int64_t t) {
      return cache + slots[t] / block_size * (block_stride / N) + head * g.planes() * plane;
    };
    for (int64_t t = first; preparation && t < last; t++) {
      if (t + TOKENS_AHEAD < last) {
        preparation->fetch(g, t + TOKENS_AHEAD, head);
        fetch_row(v + (t + TOKENS_AHEAD) * v_stride + head * v_head_stride, g.head_dim * sizeof(T));
      }
      preparation->run(g, t, head);
    }
    for (int64_t t = first; t < last; t++) {
      if (slots[t] < 0) continue;
      const int64_t offset = slots[t] % block_size;
      uint32_t* keys = keys_of(t);
      if (g.by_slot) {
        const Element* row = S::encode(k + t * k_stride, g.head_dim, dim, room, (float*)(keys + scales) + offset);
        memcpy(keys + offset * dim / N, row, dim * sizeof(Element));
        continue;
      }
      if constexpr (!S::SCALED)
        if (offset % LANES == 0 && block_size % LANES == 0 && t + LANES <= last && follow(slots + t)) {
          store_lines<S>(k + t * k_stride + head * k_head_stride, k_stride, v + t * v_stride + head * v_head_stride,
                         v_stride, g.head_dim, dim, block_size, int(offset), keys, g.is_latent ? nullptr : keys + plane);
          t += LANES - 1;
          continue;
        }
      if (const int64_t next = t + TOKENS_AHEAD; next < last && slots[next] >= 0) {
        const uint32_t* to = keys_of(next);
        const int64_t at = slots[next] % block_size;
        for (int w = 0; w < dim / N; w++) __builtin_prefetch(to + w * block_size + at);
        if (!g.is_latent) fetch_row(to + plane + at / N * dim, dim * sizeof(uint32_t));
      }
      const Element* row = S::encode(k + t * k_stride + head * k_head_stride, g.head_dim, dim, room,
                                     (float*)(keys + scales) + offset);
      for (int w = 0; w < dim / N; w++) memcpy(keys + w * block_size + offset, row + w * N, sizeof(uint32_t));
      if (g.is_latent) continue;
      uint32_t* values = keys + plane;
      row = S::encode(v + t * v_stride + head * v_head_stride, g.head_dim, dim, room,
                      (float*)(values + scales) + offset);
      // Written element by element, since other threads may be storing the other elements of these words.
      Element* to = reinterpret_cast<Element*>(values + offset / N * dim) + offset % N;
      for (int d = 0; d < dim; d++) to[d * N] = row[d];
    }
  });
}

}  // namespace

extern "C" {

// Divides a step into tasks, the most expensive first. tasks, merges: must be large enough (see cpu.py). Sets all
// fields of `step` except the block table.
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
    // A task covers all keys, or consecutive splits with about `run` keys.
    const int64_t wanted = threads == 1 ? 1 : std::min<int64_t>((cost + share - 1) / share, keys / g->split_keys());
    const int64_t run = wanted <= 1 ? keys : (keys + wanted - 1) / wanted;
    const int first_partial = step->partial_rows, first_task = step->num_tasks;
    int splits = 0;
    for (int begin = 0, end; begin < keys; begin = end) {
      const int partial = first_partial + splits * rows;
      for (end = begin; end < keys && end - begin < run; splits++) end = std::min(split_end(*g, end), keys);
      const int32_t cost_of_run = std::min<int64_t>(cost * (end - begin) / keys, INT32_MAX);
      tasks[step->num_tasks++] = {request, token, tokens, position, begin, end, partial, cost_of_run};
    }
    if (step->num_tasks == first_task + 1) {
      tasks[first_task].partial = -1;
    } else {
      merges[step->num_merges++] = {token, tokens, first_partial, splits};
      step->partial_rows += splits * rows;
    }
  });
  std::stable_sort(tasks, tasks + step->num_tasks, [](const Task& a, const Task& b) { return a.cost > b.cost; });
}

// block_stride: elements of the cache from one block to the next.
void quire_attention_store(const Geometry* g, void* cache, int64_t block_stride, const void* k, int64_t k_stride,
                           int64_t k_head_stride, const void* v, int64_t v_stride, int64_t v_head_stride,
                           const int64_t* slots, int64_t tokens, const Step* step) {
  with_storage(*g, [&](auto storage) {
    using S = decltype(storage);
    using T = typename S::Tensor;
    store_tokens<S>(*g, (uint32_t*)cache, block_stride, (const T*)k, k_stride, k_head_stride, (const T*)v, v_stride,
                    v_head_stride, slots, tokens, step->threads);
  });
}

// Like quire_attention_store, but first applies norm and rotary embedding to queries and keys (see Preparation).
void quire_attention_prepare(const Geometry* g, void* cache, int64_t block_stride, void* q, int64_t q_stride,
                             int64_t q_head_stride, void* k, int64_t k_stride, int64_t k_head_stride, const void* v,
                             int64_t v_stride, int64_t v_head_stride, const int64_t* slots, int64_t tokens,
                             const Step* step, const void* q_weight, const void* k_weight, int wide_weight, float eps,
                             const float* cos, const float* sin, int64_t half, int interleaved) {
  with_storage(*g, [&](auto storage) {
    using S = decltype(storage);
    using T = typename S::Tensor;
    const Preparation<T> preparation{(T*)q,    (T*)k,    q_stride,         q_head_stride, k_stride, k_head_stride,
                                     q_weight, k_weight, wide_weight != 0, eps,           cos,      sin,
                                     half,     interleaved != 0};
    store_tokens<S>(*g, (uint32_t*)cache, block_stride, (const T*)k, k_stride, k_head_stride, (const T*)v, v_stride,
                    v_head_stride, slots, tokens, step->threads, &preparation);
  });
}

// Requests huge pages, which make reading a large cache 7-12 % faster. Must be called before the memory is first used.
void quire_advise_huge_pages(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t page = 4096, begin = (uintptr_t(memory) + page - 1) / page * page;
  const uintptr_t end = (uintptr_t(memory) + bytes) / page * page;
  if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}
}

RECORDABLE(quire_attention_store)
RECORDABLE(quire_attention_prepare)
