// Top-k and top-p without sorting the vocabulary (defined in ops/reference/sampling.py). A row's tokens are counted in
// buckets by the distance of their logits from the largest one. Only the bucket that contains the border between kept
// and removed tokens is sorted.
#include <algorithm>
#include <limits>
#include <vector>

#include "team.h"
#include "vector.h"

using namespace quire;

namespace {

constexpr int BUCKETS = 512, PER_UNIT = 16;  // the last one has all logits 32 or more below the largest: p ratio e^-32
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity(), LOG2_E = 1.4426950408889634f;

struct Token {
  float logit;
  int32_t id;
};

struct Row {
  std::vector<int16_t> bucket_of;  // of each token; BUCKETS where the logit is -inf
  std::vector<Token> border;
  int32_t counts[BUCKETS + 1];
  double masses[BUCKETS + 1];  // relative to the largest probability

  void truncate(float* logits, int64_t vocab, int64_t top_k, float top_p) {
    f32x16 tops = splat(MINUS_INFINITY);
    for_lanes(vocab, [&](int64_t i, int n) {
      for_each_lane(logits + i, n, MINUS_INFINITY, [&](f32x16 v) { tops = larger(tops, v); });
    });
    const float top = maximum(tops);
    if (top == MINUS_INFINITY) return;
    count(logits, vocab, top);
    int last = 0;       // the bucket with the border; BUCKETS for none
    int64_t stay = 0;   // how many of its tokens are kept
    double mass = 0;    // of the kept tokens
    for (stay = top_k; last < BUCKETS && counts[last] < stay; last++) stay -= counts[last], mass += masses[last];
    if (last < BUCKETS) mass += sort(logits, vocab, last, top, stay);
    if (top_p < 1) {
      double missing = (top_p - 1e-7) * mass;  // the sums are only this accurate
      int bucket = 0;
      for (; bucket < last && masses[bucket] < missing; bucket++) missing -= masses[bucket];
      if (bucket < last) sort(logits, vocab, bucket, top, stay = counts[bucket]);
      last = bucket;
      int64_t reached = 0;
      if (last < BUCKETS)
        for (; reached < stay && (missing > 0 || (last == 0 && reached == 0)); reached++)
          missing -= mass_of(border[reached].logit, top);
      stay = reached;
    }
    if (last == BUCKETS) return;
    for (int64_t i = 0; i < vocab; i++)
      if (bucket_of[i] > last) logits[i] = MINUS_INFINITY;
    for (size_t i = stay; i < border.size(); i++) logits[border[i].id] = MINUS_INFINITY;
  }

  template <class F>
  static void for_each_lane(const float* p, int n, float filler, F f) {
    if (n == LANES) return f(load(p));
    float part[LANES];
    std::fill(part, part + LANES, filler);
    std::copy(p, p + n, part);
    f(load(part));
  }

  void count(const float* logits, int64_t vocab, float top) {
    bucket_of.resize(vocab + LANES);
    std::fill(counts, counts + BUCKETS + 1, 0);
    std::fill(masses, masses + BUCKETS + 1, 0.0);
    for_lanes(vocab, [&](int64_t i, int n) {
      for_each_lane(logits + i, n, MINUS_INFINITY, [&](f32x16 v) {
        const f32x16 below = top - v, place = below * float(PER_UNIT);
        const i32x16 bucket = to_int(where(place < BUCKETS - 1.0f, place, splat(BUCKETS - 1.0f)));
        const f32x16 mass = exp2(below * -LOG2_E);
        for (int j = 0; j < n; j++) {
          const int b = v[j] == MINUS_INFINITY ? BUCKETS : bucket[j];
          bucket_of[i + j] = int16_t(b), counts[b]++, masses[b] += mass[j];
        }
      });
    });
  }

  static double mass_of(float logit, float top) { return exp2(splat((logit - top) * LOG2_E))[0]; }

  // Collects the tokens of a bucket in `border`, the best ones first, and returns the mass of the first n.
  double sort(const float* logits, int64_t vocab, int bucket, float top, int64_t n) {
    border.clear();
    for (int64_t i = 0; i < vocab; i++)
      if (bucket_of[i] == bucket) border.push_back({logits[i], int32_t(i)});
    std::sort(border.begin(), border.end(), [](const Token& a, const Token& b) {
      return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
    });
    double mass = 0;
    for (int64_t i = 0; i < std::min<int64_t>(n, border.size()); i++) mass += mass_of(border[i].logit, top);
    return mass;
  }
};

}  // namespace

// In place. top_k, top_p: [rows] or null.
extern "C" void quire_keep_top_k_top_p(float* logits, int64_t stride, int64_t rows, int64_t vocab, const int64_t* top_k,
                                       const float* top_p, int threads) {
  for_each(rows, threads, [&](int64_t row) {
    thread_local Row kept;
    const int64_t k = top_k && top_k[row] < vocab ? top_k[row] : std::numeric_limits<int64_t>::max();
    const float p = top_p ? top_p[row] : 1;
    if (k <= vocab || p < 1) kept.truncate(logits + row * stride, vocab, k, p);
  });
}
