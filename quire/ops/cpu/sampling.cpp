// Samples one token per row by the Gumbel-max trick, with noise generated on the fly by Philox4x32-10 (see
// ops/reference/sampling.py).
#include <algorithm>
#include <limits>
#include <vector>

#include "noise.h"
#include "team.h"
#include "vector.h"

using namespace quire;

namespace {

// An upper bound of the noise: u is at most 1 - 2^-24 in float32, where -log(-log(u)) is 16.64.
constexpr float MAX_NOISE = 16.7f;

inline f32x16 gumbel(u32x16 words) { return -log(-log(uniform(words))); }

struct Best {
  float value = -std::numeric_limits<float>::infinity();
  int64_t token = 0;
};

// Visits the 32 tokens from `token` on. Skips them if none could win with any noise: after the first few groups, most
// cannot.
inline void visit(const float* logits, int64_t token, uint32_t position, uint64_t seed, Best& best) {
  f32x16 a = load(logits), b = load(logits + LANES);
  if (!any(larger(a, b) + MAX_NOISE > best.value)) return;
  u32x16 words[2];
  philox(uint32_t(token / 4), position, seed, words);
  a += gumbel(words[0]);
  b += gumbel(words[1]);
  if (!any(larger(a, b) > best.value)) return;
  float values[GROUP];
  store(values, a);
  store(values + LANES, b);
  for (int i = 0; i < GROUP; i++)
    if (values[i] > best.value) best = {values[i], token + i};
}

Best visit_slice(const float* logits, int64_t begin, int64_t end, uint32_t position, uint64_t seed) {
  Best best;
  int64_t t = begin;
  for (; t + GROUP <= end; t += GROUP) visit(logits + t, t, position, seed, best);
  if (t < end) {
    float tail[GROUP];
    std::fill(tail, tail + GROUP, -std::numeric_limits<float>::infinity());
    std::copy(logits + t, logits + end, tail);
    visit(tail, t, position, seed, best);
  }
  return best;
}

// Returns the largest logit of a slice, the first one if several are equal.
template <class T>
Best largest(const T* logits, int64_t begin, int64_t end) {
  f32x16 tops = splat(-std::numeric_limits<float>::infinity());
  i32x16 places = {};
  int64_t t = begin;
  for (; t + LANES <= end; t += LANES) {
    const f32x16 v = load(logits + t);
    const i32x16 better = v > tops;
    tops = where(better, v, tops);
    places = where(better, LANE + int32_t(t), places);
  }
  Best best{-std::numeric_limits<float>::infinity(), begin};
  for (int i = 0; i < LANES; i++)
    if (tops[i] > best.value || (tops[i] == best.value && places[i] < best.token)) best = {tops[i], places[i]};
  for (; t < end; t++)
    if (f32x16 v = load_part(logits + t, 1); v[0] > best.value) best = {v[0], t};
  return best;
}

// tokens[row] = the best of visit(row, begin, end) over slices of the row.
template <class F>
void best_of_rows(int64_t rows, int64_t vocab, int64_t* tokens, int threads, F visit) {
  // Enough slices for the threads to finish together, but none too short to be worth starting.
  const int64_t wanted = std::min((4 * threads + rows - 1) / std::max<int64_t>(rows, 1), vocab / 4096 + 1);
  const int64_t size = ((vocab + wanted - 1) / std::max<int64_t>(wanted, 1) + GROUP - 1) / GROUP * GROUP;
  const int64_t slices = (vocab + size - 1) / size;
  thread_local std::vector<Best> kept;
  kept.resize(rows * slices);
  Best* best = kept.data();
  for_each(rows * slices, rows * vocab > 16384 ? threads : 1, [&](int64_t i) {
    best[i] = visit(i / slices, i % slices * size, std::min((i % slices + 1) * size, vocab));
  });
  for (int64_t row = 0; row < rows; row++) {
    Best winner = best[row * slices];
    for (int64_t s = 1; s < slices; s++)
      if (best[row * slices + s].value > winner.value) winner = best[row * slices + s];
    tokens[row] = winner.token;
  }
}

}  // namespace

extern "C" {

void quire_argmax(int dtype, const void* logits, int64_t stride, int64_t rows, int64_t vocab, int64_t* tokens,
                  int threads) {
  with_type(dtype, [&](auto type) {
    const auto* from = (const decltype(type)*)logits;
    best_of_rows(rows, vocab, tokens, threads, [=](int64_t row, int64_t begin, int64_t end) {
      return largest(from + row * stride, begin, end);
    });
  });
}

void quire_sample_gumbel(const float* logits, int64_t stride, int64_t rows, int64_t vocab, const int64_t* seeds,
                         const int64_t* positions, int64_t* tokens, int threads) {
  best_of_rows(rows, vocab, tokens, threads, [=](int64_t row, int64_t begin, int64_t end) {
    return visit_slice(logits + row * stride, begin, end, uint32_t(positions[row]), uint64_t(seeds[row]));
  });
}
}
