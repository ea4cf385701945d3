// The indexer of sparse attention (quire/layers/indexer.py): scores keys and returns the slots of the best.
//
// Scores are computed for a batch of tokens at a time. An item covers a few neighbouring tokens of a request and a run
// of its keys, so that each key is read once for these tokens. A score is added up in a fixed order, whatever else is
// computed.
#include "attention.h"
#include "attention_scores.h"
#include "replay.h"
#include "team.h"

#include <algorithm>
#include <vector>

using namespace quire;

namespace {

constexpr int MOST_TOKENS = 8;              // per item
constexpr int RUN_KEYS = 2048;              // per item
constexpr int64_t MOST_SCORES = 1 << 22;    // in memory at a time

struct Item {
  int token, tokens, begin, end;  // first row of q, number of rows; range of keys
};

template <class S>
struct Indexer {
  using T = typename S::T;
  using Tensor = typename S::Tensor;

  const Geometry& g;
  const Tensor* q;
  int64_t heads, stride;  // stride: elements of q between tokens; heads are contiguous
  const Tensor* weights;  // [tokens, heads]
  const uint32_t* cache;
  int64_t block_stride;  // in words
  const int32_t *table, *rows, *seen;
  int64_t table_stride;
  int32_t* slots;  // [tokens, most]
  float* best;     // [tokens, most] or null: scores of the selected keys; `slots` then has key positions
  int64_t most, threads;

  // Computes the scores of the item's keys for its i-th token, at `scores + i * width`.
  void score_item(const Item& item, float* scores, int64_t width) const {
    constexpr int LINES = TILE_KEYS / LANES;
    const int words = g.dim / PAIR<T>, scales = g.block_size * g.dim / 4;
    thread_local std::vector<float> kept;
    kept.resize(MOST_TOKENS * heads * words + heads * TILE_KEYS + heads + LANES);
    uint32_t* const queries = reinterpret_cast<uint32_t*>(kept.data());
    float *const products = kept.data() + MOST_TOKENS * heads * words, *const of_heads = products + heads * TILE_KEYS;
    for (int i = 0; i < item.tokens; i++)
      for (int h = 0; h < heads; h++) {
        T* row = reinterpret_cast<T*>(queries + (i * heads + h) * words);
        copy_factors(q + (item.token + i) * stride + h * g.head_dim, g.head_dim, row);
        memset(row + g.head_dim, 0, (g.dim - g.head_dim) * sizeof(T));
      }
    const int32_t* blocks = table + rows[item.token] * table_stride;
    for (int base = item.begin; base < item.end; base += TILE_KEYS) {
      const uint32_t* keys[LINES] = {};
      const int lines = (std::min(base + TILE_KEYS, item.end) - base + LANES - 1) / LANES;
      f32x16 key_scales[LINES];
      for (int c = 0; c < lines; c++) {
        const int token = base + c * LANES, offset = token % g.block_size;
        const uint32_t* block = cache + blocks[token / g.block_size] * block_stride;
        keys[c] = block + offset;
        if (S::SCALED) key_scales[c] = load(reinterpret_cast<const float*>(block + scales + offset));
      }
      for (int i = 0; i < item.tokens; i++) {
        in_pieces<S::ROWS>(heads, [&](auto r, int head) {
          in_pieces<std::min(S::columns(r.value), MAX_COLUMNS)>(lines, [&](auto c, int line) {
            score<S, r.value, c.value>(queries + (i * heads + head) * words, words, keys + line, g.block_size,
                                       products + head * TILE_KEYS + line * LANES, nullptr);
          });
        });
        for_lanes(heads, [&](int64_t h, int n) {
          store_up_to(of_heads + h, load_up_to(weights + (item.token + i) * heads + h, n), n);
        });
        for (int c = 0; c < lines; c++) {
          f32x16 sum = {};
          for (int h = 0; h < heads; h++) {
            f32x16 product = load(products + h * TILE_KEYS + c * LANES);
            if (S::SCALED) product *= key_scales[c];
            sum = fma(larger(product, f32x16{}), splat(of_heads[h]), sum);
          }
          store(scores + i * width + base + c * LANES, sum);
        }
      }
    }
  }

  // Maps floats, including NaNs, to integers in the same order.
  static uint32_t ordered(float x) {
    uint32_t bits;
    x += 0.0f;  // -0 becomes 0
    memcpy(&bits, &x, sizeof(bits));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }

  void select_token(int64_t token, const float* scores) const {
    const int count = seen[token];
    const int32_t* blocks = table + rows[token] * table_stride;
    int32_t* to = slots + token * most;
    float* score = best + token * most;
    auto take = [&](int key) {
      if (best) *score++ = scores[key];
      *to++ = best ? key : blocks[key / g.block_size] * g.block_size + key % g.block_size;
    };
    if (count <= most) {
      for (int key = 0; key < count; key++) take(key);
      return;
    }
    thread_local std::vector<uint32_t> numbers;
    numbers.resize(2 * count);
    uint32_t *all = numbers.data(), *sorted = all + count;
    for (int key = 0; key < count; key++) all[key] = ordered(scores[key]);
    std::copy(all, all + count, sorted);
    std::nth_element(sorted, sorted + most - 1, sorted + count, [](uint32_t a, uint32_t b) { return a > b; });
    const uint32_t least = sorted[most - 1];
    int64_t equal = most;  // how many keys with the least score are selected
    for (int key = 0; key < count; key++) equal -= all[key] > least;
    for (int key = 0; key < count; key++)
      if (all[key] > least || (all[key] == least && equal-- > 0)) take(key);
  }

  void run(int64_t tokens) const {
    thread_local std::vector<float> kept;
    for (int64_t first = 0, stop; first < tokens; first = stop) {
      int64_t width = 0;
      for (stop = first; stop < tokens; stop++) {
        const int64_t longest = std::max(width, (seen[stop] + TILE_KEYS - 1) / TILE_KEYS * int64_t(TILE_KEYS));
        if (stop > first && (stop + 1 - first) * longest > MOST_SCORES) break;
        width = longest;
      }
      std::vector<Item> items;
      for (int64_t token = first, end; token < stop; token = end) {
        for (end = token + 1; end < stop && end - token < MOST_TOKENS && rows[end] == rows[token];) end++;
        const int count = *std::max_element(seen + token, seen + end);
        for (int begin = 0; (best || count > most) && begin < count; begin += RUN_KEYS)
          items.push_back({int(token), int(end - token), begin, std::min(begin + RUN_KEYS, count)});
      }
      if (kept.size() < size_t((stop - first) * width)) kept.resize((stop - first) * width);
      float* const scores = kept.data();
      for_each(items.size(), threads,
               [&](int64_t i) { score_item(items[i], scores + (items[i].token - first) * width, width); });
      for_each(stop - first, threads, [&](int64_t i) { select_token(first + i, scores + i * width); });
    }
  }
};

}  // namespace

extern "C" {
// q: [tokens, heads, head_dim], contiguous heads. block_stride: elements of the cache from one block to the next.
// place: the block table's address and stride. best: see Selection.scores, or null.
void quire_select(const Geometry* g, const void* q, int64_t tokens, int64_t heads, int64_t q_stride,
                  const void* weights, const void* cache, int64_t block_stride, const int64_t* place,
                  const int32_t* rows, const int32_t* seen, int32_t* slots, float* best, int64_t most,
                  int64_t threads) {
  with_storage(*g, [&](auto storage) {
    using S = decltype(storage);
    using Tensor = typename S::Tensor;
    Indexer<S>{*g, (const Tensor*)q, heads, q_stride, (const Tensor*)weights, (const uint32_t*)cache,
               block_stride / TOKENS<S>, (const int32_t*)place[0], rows, seen, place[1], slots, best, most, threads}
        .run(tokens);
  });
}
}

RECORDABLE(quire_select)
