// Causal attention over a paged cache: decode rows and prefill chunks in one call.
//
// The cache of a layer is [blocks][kv_heads][2][block_size * dim] elements; dim is head_dim padded to a multiple of 16
// with zeros. A block's keys are transposed, and keys and values are interleaved in pairs (bfloat16; "pairs" of one for
// float32), so that everything is read as lines of 16 32-bit words, 64 bytes, each word a pair that meets one broadcast
// word of the other operand in a dot product. No sum ever runs across a register:
//
//   keys, [dim / 2][block_size] words                      values, [block_size / 2][dim] words
//                token 0     token 1     ... token 15                   dim 0       dim 1      ... dim D-1
//   dims 0,1   | k0[0] k0[1] | k1[0] k1[1] | ... |          tokens 0,1 | v0[0] v1[0] | v0[1] v1[1] | ... |
//   dims 2,3   | k0[2] k0[3] | k1[2] k1[3] | ... |          tokens 2,3 | v2[0] v3[0] | v2[1] v3[1] | ... |
//
//   scores[row][16 tokens] += keys line . q[row][2 dims]    out[row][16 dims] += values line . p[row][2 tokens]
//
// Work is cut into tasks: the tokens of a tile of one request's queries, times the query heads that share a KV head,
// are the rows; keys are visited in tiles of 64 with an online softmax (arXiv:2205.14135). Decode is a tile of one
// token. Where there are too few tasks for the threads, the keys are split as well and the partial results merged.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "vector.h"

using namespace quire;

namespace {

constexpr int TILE_KEYS = 64;
constexpr int TILE_LINES = TILE_KEYS / LANES;
constexpr int TILE_ROWS = 64;         // a tile of queries holds about as many rows
constexpr int MIN_SPLIT_KEYS = 256;   // splitting costs a merge
constexpr int TASKS_PER_THREAD = 4;   // enough that threads end together
constexpr int64_t PARALLEL_COST = 8 * 256;  // below it, one thread is done before a second one has woken up
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

#ifdef __AVX512F__
constexpr int MAX_ROWS = 6, MAX_COLUMNS = 4;  // 24 accumulators of the 32 registers
#else
constexpr int MAX_ROWS = 4, MAX_COLUMNS = 1;
#endif

template <class T>
constexpr int PAIR = 4 / sizeof(T);  // elements of a 32-bit word

}  // namespace

extern "C" {

// Mirrored in quire/attention/cpu.py.
struct Geometry {
  int32_t is_bf16, heads, kv_heads, head_dim, dim, block_size;
};

struct Task {
  int32_t request;
  int32_t token, tokens;       // rows of q, and how many
  int32_t position;            // of the first token in its sequence
  int32_t key_begin, key_end;  // multiples of TILE_KEYS, except the last task's end
  int32_t partial;             // first row of the partial results, or -1 where the keys were not split
  int32_t cost;
};

struct Merge {
  int32_t token, tokens, partial, splits;
};

struct Step {
  const int32_t* block_table;
  int64_t table_stride;
  const Task* tasks;
  const Merge* merges;
  int32_t num_tasks, num_merges, partial_rows, threads;
};
}

namespace {

template <class T>
inline f32x16 dot(f32x16 sum, u32x16 line, u32x16 word);

template <>
inline f32x16 dot<float>(f32x16 sum, u32x16 line, u32x16 word) {
  return sum + as<f32x16>(line) * as<f32x16>(word);
}

template <>
inline f32x16 dot<bf16>(f32x16 sum, u32x16 line, u32x16 word) {
#ifdef __AVX512BF16__
  return as<f32x16>(_mm512_dpbf16_ps(as<__m512>(sum), as<__m512bh>(line), as<__m512bh>(word)));
#else
  sum += as<f32x16>(line << 16) * as<f32x16>(word << 16);
  return sum + as<f32x16>(line & 0xffff0000u) * as<f32x16>(word & 0xffff0000u);
#endif
}

// Where a tile's keys and values are, by groups of 16 tokens, as many as there are.
struct Tile {
  const uint32_t *keys[TILE_LINES] = {}, *values[TILE_LINES] = {};
};

// The kernels fetch the next tile while they compute. Into the second-level cache: the first one has too few fill
// buffers to cover the latency of memory (measured: 12 ms a step where it is 15 into the first).
inline void fetch(const uint32_t* line) { __builtin_prefetch(line, 0, 2); }

// scores[r][16 c ...] = q[r] . keys of the c-th 16 tokens.
template <class T, int R, int C>
void score(const uint32_t* q, int words, const uint32_t* const* keys, int stride, float* scores,
           const uint32_t* const* ahead) {
  f32x16 sums[R][C] = {};
  for (int w = 0; w < words; w++) {
    u32x16 lines[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) lines[c] = load_words(keys[c] + w * stride);
    if (ahead)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++)
        if (ahead[c]) fetch(ahead[c] + w * stride);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      u32x16 word = splat(q[r * words + w]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sums[r][c] = dot<T>(sums[r][c], lines[c], word);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(scores + r * TILE_KEYS + c * LANES, sums[r][c]);
}

// out[r][from + 16 c ...] = out * rescale[r] + p[r] . values.
template <class T, int R, int C>
void weigh(const uint32_t* p, const uint32_t* const* values, int from, int words, float* out, int dim,
           const float* rescale, const uint32_t* const* ahead) {
  out += from;
  constexpr int STEPS = LANES / PAIR<T>;  // that make up 16 tokens
  f32x16 sums[R][C];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) sums[r][c] = load(out + r * dim + c * LANES) * rescale[r];
  for (int w = 0; w < words; w++) {
    u32x16 lines[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) lines[c] = load_words(values[w] + from + c * LANES);
    if (ahead && ahead[w / STEPS])
      for (int d = 0; d < dim; d += LANES) fetch(ahead[w / STEPS] + w % STEPS * dim + d);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      u32x16 word = splat(p[r * (TILE_KEYS / PAIR<T>) + w]);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[r][c] = dot<T>(sums[r][c], lines[c], word);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(out + r * dim + c * LANES, sums[r][c]);
}

template <int N>
using Constant = std::integral_constant<int, N>;

// f(Constant<n>, start): cuts `count` into pieces of at most MAX, each piece's size known to the compiler.
template <int MAX, class F>
inline void in_pieces(int count, F f) {
  int at = 0;
  for (; count - at >= MAX; at += MAX) f(Constant<MAX>{}, at);
  if constexpr (MAX > 4)
    if (count - at >= 4) f(Constant<4>{}, at), at += 4;
  if constexpr (MAX > 2)
    if (count - at >= 2) f(Constant<2>{}, at), at += 2;
  if constexpr (MAX > 1)
    if (count - at >= 1) f(Constant<1>{}, at);
}

// A thread's working memory, kept between calls.
struct Scratch {
  std::vector<float> storage;
  float *q, *scores, *p, *out, *edges, *maximum, *rescale;  // q, p, edges hold words
  f32x16* sums;

  void reserve(int rows, int dim) {
    const size_t needed = rows * (dim + TILE_KEYS + TILE_KEYS + dim + LANES) + 2 * dim + 2 * (rows + LANES) + LANES;
    if (storage.size() < needed) storage.resize(needed);
    float* at = storage.data() + (64 - reinterpret_cast<uintptr_t>(storage.data()) % 64) / 4 % LANES;
    auto take = [&](size_t n) { float* p = at; at += n; return p; };
    q = take(rows * dim), scores = take(rows * TILE_KEYS), p = take(rows * TILE_KEYS), out = take(rows * dim);
    edges = take(2 * dim), sums = reinterpret_cast<f32x16*>(take(rows * LANES));
    maximum = take(rows), rescale = take(rows);
  }
};

template <class T>
struct Attention {
  const Geometry& g;
  const Step& step;
  const T* q;
  int64_t q_stride, q_head_stride;
  const uint32_t* cache;
  float scale;
  int window;  // 0: none
  T* out;  // [tokens, heads, head_dim]
  float *lse, *partials;  // lse: [tokens, heads]

  int group() const { return g.heads / g.kv_heads; }
  int words() const { return g.dim / PAIR<T>; }
  int partial_size() const { return g.dim + LANES; }  // the unscaled result, then maximum and sum

  // The keys that at least one of the task's tokens sees.
  int first_key(const Task& t) const { return std::max(t.key_begin, window ? t.position - window + 1 : 0); }
  int last_key(const Task& t) const { return std::min(t.key_end, t.position + t.tokens); }

  const uint32_t* keys_at(const Task& t, int head, int token) const {
    const int64_t chunk = int64_t(g.block_size) * words();
    const int64_t block = step.block_table[t.request * step.table_stride + token / g.block_size];
    return cache + (block * g.kv_heads + head) * 2 * chunk + token % g.block_size;
  }

  // The values of 16 tokens whose keys start at `keys`; token is a multiple of 16.
  const uint32_t* values_of(const uint32_t* keys, int token) const {
    const int offset = token % g.block_size;
    return keys - offset + g.block_size * words() + offset / PAIR<T> * g.dim;
  }

  Tile tile_at(const Task& t, int head, int base) const {
    Tile tile;
    const int end = std::min(base + TILE_KEYS, last_key(t));
    for (int c = 0; base + c * LANES < end; c++) {
      tile.keys[c] = keys_at(t, head, base + c * LANES);
      tile.values[c] = values_of(tile.keys[c], base + c * LANES);
    }
    return tile;
  }

  static int tile_start(int key) { return key / LANES * LANES; }

  void gather_queries(const Task& t, int head, Scratch& s) const {
    T* row = reinterpret_cast<T*>(s.q);
    for (int token = 0; token < t.tokens; token++)
      for (int h = 0; h < group(); h++, row += g.dim) {
        memcpy(row, q + (t.token + token) * q_stride + (head * group() + h) * q_head_stride, g.head_dim * sizeof(T));
        memset(row + g.head_dim, 0, (g.dim - g.head_dim) * sizeof(T));
      }
  }

  // Turns a row's scores into probabilities relative to its running maximum; keys outside [begin, end) count nothing.
  template <bool MASKED>
  void softmax_row(const float* scores, int begin, int end, T* p, float& maximum, float& rescale, f32x16& sums) const {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 x[TILE_LINES], top = splat(MINUS_INFINITY);
    for (int c = 0; c < TILE_LINES; c++) {
      x[c] = load(scores + c * LANES) * (scale * LOG2_E);
      if (MASKED) {
        i32x16 key = lane + c * LANES;
        x[c] = (key >= begin) & (key < end) ? x[c] : splat(MINUS_INFINITY);
      }
      top = larger(top, x[c]);
    }
    const float raised = std::max(maximum, quire::maximum(top));
    const float base = raised == MINUS_INFINITY ? 0 : raised;  // a row that has seen no key yet
    rescale = raised == maximum ? 1 : std::exp2(maximum - base);
    maximum = raised;
    sums *= rescale;
    for (int c = 0; c < TILE_LINES; c++) {
      f32x16 e = quire::exp2(x[c] - base);
      sums += e;
      store(p + c * LANES, e);
    }
  }

  // The task's rows against the keys of [from, to), at most a tile; base is the multiple of 16 at or below `from`.
  void visit_tile(const Task& t, int base, int from, int to, const Tile& tile, const Tile& ahead, Scratch& s) const {
    const int rows = t.tokens * group(), lines = (to - base + LANES - 1) / LANES;
    const uint32_t* queries = reinterpret_cast<const uint32_t*>(s.q);
    in_pieces<MAX_ROWS>(rows, [&](auto r, int row) {
      in_pieces<MAX_COLUMNS>(lines, [&](auto c, int line) {
        score<T, r.value, c.value>(queries + row * words(), words(), tile.keys + line, g.block_size,
                                   s.scores + row * TILE_KEYS + line * LANES, row ? nullptr : ahead.keys + line);
      });
    });

    const bool masked = from > base || to < base + TILE_KEYS || to > t.position + 1 ||
                        (window && base < t.position + t.tokens - window);
    T* probabilities = reinterpret_cast<T*>(s.p);
    for (int row = 0; row < rows; row++) {
      const int position = t.position + row / group();
      const int begin = std::max(from, window ? position - window + 1 : 0) - base;
      const int end = std::min(to, position + 1) - base;
      const float* scores = s.scores + row * TILE_KEYS;
      T* p = probabilities + row * TILE_KEYS;
      if (masked) softmax_row<true>(scores, begin, end, p, s.maximum[row], s.rescale[row], s.sums[row]);
      else softmax_row<false>(scores, begin, end, p, s.maximum[row], s.rescale[row], s.sums[row]);
    }

    // One pointer for each pair of tokens. A slot outside [from, to) may hold anything, and 0 * NaN is NaN: a pair of
    // which half is outside is read from a copy without that half.
    constexpr int P = PAIR<T>;
    const uint32_t* values[TILE_KEYS / P];
    const int first = (from - base) / P, last = (to - base + P - 1) / P;
    for (int w = first; w < last; w++) values[w] = tile.values[w * P / LANES] + w * P % LANES / P * g.dim;
    if (P == 2 && (from - base) % 2) clear_half(values[first], 0xffff0000u, s.edges);
    if (P == 2 && (to - base) % 2) clear_half(values[last - 1], 0x0000ffffu, s.edges + g.dim);

    const uint32_t* words_of_p = reinterpret_cast<const uint32_t*>(s.p) + first;
    in_pieces<MAX_ROWS>(rows, [&](auto r, int row) {
      constexpr int COLUMNS = r.value <= 2 ? 2 * MAX_COLUMNS : MAX_COLUMNS;
      in_pieces<COLUMNS>(g.dim / LANES, [&](auto c, int column) {
        weigh<T, r.value, c.value>(words_of_p + row * (TILE_KEYS / P), values + first, column * LANES, last - first,
                                   s.out + row * g.dim, g.dim, s.rescale + row, row || column ? nullptr : ahead.values);
      });
    });
  }

  void clear_half(const uint32_t*& words, uint32_t kept, float* copy) const {
    uint32_t* to = reinterpret_cast<uint32_t*>(copy);
    for (int i = 0; i < g.dim; i++) to[i] = words[i] & kept;
    words = to;
  }

  void write_row(const float* from, float sum, float maximum, int token, int head) const {
    T* to = out + (int64_t(token) * g.heads + head) * g.head_dim;
    for_lanes(g.head_dim, [&](int64_t i, int n) { store_up_to(to + i, load(from + i) * (1 / sum), n); });
    lse[int64_t(token) * g.heads + head] = maximum * LN_2 + std::log(sum);
  }

  // `next` is the task this thread will run afterwards, if any: its first keys are fetched in time.
  void run(const Task& t, int head, const Task* next, int next_head, Scratch& s) const {
    const int rows = t.tokens * group(), from = first_key(t), to = last_key(t);
    s.reserve(std::max(rows, TILE_ROWS), g.dim);
    gather_queries(t, head, s);
    std::fill(s.maximum, s.maximum + rows, MINUS_INFINITY);
    std::fill(s.sums, s.sums + rows, f32x16{});
    memset(s.out, 0, rows * g.dim * sizeof(float));
    Tile tile = tile_at(t, head, tile_start(from));
    for (int base = tile_start(from); base < to; base += TILE_KEYS) {
      Tile ahead;
      if (base + TILE_KEYS < to) ahead = tile_at(t, head, base + TILE_KEYS);
      else if (next) ahead = tile_at(*next, next_head, tile_start(first_key(*next)));
      visit_tile(t, base, std::max(base, from), std::min(base + TILE_KEYS, to), tile, ahead, s);
      tile = ahead;
    }
    for (int row = 0; row < rows; row++) {
      const float total = sum(s.sums[row]);
      if (t.partial < 0) {
        write_row(s.out + row * g.dim, total, s.maximum[row], t.token + row / group(), head * group() + row % group());
        continue;
      }
      float* partial = partials + (int64_t(head) * step.partial_rows + t.partial + row) * partial_size();
      memcpy(partial, s.out + row * g.dim, g.dim * sizeof(float));
      partial[g.dim] = s.maximum[row];
      partial[g.dim + 1] = total;
    }
  }

  void merge(const Merge& m, int head, Scratch& s) const {
    const int rows = m.tokens * group();
    s.reserve(TILE_ROWS, g.dim);
    for (int row = 0; row < rows; row++) {
      const float* first = partials + (int64_t(head) * step.partial_rows + m.partial + row) * partial_size();
      const int64_t next = int64_t(rows) * partial_size();
      float maximum = MINUS_INFINITY, total = 0;
      for (int i = 0; i < m.splits; i++) maximum = std::max(maximum, first[i * next + g.dim]);
      memset(s.out, 0, g.dim * sizeof(float));
      for (int i = 0; i < m.splits; i++) {
        const float* partial = first + i * next;
        const float weight = std::exp2(partial[g.dim] - maximum);
        total += weight * partial[g.dim + 1];
        for (int d = 0; d < g.dim; d++) s.out[d] += weight * partial[d];
      }
      write_row(s.out, total, maximum, m.token + row / group(), head * group() + row % group());
    }
  }

  void run_all() {
    thread_local std::vector<float> kept;
    const size_t needed = size_t(step.partial_rows) * g.kv_heads * partial_size();
    if (kept.size() < needed) kept.resize(needed);
    partials = kept.data();
    const int items = step.num_tasks * g.kv_heads, merges = step.num_merges * g.kv_heads;
    std::atomic<int> counter{0};
#pragma omp parallel num_threads(step.threads) if (step.threads > 1)
    {
      thread_local Scratch scratch;
      // Each thread draws one task ahead of the one it runs.
      for (int item = counter++; item < items;) {
        const int next = counter++;
        run(step.tasks[item / g.kv_heads], item % g.kv_heads, next < items ? &step.tasks[next / g.kv_heads] : nullptr,
            next % g.kv_heads, scratch);
        item = next;
      }
      if (merges) {
#pragma omp barrier
#pragma omp for schedule(static)
        for (int i = 0; i < merges; i++) merge(step.merges[i / g.kv_heads], i % g.kv_heads, scratch);
      }
    }
  }
};

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
      T* keys = cache + (slots[t] / g.block_size * g.kv_heads + head) * 2 * chunk + offset * P;
      T* values = keys - offset * P + chunk + offset / P * g.dim * P + offset % P;
      const T *from_k = k + t * k_stride + head * k_head_stride, *from_v = v + t * v_stride + head * v_head_stride;
      for (int d = 0; d < g.head_dim; d++) {
        keys[d / P * g.block_size * P + d % P] = from_k[d];
        values[d * P] = from_v[d];
      }
      for (int d = g.head_dim; d < g.dim; d++) keys[d / P * g.block_size * P + d % P] = values[d * P] = T{};
    }
}

}  // namespace

extern "C" {

// Cuts a step into tasks, dearest first; step's tasks and merges must have room (see cpu.py), the rest of it is set.
void quire_attention_plan(const Geometry* g, const int32_t* query_start, const int32_t* lengths, int32_t requests,
                          int32_t threads, Task* tasks, Merge* merges, Step* step) {
  const int group = g->heads / g->kv_heads, tile = std::max(1, TILE_ROWS / group);
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

// window: 0 for none.
void quire_attention_attend(const Geometry* g, const Step* step, const void* q, int64_t q_stride, int64_t q_head_stride,
                            const void* cache, float scale, int32_t window, void* out, float* lse) {
  const uint32_t* words = (const uint32_t*)cache;
  auto attend = [&](auto type) {
    using T = decltype(type);
    const T* queries = (const T*)q;
    Attention<T>{*g, *step, queries, q_stride, q_head_stride, words, scale, window, (T*)out, lse, nullptr}.run_all();
  };
  g->is_bf16 ? attend(bf16{}) : attend(float{});
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
