// Assigns tokens to experts: chooses experts by the router's scores, and sorts the tokens by expert.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "replay.h"
#include "team.h"
#include "vector.h"

using namespace quire;

namespace {

enum Scoring { SOFTMAX, SIGMOID, SPARSE_MIXER, SQRT_SOFTPLUS };  // as in routing.py

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504f;
constexpr int64_t PARALLEL_ELEMENTS = 16384;  // with less work, one thread finishes before a second one wakes up

// Returns the index of the largest element, the first one if several are equal.
int64_t largest(const float* x, int64_t n) {
  f32x16 best = splat(MINUS_INFINITY);
  i32x16 at = {};
  for_lanes(n, [&](int64_t i, int lanes) {
    f32x16 v = load_up_to(x + i, lanes);
    if (lanes < LANES) v = where(LANE < lanes, v, splat(MINUS_INFINITY));
    const i32x16 index = LANE + int32_t(i), is_better = v > best;
    best = where(is_better, v, best);
    at = where(is_better, index, at);
  });
  const float top = maximum(best);
  int64_t first = n;
  for (int i = 0; i < LANES; i++)
    if (best[i] == top && at[i] < first) first = at[i];
  return first < n ? first : 0;
}

// out = softmax of x.
void softmax(const float* x, int64_t n, float* out) {
  f32x16 top = splat(MINUS_INFINITY), total = {};
  for_lanes(n, [&](int64_t i, int lanes) {
    const f32x16 v = load_up_to(x + i, lanes);
    top = larger(top, lanes < LANES ? where(LANE < lanes, v, splat(MINUS_INFINITY)) : v);
  });
  const float most = maximum(top);
  for_lanes(n, [&](int64_t i, int lanes) {
    f32x16 e = exp2((load_up_to(x + i, lanes) - most) * LOG2_E);
    if (lanes < LANES) e = where(LANE < lanes, e, f32x16{});
    total += e;
    store_up_to(out + i, e, lanes);
  });
  const float scale = 1.0f / sum(total);
  for_lanes(n, [&](int64_t i, int lanes) { store_up_to(out + i, load_up_to(out + i, lanes) * scale, lanes); });
}

struct Router {
  int64_t experts;
  const float* bias;  // [experts] or null: added to the scores for the selection only
  Scoring scoring;
  int64_t top_k;
  bool normalize;
  float scale, jitter;
  int64_t groups, topk_groups;
  bool two_best;  // a group's score is the sum of its two best scores, not the best one

  // memory: [4 * experts], scratch.
  void choose(float* logits, float* memory, float* weights, int64_t* chosen) const {
    if (scoring == SPARSE_MIXER) return mix(logits, memory, weights, chosen);
    float *scores = memory, *choice = scores + experts;
    if (scoring == SOFTMAX) softmax(logits, experts, scores);
    else if (scoring == SQRT_SOFTPLUS)
      for (int64_t e = 0; e < experts; e++)
        scores[e] = std::sqrt(logits[e] > 20.0f ? logits[e] : std::log1p(std::exp(logits[e])));
    else
      for_lanes(experts, [&](int64_t i, int n) {
        f32x16 exponent = load_up_to(logits + i, n) * -LOG2_E;
        store_up_to(scores + i, 1.0f / (1.0f + exp2(where(exponent > 126.0f, splat(126.0f), exponent))), n);
      });
    for (int64_t e = 0; e < experts; e++) choice[e] = bias ? scores[e] + bias[e] : scores[e];
    if (groups > 1) exclude_groups(choice, choice + experts);
    float total = 0;
    for (int64_t k = 0; k < top_k; k++) {
      const int64_t best = largest(choice, experts);
      choice[best] = MINUS_INFINITY;
      chosen[k] = best;
      total += weights[k] = scores[best];
    }
    const float factor = normalize ? scale / (total + 1e-20f) : scale;
    for (int64_t k = 0; k < top_k; k++) weights[k] *= factor;
  }

  // Excludes experts outside the best groups from selection. of_groups: [groups], scratch.
  void exclude_groups(float* choice, float* of_groups) const {
    const int64_t size = experts / groups;
    for (int64_t g = 0; g < groups; g++) {
      float *group = choice + g * size, first = group[largest(group, size)], second = 0;
      if (two_best) {
        const int64_t best = largest(group, size);
        group[best] = MINUS_INFINITY;
        second = group[largest(group, size)];
        group[best] = first;
      }
      of_groups[g] = first + second;
    }
    for (int64_t k = 0; k < topk_groups; k++) of_groups[largest(of_groups, groups)] = MINUS_INFINITY;
    for (int64_t g = 0; g < groups; g++)
      if (of_groups[g] != MINUS_INFINITY)
        for (int64_t e = g * size; e < (g + 1) * size; e++) choice[e] = MINUS_INFINITY;
  }

  // SparseMixer-v2, see the reference.
  void mix(const float* logits, float* memory, float* weights, int64_t* chosen) const {
    float *left = memory, *near = left + experts, *shares = near + experts;
    memcpy(left, logits, experts * sizeof(float));
    for (int64_t k = 0; k < 2; k++) {
      const int64_t best = largest(left, experts);
      const float top = left[best];
      for (int64_t e = 0; e < experts; e++)
        near[e] = (top - logits[e]) / std::max(std::abs(logits[e]), top) > 2 * jitter ? MINUS_INFINITY : left[e];
      softmax(near, experts, shares);
      weights[k] = shares[best], chosen[k] = best, left[best] = MINUS_INFINITY;
    }
  }
};

}  // namespace

extern "C" {

// logits: [tokens, experts]. scoring: numbered as in routing.py.
void quire_choose_experts(int dtype, const void* logits, int64_t stride, int64_t tokens, int64_t experts,
                          const float* bias, int scoring, int64_t top_k, int normalize, float scale, float jitter,
                          int64_t groups, int64_t topk_groups, int two_best, float* weights, int64_t* chosen,
                          int threads) {
  const Router router{experts, bias, Scoring(scoring), top_k, bool(normalize), scale, jitter, groups, topk_groups,
                      bool(two_best)};
  for_each(tokens, tokens * experts * (top_k + 4) >= PARALLEL_ELEMENTS ? threads : 1, [&](int64_t t) {
    thread_local std::vector<float> kept;
    kept.resize(5 * experts);
    float* row = kept.data();
    with_type(dtype, [&](auto type) {
      const auto* from = (const decltype(type)*)logits + t * stride;
      for_lanes(experts, [&](int64_t i, int n) { store_up_to(row + i, load_up_to(from + i, n), n); });
    });
    router.choose(row, row + experts, weights + t * top_k, chosen + t * top_k);
  });
}

// Gathers rows of x, `bytes` bytes each, by expert. rows: [tokens * top_k], contiguous. experts: [tokens, top_k].
// offsets: [count + 1], each expert's first row. order: [tokens * top_k], the (token, choice) of each row.
void quire_sort_by_expert(const void* x, int64_t stride, int64_t bytes, const int64_t* experts, int64_t tokens,
                          int64_t top_k, int64_t count, void* rows, int64_t* offsets, int64_t* order, int threads) {
  thread_local std::vector<int64_t> kept;
  kept.assign(count + 1, 0);
  int64_t *next = kept.data(), total = 0;
  for (int64_t i = 0; i < tokens * top_k; i++) next[std::min(experts[i], count)]++;
  for (int64_t e = 0; e <= count; e++) {
    offsets[e] = total;
    total += std::exchange(next[e], total);
  }
  for (int64_t i = 0; i < tokens * top_k; i++) order[next[std::min(experts[i], count)]++] = i;
  for_each(tokens * top_k, tokens * top_k * bytes >= 4 * PARALLEL_ELEMENTS ? threads : 1, [=](int64_t row) {
    memcpy((char*)rows + row * bytes, (const char*)x + order[row] / top_k * stride, bytes);
  });
}
}

RECORDABLE(quire_choose_experts)
RECORDABLE(quire_sort_by_expert)
