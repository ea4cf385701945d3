// Predicts the weights that will be read next, so that threads without work can prefetch their shares. Otherwise memory
// would be idle between steps and while a single thread works.
//
// Every step reads a model's weights in the same order, so the prediction is what came next last time. A wrong
// prediction only evicts other data from the caches, even if the weights have been freed.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "team.h"

namespace quire {

class Upcoming {
 public:
  // The state of a thread's prefetching.
  struct Progress {
    int current = -1;   // index of the weights that were being read when the thread last checked
    int next = 0;       // index of the weights that it prefetches
    int64_t bytes = 0;  // bytes of its share that are prefetched
    int64_t left = 0;   // bytes that it may still prefetch until other weights are read
  };

  // Announces the weights that are read from now on. Must not be called concurrently.
  void begin(const Weights& weights) {
    int at = following(current_);
    if (!is(at, weights)) at = 0;
    if (!is(at, weights)) at = (current_ + 1) % MOST, length_ = at + 1;
    order_[at] = weights, current_ = at;
  }

  // Prefetches a few lines of a thread's share. Returns false when it has prefetched enough for now.
  bool fetch(int place, Progress& progress) const {
    const int current = current_, length = length_;
    if (!length) return false;
    if (progress.current != current) {
      const int distance = (progress.next - current + length) % length;
      if (progress.next >= length || distance == 0 || distance > FARTHEST)
        progress.next = following(current), progress.bytes = 0;
      progress.current = current, progress.left = ENOUGH;
    }
    if (progress.left <= 0) return false;
    const Entry& entry = order_[progress.next];
    const int64_t parts = entry.parts, units = entry.units, unit = entry.unit, part = place % parts;
    const int64_t begin = units * part / parts * unit, size = units * (part + 1) / parts * unit - begin;
    const char* from = entry.first + begin + progress.bytes;
    for (int i = 0; i < LINES; i++) __builtin_prefetch(from + i * 64, 0, 2);
    progress.bytes += LINES * 64, progress.left -= LINES * 64;
    if (progress.bytes >= size) progress.next = following(progress.next), progress.bytes = 0;
    return true;
  }

 private:
  static constexpr int MOST = 4096, FARTHEST = 8;  // products
  static constexpr int LINES = 8;                  // per call: new work waits for them
  static constexpr int64_t ENOUGH = 4 << 20;       // bytes; with 8 MB, a step is not faster

  // A number that threads may read while it changes. At worst, they prefetch the wrong lines.
  template <class T>
  struct Relaxed {
    std::atomic<T> value;

    Relaxed(T first = {}) : value(first) {}
    operator T() const { return value.load(std::memory_order_relaxed); }
    void operator=(T other) { value.store(other, std::memory_order_relaxed); }
  };

  struct Entry {
    Relaxed<const char*> first;
    Relaxed<int64_t> unit, units;
    Relaxed<int> parts{1};

    void operator=(const Weights& w) { first = w.first, unit = w.unit, units = w.units, parts = w.parts; }
  };

  bool is(int at, const Weights& weights) const { return at < length_ && order_[at].first == weights.first; }
  int following(int at) const { return at + 1 < length_ ? at + 1 : 0; }

  std::array<Entry, MOST> order_;  // in the order of a step's products
  Relaxed<int> length_, current_{-1};
};

}  // namespace quire
