// Attention over whole sequences, without a cache: a token attends to all tokens of its sequence, or to those nearby.
//
// A task is a chunk of one sequence's queries in one head. The keys and values for the chunk are first packed into
// lines of 16 words, as in the cache (attention.h). The scores of a few rows for all keys fit into the L2 cache, so a
// plain softmax is enough. A row's result depends only on its own sequence: chunks begin at fixed positions, and a
// row's sums are added in a fixed order.
#include "biases.h"
#include "replay.h"
#include "team.h"
#include "vector.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

using namespace quire;

namespace {

constexpr int CHUNK = 128;             // queries of a task
constexpr int TILE = 4 * MAX_ROWS;     // queries whose scores are computed at a time
constexpr float LOG2_E = 1.4426950408889634f;

// Heads of tokens, with strides in elements.
template <class T>
struct Heads {
  const T* data;
  int64_t stride, head_stride;
  const T* row(int64_t token, int head) const { return data + token * stride + head * head_stride; }
};

// out[r][16 c ...] = the sum over w of a[r][w] . b[w][16 c ...]
template <class T, int R, int C>
void product(const uint32_t* a, int a_stride, const uint32_t* b, int b_stride, int words, float* out, int out_stride) {
  f32x16 sums[R][C] = {};
  for (int w = 0; w < words; w++) {
    u32x16 lines[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) lines[c] = load_words(b + int64_t(w) * b_stride + c * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const u32x16 word = splat(a[r * a_stride + w]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sums[r][c] = dot<T>(sums[r][c], lines[c], word);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(out + r * out_stride + c * LANES, sums[r][c]);
}

// The same for any number of rows and lines.
template <class T>
void multiply(const uint32_t* a, int a_stride, int rows, const uint32_t* b, int b_stride, int words, float* out,
              int out_stride) {
  in_pieces<MAX_COLUMNS>(b_stride / LANES, [&](auto c, int line) {
    in_pieces<MAX_ROWS>(rows, [&](auto r, int row) {
      product<T, r.value, c.value>(a + row * a_stride, a_stride, b + line * LANES, b_stride, words,
                                   out + row * out_stride + line * LANES, out_stride);
    });
  });
}

// A thread's working memory, reused between calls: 32-bit words, except for scores and results.
struct Scratch {
  std::vector<uint32_t> q, keys, values, p, row;
  std::vector<float> scores, out;
};

struct Chunk {
  int32_t start, length;  // of the sequence, in tokens
  int32_t first;          // position of the chunk's first query
};

template <class T>
struct Encoder {
  using F = Factor<T>;

  Heads<T> q, k, v;
  int heads, kv_heads, dim;
  float scale;
  int reach;  // how many tokens to each side a token attends to; -1: all
  Biases biases;
  T* out;     // [tokens, heads, dim]

  static constexpr int P = PAIR<F>;
  int padded() const { return (dim + LANES - 1) / LANES * LANES; }
  int words() const { return padded() / P; }

  // Copies a row as words, padded with zeros.
  void copy(const T* from, uint32_t* to) const {
    memset(to, 0, padded() * sizeof(F));
    copy_factors(from, dim, reinterpret_cast<F*>(to));
  }

  // Packs the keys [from, to) of the sequence as [words][width], and their values as [width / P][padded].
  void pack(const Chunk& chunk, int head, int from, int to, int width, Scratch& s) const {
    s.keys.resize(words() * width), s.values.resize(width / P * padded());
    s.row.assign(LANES * words() + LANES, 0);
    for (int i = 0; i < width; i += LANES) {
      for (int j = 0; j < LANES; j++) {
        if (from + i + j < to) copy(k.row(chunk.start + from + i + j, head), &s.row[j * words()]);
        else memset(&s.row[j * words()], 0, padded() * sizeof(F));
      }
      for (int w = 0; w < words(); w += LANES) {
        u32x16 block[LANES];
        for (int j = 0; j < LANES; j++) block[j] = load_words(&s.row[j * words() + w]);
        transpose(block);
        for (int j = 0; j < std::min(LANES, words() - w); j++)
          store(&s.keys[(w + j) * width + i], block[j]);
      }
    }
    std::fill(s.values.begin(), s.values.end(), 0u);
    F *values = reinterpret_cast<F*>(s.values.data()), *row = reinterpret_cast<F*>(s.row.data());
    for (int i = 0; from + i < to; i++) {
      copy_factors(v.row(chunk.start + from + i, head), dim, row);
      F* at = values + int64_t(i / P) * padded() * P + i % P;
      for (int d = 0; d < dim; d++) at[d * P] = row[d];
    }
  }

  // Turns scores into unnormalized probabilities and returns their sum. Keys outside [begin, end) get weight 0. ahead:
  // position of the first key minus the query's.
  template <bool BIASED>
  float softmax(float* scores, int begin, int end, int width, int head, int ahead, F* p) const {
    f32x16 top = splat(-std::numeric_limits<float>::infinity());
    for (int i = 0; i < width; i += LANES) {
      const i32x16 key = LANE + i;
      f32x16 x = load(scores + i) * (scale * LOG2_E);
      if (BIASED) x += biases.of(head, ahead + i) * LOG2_E;
      const f32x16 seen = where((key >= begin) & (key < end), x, splat(-std::numeric_limits<float>::infinity()));
      store(scores + i, seen);
      top = larger(top, seen);
    }
    const float base = maximum(top);
    f32x16 sums = {};
    for (int i = 0; i < width; i += LANES) {
      const f32x16 e = quire::exp2(load(scores + i) - base);
      sums += e;
      store(p + i, e);
    }
    return sum(sums);
  }

  void run(const Chunk& chunk, int head, Scratch& s) const {
    const int last = std::min(chunk.first + CHUNK, chunk.length);
    const int from = reach < 0 ? 0 : std::max(0, chunk.first - reach);
    const int to = reach < 0 ? chunk.length : std::min(chunk.length, last + reach);
    const int width = (to - from + LANES - 1) / LANES * LANES;
    pack(chunk, head / (heads / kv_heads), from, to, width, s);
    s.q.resize(TILE * words()), s.p.resize(TILE * width / P);
    s.scores.resize(TILE * width), s.out.resize(TILE * padded());
    for (int first = chunk.first; first < last; first += TILE) {
      const int rows = std::min(TILE, last - first);
      for (int r = 0; r < rows; r++) copy(q.row(chunk.start + first + r, head), &s.q[r * words()]);
      multiply<F>(s.q.data(), words(), rows, s.keys.data(), width, words(), s.scores.data(), width);
      float sums[TILE];
      for (int r = 0; r < rows; r++) {
        const int begin = reach < 0 ? 0 : std::max(0, first + r - reach - from);
        const int end = reach < 0 ? to - from : std::min(to, first + r + reach + 1) - from;
        float* scores = &s.scores[r * width];
        F* p = reinterpret_cast<F*>(s.p.data()) + r * width;
        sums[r] = biases.table ? softmax<true>(scores, begin, end, width, head, from - first - r, p)
                               : softmax<false>(scores, begin, end, width, head, from - first - r, p);
      }
      multiply<F>(s.p.data(), width / P, rows, s.values.data(), padded(), width / P, s.out.data(), padded());
      for (int r = 0; r < rows; r++) {
        T* result = out + (int64_t(chunk.start + first + r) * heads + head) * dim;
        const float factor = 1 / sums[r];
        for_lanes(dim, [&](int64_t i, int n) { store_up_to(result + i, load(&s.out[r * padded() + i]) * factor, n); });
      }
    }
  }
};

}  // namespace

extern "C" {

// starts: [sequences + 1], where each sequence begins in q, k and v. biases: null for none.
void quire_encoder_attention(int dtype, const void* q, int64_t q_stride, int64_t q_head_stride, const void* k,
                             int64_t k_stride, int64_t k_head_stride, const void* v, int64_t v_stride,
                             int64_t v_head_stride, const int32_t* starts, int sequences, int heads, int kv_heads,
                             int dim, float scale, int reach, const float* biases, int farthest, void* out,
                             int threads) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    const Encoder<T> encoder{{(const T*)q, q_stride, q_head_stride}, {(const T*)k, k_stride, k_head_stride},
                             {(const T*)v, v_stride, v_head_stride}, heads, kv_heads, dim, scale, reach,
                             {biases, farthest}, (T*)out};
    std::vector<Chunk> chunks;
    for (int i = 0; i < sequences; i++)
      for (int first = 0, length = starts[i + 1] - starts[i]; first < length; first += CHUNK)
        chunks.push_back({starts[i], length, first});
    const int items = int(chunks.size()) * heads;
    std::atomic<int> counter{0};
    together(items > 1 ? threads : 1, [&] {
      thread_local Scratch scratch;
      for (int item; (item = counter++) < items;) encoder.run(chunks[item / heads], item % heads, scratch);
    });
  });
}
}

RECORDABLE(quire_encoder_attention)
