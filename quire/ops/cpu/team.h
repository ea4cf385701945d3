// A team of threads for work that is divided into items, which its members draw one by one.
//
// Members join when they can. If another program occupies a member's core, the others do its share instead of waiting
// (with OpenMP's barriers, one other busy program made a decoding step take 3 times as long). Between calls, members
// poll for work for a while, yielding the core, and then sleep.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace quire {

// Hints to the processor that this thread waits in a loop.
inline void pause() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // "yield" does nothing on most processors
#endif
}

// The weights that a call reads: `units` units of `unit` bytes. Each of `parts` threads starts with its own range of
// them.
struct Weights {
  const char* first;
  int64_t unit, units;
  int parts;
};

// The calling thread's number in the team; 0 if it is not a member.
int place_in_team();

// Calls work(context) in this thread, and in those members of a team of `threads` that join before this call has
// finished. Returns when all calls have finished. `work` must draw its items from a shared counter. weights: those of a
// product with few rows, or null; waiting members prefetch the weights that usually come next (upcoming.h).
void call_team(int threads, void (*work)(void*), void* context, const Weights* weights = nullptr);

// Calls f() in up to `threads` threads, as many as join.
template <class F>
inline void together(int threads, F f, const Weights* weights = nullptr) {
  if (threads <= 1) return f();
  call_team(threads, [](void* context) { (*static_cast<F*>(context))(); }, &f, weights);
}

// Calls f(i) for 0 <= i < count, in runs of consecutive i: four per thread, but none shorter than `least`.
template <class F>
inline void for_each(int64_t count, int threads, F f, int64_t least = 1) {
  const int64_t run = std::max(least, (count + 4 * threads - 1) / (4 * std::max(threads, 1)));
  std::atomic<int64_t> next{0};
  together(count > run ? threads : 1, [&] {
    for (int64_t i; (i = next.fetch_add(run)) < count;)
      for (const int64_t end = std::min(i + run, count); i < end; i++) f(i);
  });
}

}  // namespace quire
