// Verification of drafts (see ops/reference/drafts.py).
#include <algorithm>
#include <cmath>
#include <limits>

#include "noise.h"
#include "team.h"
#include "vector.h"

using namespace quire;

namespace {

constexpr int64_t SLICE = 4096;  // tokens that are read twice, the second time from the L1 cache
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity(), LOG2_E = 1.4426950408889634f;
constexpr float MAX_QUOTIENT = 1.7e7f;  // 1 / -log(u) is at most 2^24, see uniform()

inline f32x16 exponential(f32x16 logits, float top) { return exp2((logits - top) * LOG2_E); }

// The probabilities of a row of logits: exp(logit - top) * factor.
struct Softmax {
  const float* row;
  int64_t vocab;
  float top = MINUS_INFINITY, factor;

  Softmax(const float* row, int64_t vocab) : row(row), vocab(vocab) {
    float total = 0;
    for (int64_t begin = 0; begin < vocab; begin += SLICE) {
      const int64_t end = std::min(begin + SLICE, vocab);
      f32x16 tops = splat(top), sums = {};
      i32x16 is_nan = {};
      for (int64_t t = begin; t < end; t += LANES) {
        const f32x16 v = logits(t);
        tops = larger(v, tops), is_nan |= v != v;
      }
      const float before = top;
      top = maximum(tops);
      if (any(is_nan) || top == -MINUS_INFINITY) total = NAN;
      if (top == MINUS_INFINITY) continue;
      for (int64_t t = begin; t < end; t += LANES) sums += exponential(logits(t), top);
      total = total * exponential(splat(before), top)[0] + sum(sums);
    }
    factor = 1 / total;
  }

  bool exists() const { return factor < -MINUS_INFINITY; }  // false with NaN or infinity, or if all logits are -inf
  f32x16 of(f32x16 logits) const { return exponential(logits, top) * factor; }
  float of(int64_t token) const { return of(splat(row[token]))[0]; }

  // Returns the logits of 16 tokens, -inf beyond the vocabulary.
  f32x16 logits(int64_t token) const {
    if (token + LANES <= vocab) return load(row + token);
    float tail[LANES];
    for (int i = 0; i < LANES; i++) tail[i] = token + i < vocab ? row[token + i] : MINUS_INFINITY;
    return load(tail);
  }
};

// Returns the token with the largest (p - q) / -log(u), or p / -log(u) without q; -1 if p > q for no token.
int64_t draw(const Softmax& p, const Softmax* q, uint32_t position, uint64_t seed) {
  int64_t best = -1;
  float largest = 0;
  float bound = MINUS_INFINITY;  // tokens with smaller logits cannot win, whatever their noise
  for (int64_t token = 0; token < p.vocab; token += GROUP) {
    f32x16 a = p.logits(token), b = p.logits(token + LANES);
    if (!any(larger(a, b) > bound)) continue;
    a = p.of(a), b = p.of(b);
    if (q) a -= q->of(q->logits(token)), b -= q->of(q->logits(token + LANES));
    if (!any(larger(a, b) * MAX_QUOTIENT > largest)) continue;
    u32x16 words[2];
    philox(uint32_t(token / 4), position, seed, words);
    a /= -log(uniform(words[0]));
    b /= -log(uniform(words[1]));
    if (!any(larger(a, b) > largest)) continue;
    float values[GROUP];
    store(values, a);
    store(values + LANES, b);
    for (int i = 0; i < GROUP; i++)
      if (values[i] > largest) largest = values[i], best = token + i;
    bound = p.top + std::log(largest / MAX_QUOTIENT / p.factor) - 1e-3f;
  }
  return best;
}

int64_t accept_or_resample(const Softmax& p, const Softmax& q, int64_t draft, uint32_t position,
                           uint64_t acceptance_seed, uint64_t resampling_seed) {
  if (!p.exists()) return 0;
  const float q_draft = q.exists() ? q.of(draft) : 0;
  if (q_draft == 0) return draw(p, nullptr, position, resampling_seed);
  u32x16 words[2];
  philox(0, position, acceptance_seed, words);
  if (uniform(words[0])[0] * q_draft < p.of(draft)) return draft;
  const int64_t token = draw(p, &q, position, resampling_seed);
  return token < 0 ? draft : token;  // p and q differ only by rounding
}

}  // namespace

extern "C" {

void quire_count_kept(const int32_t* token_ids, int64_t stride, const int64_t* rows, const int64_t* positions,
                      const int64_t* sampled, const int64_t* place_start_loc, int64_t requests, int64_t* kept) {
  for (int64_t request = 0; request < requests; request++) {
    const int64_t begin = place_start_loc[request], end = place_start_loc[request + 1];
    int64_t place = begin;
    while (place + 1 < end && token_ids[rows[place] * stride + positions[place] + 1] == sampled[place]) place++;
    kept[request] = begin < end ? place + 1 - begin : 0;
  }
}

// acceptance, resampling: the constants of the two noise streams.
void quire_accept_or_resample(const float* p, int64_t p_stride, const float* q, int64_t q_stride, int64_t places,
                              int64_t vocab, const int64_t* drafts, const int64_t* seeds, const int64_t* positions,
                              int64_t acceptance, int64_t resampling, int64_t* tokens, int threads) {
  // One thread processes a whole place, so that the rows are still in its cache when it samples.
  for_each(places, places * vocab > 16384 ? threads : 1, [=](int64_t i) {
    const Softmax target(p + i * p_stride, vocab), drafter(q + i * q_stride, drafts[i] < 0 ? 0 : vocab);
    tokens[i] = accept_or_resample(target, drafter, drafts[i], uint32_t(positions[i]), uint64_t(seeds[i] ^ acceptance),
                                   uint64_t(seeds[i] ^ resampling));
  });
}
}
