// Causal attention over a paged cache: decode rows and prefill chunks in one call.
//
// A task covers a tile of one request's query tokens and the query heads that share a KV head; each (token, head) pair
// is a row. Keys are visited in tiles of 64 with an online softmax (arXiv:2205.14135). Decode is a tile of one token.
// If there are too few tasks for the threads, the keys are split among threads as well.
//
// A row's result is bitwise independent of the other rows, the chunk, and the number of threads:
//   - tiles and splits (attention.h) begin at fixed positions of the sequence;
//   - each split starts from zero, and `fold` merges the splits' results in order;
//   - a row's sums are added in a fixed order, however many rows and columns a kernel computes at a time;
//   - a masked key adds exactly 0 to a row's sums: its probability is 0, and its value is finite.
#include "attention.h"
#include "attention_scores.h"
#include "attention_tiles.h"
#include "attention_values.h"
#include "biases.h"
#include "replay.h"
#include "team.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

using namespace quire;

namespace {

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();
// A head with at most this many bytes of keys and values prefetches those of the next head: both fit into a 1 MB cache.
constexpr int64_t SHORT_BYTES = 256 << 10;  // 512 tokens of 128 elements in bfloat16
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Pointers to a tile's keys and values, and to the scales of cells, one per 16 tokens; null where the task has no keys.
struct Tile {
  const uint32_t *keys[TILE_LINES] = {}, *values[TILE_LINES] = {};
  const float *key_scales[TILE_LINES] = {}, *value_scales[TILE_LINES] = {};
};

// A thread's working memory, kept between calls.
struct Scratch {
  std::vector<float> storage;
  float *q, *p, *keys, *values, *edges;  // hold 32-bit words, not floats
  float *scores, *scales, *out, *maximum, *rescale;
  float *merged, *merged_maximum, *merged_sum;  // for the splits completed so far
  f32x16* sums;
#ifdef QUIRE_TILES
  Tiles* tiles = nullptr;  // of the present call; null if they are not used
#endif

  // expands: whether tiles are converted to another layout or type.
  void reserve(int rows, const Geometry& g, bool expands) {
    const size_t keys_size = expands ? TILE_KEYS * g.dim : 0, values_size = g.is_latent ? TILE_KEYS * g.out_pad : 0;
    const size_t needed = rows * (g.dim + TILE_KEYS + TILE_KEYS + 2 * g.out_pad + LANES) + LANES * g.out_pad + keys_size +
                          values_size + 2 * TILE_KEYS + 4 * (rows + LANES) + LANES;
    if (storage.size() < needed) storage.resize(needed);
    float* at = storage.data() + (64 - reinterpret_cast<uintptr_t>(storage.data()) % 64) / 4 % LANES;
    auto take = [&](size_t n) { float* p = at; at += n; return p; };
    q = take(rows * g.dim), scores = take(rows * TILE_KEYS), p = take(rows * TILE_KEYS), out = take(rows * g.out_pad);
    edges = take(LANES * g.out_pad), keys = take(keys_size), values = take(values_size), scales = take(2 * TILE_KEYS);
    sums = reinterpret_cast<f32x16*>(take(rows * LANES)), merged = take(rows * g.out_pad);
    maximum = take(rows), rescale = take(rows), merged_maximum = take(rows), merged_sum = take(rows);
  }
};

Scratch& scratch() {
  thread_local Scratch kept;
  return kept;
}

template <class S>
struct Attention {
  using T = typename S::T;
  using Tensor = typename S::Tensor;

  const Geometry& g;
  const Step& step;
  const Tensor* q;
  int64_t q_stride, q_head_stride;
  const uint32_t* cache;
  int64_t block_stride;  // in words
  float scale;
  int window;          // 0: none
  float soft_cap;      // 0: none
  const float* sinks;  // [heads] or null
  Biases biases;
  Tensor* out;  // [tokens, heads, out_dim]
  float *lse, *partials;  // lse: [tokens, heads]

  int group() const { return g.group(); }
  int words() const { return g.dim / PAIR<T>; }
  int partial_size() const { return g.out_pad + LANES; }  // the unscaled result, then maximum and sum

  // The range [first, last) of keys that any of the task's tokens attends to.
  int first_key(const Task& t) const { return std::max(t.key_begin, window ? t.position - window + 1 : 0); }
  int last_key(const Task& t) const { return std::min(t.key_end, t.position + t.tokens); }

  // Returns the lines of the tile at `base` that hold keys of the task.
  Tile tile_at(const Task& t, int head, int base) const {
    Tile tile;
    if (g.by_slot) return tile;
    const int end = std::min(base + TILE_KEYS, last_key(t)), scales = g.block_size * g.dim / 4;
    for (int c = std::max(first_key(t) - base, 0) / LANES; base + c * LANES < end; c++) {
      const int token = base + c * LANES, offset = token % g.block_size;
      const int64_t block = step.block_table[t.request * step.table_stride + token / g.block_size];
      const uint32_t* keys = cache + block * block_stride + head * g.planes() * plane_words<S>(g);
      const uint32_t* values = keys + (g.is_latent ? 0 : plane_words<S>(g));
      tile.keys[c] = keys + offset;
      if (!g.is_latent) tile.values[c] = values + offset / TOKENS<S> * g.dim;
      if (!S::SCALED) continue;
      tile.key_scales[c] = reinterpret_cast<const float*>(keys + scales + offset);
      tile.value_scales[c] = reinterpret_cast<const float*>(values + scales + offset);
    }
    return tile;
  }

  // Gathers the keys [from, to) from the slots in the table into scratch memory, as lines TILE_KEYS words apart. Other
  // keys in these lines are zero.
  Tile& gather_slots(const Task& t, int base, int from, int to, Tile& tile, Scratch& s) const {
    const typename S::Expand expand;
    const int32_t* slots = step.block_table + t.request * step.table_stride + base;
    const int token_words = g.dim / TOKENS<S>;
    if (S::SCALED) std::fill(s.scales, s.scales + 2 * TILE_KEYS, 0.0f);
    for (int c = (from - base) / LANES; base + c * LANES < to; c++) {
      const uint32_t* tokens[LANES];
      for (int i = 0, key = c * LANES; i < LANES; i++, key++) {
        const bool exists = base + key >= from && base + key < to;
        const uint32_t* block = exists ? cache + slots[key] / g.block_size * block_stride : nullptr;
        tokens[i] = exists ? block + slots[key] % g.block_size * token_words : nullptr;
        if (!S::SCALED || !exists) continue;
        const float* scales = reinterpret_cast<const float*>(block + g.block_size * token_words);
        s.scales[key] = s.scales[TILE_KEYS + key] = scales[slots[key] % g.block_size];
      }
      uint32_t* to_line = reinterpret_cast<uint32_t*>(s.keys) + c * LANES;
      tile.keys[c] = to_line;
      for (int w = 0; w < token_words; w += LANES) {
        const int count = std::min(LANES, token_words - w);
        u32x16 lines[LANES] = {};
        for (int i = 0; i < LANES; i++)
          if (tokens[i]) memcpy(&lines[i], tokens[i] + w, count * sizeof(uint32_t));
        quire::transpose(lines);
        for (int i = 0; i < count; i++) {
          u32x16 expanded[S::LINES];
          expand(lines[i], expanded);
          for (int j = 0; j < S::LINES; j++, to_line += TILE_KEYS) store(to_line, expanded[j]);
        }
      }
    }
    return tile;
  }

  static int tile_start(int key) { return key / TILE_KEYS * TILE_KEYS; }

  void gather_queries(const Task& t, int head, Scratch& s) const {
    T* row = reinterpret_cast<T*>(s.q);
    for (int token = 0; token < t.tokens; token++)
      for (int h = 0; h < group(); h++, row += g.dim) {
        copy_factors(q + (t.token + token) * q_stride + (head * group() + h) * q_head_stride, g.head_dim, row);
        memset(row + g.head_dim, 0, (g.dim - g.head_dim) * sizeof(T));
      }
  }

  // Gathers the scales of the keys [from, to), then those of their values; 0 for the tile's other tokens.
  void gather_scales(int base, int from, int to, const Tile& tile, const Tile& ahead, float* scales) const {
    for (int c = 0; c < TILE_LINES; c++) {
      const i32x16 key = LANE + (base + c * LANES);
      for (int i = 0; i < 2; i++) {
        const float* stored = (i ? tile.value_scales : tile.key_scales)[c];
        f32x16 x = stored ? load(stored) : f32x16{};
        store(scales + i * TILE_KEYS + c * LANES, where((key >= from) & (key < to), x, f32x16{}));
        if (const float* next = (i ? ahead.value_scales : ahead.key_scales)[c]) fetch(next);
      }
    }
  }

  // Turns a row's scores into exponents for exp2: times scale and log2(e), with soft cap and biases applied. Keys
  // outside [begin, end) get weight 0. ahead: the tile's first position minus the query's. Returns each lane's maximum.
  template <bool MASKED, bool CAPPED, bool BIASED>
  f32x16 prepare_row(float* scores, int begin, int end, int head, int ahead, const float* scales) const {
    f32x16 top = splat(MINUS_INFINITY);
    for (int c = 0; c < TILE_LINES; c++) {
      f32x16 x = load(scores + c * LANES);
      if (S::SCALED) x *= load(scales + c * LANES);
      if (CAPPED) x = tanh(x * (scale / soft_cap)) * (soft_cap * LOG2_E);
      else x *= scale * LOG2_E;
      if (BIASED) x += biases.of(head, ahead + c * LANES) * LOG2_E;
      if (MASKED) {
        const i32x16 key = LANE + c * LANES;
        x = where((key >= begin) & (key < end), x, splat(MINUS_INFINITY));
      }
      store(scores + c * LANES, x);
      top = larger(top, x);
    }
    return top;
  }

  // Turns scores into probabilities relative to the rows' running maxima. The maxima of 16 rows are computed together,
  // since one row's takes just as many dependent steps. Probabilities include the values' scales.
  template <bool MASKED, bool CAPPED, bool BIASED = false>
  void softmax(const Task& t, int head, int base, int from, int to, Scratch& s) const {
    const int rows = t.tokens * group();
    for (int first = 0; first < rows; first += LANES) {
      const int count = std::min(LANES, rows - first);
      u32x16 tops[LANES];
      for (int i = 0; i < LANES; i++) {
        if (i >= count) {
          tops[i] = as<u32x16>(splat(MINUS_INFINITY));
          continue;
        }
        const int row = first + i, position = t.position + row / group();
        const int begin = std::max(from, window ? position - window + 1 : 0) - base;
        const int end = std::min(to, position + 1) - base;
        tops[i] = as<u32x16>(prepare_row<MASKED, CAPPED, BIASED>(s.scores + row * TILE_KEYS, begin, end,
                                                                 head * group() + row % group(), base - position,
                                                                 s.scales));
      }
      f32x16 raised = load_up_to(s.maximum + first, count);
      const f32x16 before = raised;
      if (count <= 4) {  // one by one is faster
        float found[LANES] = {};
        for (int i = 0; i < count; i++) found[i] = maximum(as<f32x16>(tops[i]));
        raised = larger(raised, load_part(found, count));
      } else {
        quire::transpose(tops);
        for (int i = 0; i < LANES; i++) raised = larger(raised, as<f32x16>(tops[i]));
      }
      const f32x16 bases = where(raised == MINUS_INFINITY, f32x16{}, raised);  // 0 for a row without keys so far
      store_up_to(s.maximum + first, raised, count);
      // exp2(0) is not exactly 1
      store_up_to(s.rescale + first, where(raised == before, splat(1.0f), quire::exp2(before - bases)), count);
      float subtracted[LANES];
      store(subtracted, bases);
      for (int i = 0; i < count; i++) {
        const int row = first + i;
        T* p = reinterpret_cast<T*>(s.p) + row * TILE_KEYS;
        f32x16 sums = s.sums[row] * s.rescale[row];
        for (int c = 0; c < TILE_LINES; c++) {
          f32x16 e = quire::exp2(load(s.scores + row * TILE_KEYS + c * LANES) - subtracted[i]);
          sums += e;
          if (S::SCALED) e *= load(s.scales + TILE_KEYS + c * LANES);
          store(p + c * LANES, e);
        }
        s.sums[row] = sums;
      }
    }
  }

  // Attends from the task's rows to the keys [from, to) of the tile at `base`.
  void visit_tile(const Task& t, int head, int base, int from, int to, Tile& tile, const Tile& ahead, Scratch& s) const {
    const int rows = t.tokens * group();
    // Kernels that read a line only once expand it in registers. Otherwise it is expanded first, once for all rows.
    const bool read_once = rows <= S::ROWS && (rows & (rows - 1)) == 0 && !g.is_latent;
    const bool as_stored = !g.by_slot && (S::LINES == 1 || read_once);
    if (g.by_slot) score_rows<Whole<T>>(rows, from - base, to - base, gather_slots(t, base, from, to, tile, s), TILE_KEYS,
                                        Tile{}, s);
    else if (as_stored) score_rows<S>(rows, from - base, to - base, tile, g.block_size, ahead, s);
    else score_rows<Whole<T>>(rows, from - base, to - base, expand_keys(tile, ahead, s), TILE_KEYS, Tile{}, s);

    if (S::SCALED && !g.by_slot) gather_scales(base, from, to, tile, ahead, s.scales);
    const bool masked = from > base || to < base + TILE_KEYS || to > t.position + 1 ||
                        (window && base < t.position + t.tokens - window);
    if (biases.table) soft_cap ? softmax<true, true, true>(t, head, base, from, to, s)
                               : softmax<true, false, true>(t, head, base, from, to, s);
    else if (soft_cap) masked ? softmax<true, true>(t, head, base, from, to, s)
                              : softmax<false, true>(t, head, base, from, to, s);
    else masked ? softmax<true, false>(t, head, base, from, to, s) : softmax<false, false>(t, head, base, from, to, s);

    if (g.is_latent) add_values<Whole<T>>(rows, from - base, to - base, transpose_keys(tile, s), ahead, s);
    else if (as_stored) add_values<S>(rows, from - base, to - base, tile, ahead, s);
    else add_values<Whole<T>>(rows, from - base, to - base, expand_values(tile, ahead, s), Tile{}, s);
  }

  // Expands the keys into scratch memory, as lines TILE_KEYS words apart.
  Tile& expand_keys(Tile& tile, const Tile& ahead, Scratch& s) const {
    for (int c = 0; c < TILE_LINES; c++) {
      if (!tile.keys[c]) continue;
      uint32_t* to = reinterpret_cast<uint32_t*>(s.keys) + c * LANES;
      expand<S>(tile.keys[c], g.block_size, g.dim / TOKENS<S>, LANES, to, TILE_KEYS, ahead.keys[c]);
      tile.keys[c] = to;
    }
    return tile;
  }

  // Expands the values likewise, reusing the keys' memory.
  Tile& expand_values(Tile& tile, const Tile& ahead, Scratch& s) const {
    uint32_t* to = reinterpret_cast<uint32_t*>(s.keys);
    for (int c = 0; c < TILE_LINES; c++, to += LANES / PAIR<T> * g.dim) {
      if (!tile.values[c]) continue;
      expand<S>(tile.values[c], g.dim, LANES / TOKENS<S>, g.dim, to, g.dim, ahead.values[c]);
      tile.values[c] = to;
    }
    return tile;
  }

  // Transposes a latent cache's keys into the layout of values.
  Tile& transpose_keys(Tile& tile, Scratch& s) const {
    uint32_t* to = reinterpret_cast<uint32_t*>(s.values);
    for (int c = 0; c < TILE_LINES; c++, to += LANES / PAIR<T> * g.out_pad) {
      if (!tile.keys[c]) continue;
      transpose<T>(tile.keys[c], S::LINES > 1 || g.by_slot ? TILE_KEYS : g.block_size, g.out_pad, to);
      tile.values[c] = to;
    }
    return tile;
  }

  // Computes the rows' scores for the tile's keys [from, to), in format K.
  template <class K>
  void score_rows(int rows, int from, int to, const Tile& tile, int stride, const Tile& ahead, Scratch& s) const {
    const uint32_t* queries = reinterpret_cast<const uint32_t*>(s.q);
    const int first = from / LANES, lines = (to + LANES - 1) / LANES - first;
#ifdef QUIRE_TILES
    if (s.tiles)
      return score_in_tiles(*s.tiles, queries, rows, words(), tile.keys, stride, first, first + lines, s.scores,
                            ahead.keys);
#endif
    in_pieces<K::ROWS>(rows, [&](auto r, int row) {
      in_pieces<std::min(K::columns(r.value), MAX_COLUMNS)>(lines, [&](auto c, int i) {
        const int line = first + i;
        score<K, r.value, c.value>(queries + row * words(), words(), tile.keys + line, stride,
                                   s.scores + row * TILE_KEYS + line * LANES, row || i ? nullptr : ahead.keys);
      });
    });
  }

  // Rescales the rows' results and adds their probabilities times the values of the tile's tokens [from, to), in format
  // V.
  template <class V>
  void add_values(int rows, int from, int to, const Tile& tile, const Tile& ahead, Scratch& s) const {
#ifdef QUIRE_TILES
    if (s.tiles) {
      const uint32_t* lines[TILE_LINES];
      float* copy = s.edges;
      const int first = from / LANES, last = (to + LANES - 1) / LANES;
      for (int c = first; c < last; c++) {
        const int begin = from - c * LANES, end = to - c * LANES;
        lines[c] = tile.values[c];
        if (begin <= 0 && end >= LANES) continue;
        lines[c] = copy_of_tokens(lines[c], g.out_pad, begin, end, copy);
        copy += LANES / 2 * g.out_pad;
      }
      return weigh_in_tiles(*s.tiles, reinterpret_cast<const uint32_t*>(s.p), rows, lines, g.out_pad, first, last, s.out,
                            s.rescale, ahead.values);
    }
#endif
    // One pointer per line of tokens. Slots outside [from, to) may hold NaNs, and 0 * NaN is NaN, so a pair that is
    // half outside is read from a copy with that half cleared. Cells are never NaN.
    constexpr int N = TOKENS<V>;
    const uint32_t* values[TILE_KEYS / N];
    const int first = from / N, last = (to + N - 1) / N;
    for (int w = first; w < last; w++) values[w] = tile.values[w * N / LANES] + w * N % LANES / N * g.out_pad;
    if (N == 2 && from % 2) clear_half(values[first], 0xffff0000u, s.edges);
    if (N == 2 && to % 2) clear_half(values[last - 1], 0x0000ffffu, s.edges + g.out_pad);

    constexpr int P = PAIR<T>;
    const uint32_t* words_of_p = reinterpret_cast<const uint32_t*>(s.p) + first * V::LINES;
    in_pieces<V::ROWS>(rows, [&](auto r, int row) {
      in_pieces<V::columns(r.value)>(g.out_pad / LANES, [&](auto c, int column) {
        weigh<V, r.value, c.value>(words_of_p + row * (TILE_KEYS / P), values + first, column * LANES, last - first,
                                   s.out + row * g.out_pad, g.out_pad, s.rescale + row,
                                   row ? nullptr : ahead.values);
      });
    });
  }

  void clear_half(const uint32_t*& words, uint32_t kept, float* copy) const {
    uint32_t* to = reinterpret_cast<uint32_t*>(copy);
    for (int i = 0; i < g.out_pad; i++) to[i] = words[i] & kept;
    words = to;
  }

  // Normalizes a row's result by the sum of its weights, including the head's sink, and writes it with its log-sum-exp.
  void write_row(const float* from, float sum, float maximum, int token, int head) const {
    Tensor* to = out + (int64_t(token) * g.heads + head) * g.out_dim;
    float weight = 1;
    if (sinks) {
      const float sink = sinks[head] * LOG2_E, raised = std::max(maximum, sink);
      weight = std::exp2(maximum - raised);
      sum = sum * weight + std::exp2(sink - raised);
      maximum = raised;
    }
    const f32x16 factor = splat(weight / sum);
    // Adding 0 turns -0 into +0: otherwise a zero's sign could depend on how many zeros were added.
    for_lanes(g.out_dim, [&](int64_t i, int n) { store_up_to(to + i, fma(load(from + i), factor, f32x16{}), n); });
    lse[int64_t(token) * g.heads + head] = maximum * LN_2 + std::log(sum);
  }

  // Merges one split's result for a row into the merged result of the earlier splits.
  void fold(const float* split, float split_maximum, float split_sum, float* merged, float& maximum, float& sum) const {
    if (split_maximum == MINUS_INFINITY) return;  // the row attends to no key of the split
    const float raised = std::max(maximum, split_maximum);
    const f32x16 lost = f32x16{maximum - raised, split_maximum - raised};
    const f32x16 weights = where(lost == 0.0f, splat(1.0f), quire::exp2(lost));  // exp2(0) is not exactly 1
    const f32x16 old_weight = splat(weights[0]), weight = splat(weights[1]);
    maximum = raised;
    sum = sum * weights[0] + split_sum * weights[1];
    for (int i = 0; i < g.out_pad; i += LANES)
      store(merged + i, fma(load(split + i), weight, load(merged + i) * old_weight));
  }

  // next: the task that this thread runs afterwards, or null; its keys and values are prefetched.
  void run(const Task& t, int head, const Task* next, int next_head, Scratch& s) const {
    const int rows = t.tokens * group(), first = first_key(t), last = last_key(t);
    s.reserve(std::max(rows, TILE_ROWS), g, S::LINES > 1 || g.by_slot);
    gather_queries(t, head, s);
    const bool is_whole = t.partial < 0;
    const int start = tile_start(first);
    const bool is_short = (last - start) * g.planes() * g.dim * int64_t(sizeof(typename S::Element)) <= SHORT_BYTES;
    bool is_first = true;
    Tile tile = tile_at(t, head, start);
    for (int begin = t.key_begin, partial = t.partial, end; begin < t.key_end; begin = end, partial += rows) {
      end = std::min(split_end(g, begin), t.key_end);
      if (is_whole && end <= first) continue;
      std::fill(s.maximum, s.maximum + rows, MINUS_INFINITY);
      std::fill(s.sums, s.sums + rows, f32x16{});
      memset(s.out, 0, rows * g.out_pad * sizeof(float));
      const int from = std::max(begin, first), to = std::min(end, last);
      for (int base = tile_start(from); base < to; base += TILE_KEYS) {
        Tile following, ahead;
        if (base + TILE_KEYS < last) following = tile_at(t, head, base + TILE_KEYS);
        // Each tile of a short head prefetches the tile at the same offset in the next head. If tiles prefetched their
        // successors, the last one would prefetch a whole tile, however few keys it has, and wait for it.
        if (!is_short && base + TILE_KEYS < last) ahead = following;
        else if (next) ahead = tile_at(*next, next_head, tile_start(first_key(*next)) + (is_short ? base - start : 0));
        visit_tile(t, head, base, std::max(base, from), std::min(base + TILE_KEYS, to), tile, ahead, s);
        tile = following;
      }
      if (!is_whole) save_rows(rows, head, partial, s);
      else if (is_first) start_rows(rows, s);
      else fold_rows(rows, s);
      is_first = false;
    }
    for (int row = 0; is_whole && row < rows; row++)
      write_row(s.merged + row * g.out_pad, s.merged_sum[row], s.merged_maximum[row], t.token + row / group(),
                head * group() + row % group());
  }

  // Uses the first split's results as the initial merged results.
  void start_rows(int rows, Scratch& s) const {
    std::swap(s.out, s.merged);
    std::swap(s.maximum, s.merged_maximum);
    for (int row = 0; row < rows; row++) s.merged_sum[row] = sum(s.sums[row]);
  }

  void fold_rows(int rows, Scratch& s) const {
    for (int row = 0; row < rows; row++)
      fold(s.out + row * g.out_pad, s.maximum[row], sum(s.sums[row]), s.merged + row * g.out_pad,
           s.merged_maximum[row], s.merged_sum[row]);
  }

  void save_rows(int rows, int head, int partial, const Scratch& s) const {
    float* to = partials + (int64_t(head) * step.partial_rows + partial) * partial_size();
    for (int row = 0; row < rows; row++, to += partial_size()) {
      memcpy(to, s.out + row * g.out_pad, g.out_pad * sizeof(float));
      to[g.out_pad] = s.maximum[row];
      to[g.out_pad + 1] = sum(s.sums[row]);
    }
  }

  void merge(const Merge& m, int head, Scratch& s) const {
    const int rows = m.tokens * group();
    s.reserve(TILE_ROWS, g, false);
    for (int row = 0; row < rows; row++) {
      const float* split = partials + (int64_t(head) * step.partial_rows + m.partial + row) * partial_size();
      float maximum = MINUS_INFINITY, total = 0;
      memset(s.merged, 0, g.out_pad * sizeof(float));
      for (int i = 0; i < m.splits; i++, split += int64_t(rows) * partial_size())
        fold(split, split[g.out_pad], split[g.out_pad + 1], s.merged, maximum, total);
      write_row(s.merged, total, maximum, m.token + row / group(), head * group() + row % group());
    }
  }

  // The KV heads [first, end) of a task; task is null if no work is left.
  struct Heads {
    const Task* task;
    int first, end;
  };

  Heads heads_of(int draw, int whole, int draws) const {
    if (draw >= draws) return {};
    if (draw < whole) return {step.tasks + draw, 0, g.kv_heads};
    const int head = (draw - whole) % g.kv_heads;
    return {step.tasks + whole + (draw - whole) / g.kv_heads, head, head + 1};
  }

  void run_all() {
    thread_local std::vector<float> kept;
    const size_t needed = size_t(step.partial_rows) * g.kv_heads * partial_size();
    if (kept.size() < needed) kept.resize(needed);
    partials = kept.data();
    const int merges = step.num_merges * g.kv_heads;
    // Threads draw whole tasks, since passing the counter between cores can take as long as a short head. The last and
    // cheapest tasks are drawn head by head, so that all threads finish at about the same time.
    const int whole = std::max(0, step.num_tasks - TASKS_PER_THREAD * step.threads);
    const int draws = whole + (step.num_tasks - whole) * g.kv_heads;
    alignas(64) std::atomic<int> counter{0};
    together(step.threads, [=, &counter] {
      Scratch& s = scratch();
#ifdef QUIRE_TILES
      Tiles tiles;
      s.tiles = std::is_same_v<T, bf16> && S::LINES == 1 && has_tiles() ? &tiles : nullptr;
#endif
      // A thread draws its next task before it starts the current one, to prefetch the next one's keys and values.
      Heads drawn = heads_of(counter++, whole, draws);
      while (drawn.task) {
        const Heads next = heads_of(counter++, whole, draws);
        for (; drawn.first < drawn.end; drawn.first++) {
          const bool is_last = drawn.first + 1 == drawn.end;
          run(*drawn.task, drawn.first, is_last ? next.task : drawn.task, is_last ? next.first : drawn.first + 1, s);
        }
        drawn = next;
      }
    });
    for_each(merges, step.threads,
             [&](int64_t i) { merge(step.merges[i / g.kv_heads], i % g.kv_heads, scratch()); });
  }
};

}  // namespace

extern "C" {
// block_stride: elements of the cache from one block to the next. window, soft_cap: 0 for none. sinks, biases: null for
// none.
void quire_attention_attend(const Geometry* g, const Step* step, const void* q, int64_t q_stride, int64_t q_head_stride,
                            const void* cache, int64_t block_stride, float scale, int32_t window, float soft_cap,
                            const float* sinks, const float* biases, int32_t reach, void* out, float* lse) {
  with_storage(*g, [&](auto storage) {
    using S = decltype(storage);
    using Tensor = typename S::Tensor;
    const int64_t block_words = block_stride / TOKENS<S>;
    Attention<S>{*g, *step, (const Tensor*)q, q_stride, q_head_stride, (const uint32_t*)cache, block_words, scale,
                 window, soft_cap, sinks, {biases, reach}, (Tensor*)out, lse, nullptr}
        .run_all();
  });
}
}

RECORDABLE(quire_attention_attend)
