#include "team.h"

#include <sched.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "upcoming.h"

namespace quire {

namespace {

constexpr int SPINS = 200;                                // a few microseconds; then the core is yielded
constexpr std::chrono::microseconds AWAKE{1000};          // much longer than the gap between two operations

thread_local int place = 0;

class Team {
 public:
  void call(int threads, void (*work)(void*), void* context, const Weights* weights) {
    std::unique_lock<std::mutex> only(calling_, std::try_to_lock);
    if (!only) return work(context);  // the team is busy with another thread's work
    grow(threads - 1);
    if (weights) upcoming_.begin(*weights);
    work_ = work, context_ = context;
    places_ = threads - 1;
    round_.fetch_add(1);  // odd: members may join
    if (asleep_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleeping_);
      wake_.notify_all();
    }
    work(context);
    round_.fetch_add(1);
    for (int spins = 0; present_.load() > 0; spins++) spins < SPINS ? pause() : void(sched_yield());
  }

 private:
  void grow(int members) {
    for (; size_ < members; size_++) std::thread([this, number = size_ + 1] { live(number); }).detach();
  }

  void live(int number) {
    place = number;
    Upcoming::Progress fetched;
    for (uint64_t seen = 0;;) {
      const uint64_t round = await(seen, fetched);
      present_.fetch_add(1);
      // Counted in present_ before this check: `call` does not change the round's fields until present_ is 0.
      if (round_.load() == round && places_.fetch_sub(1) > 0) work_(context_);
      present_.fetch_sub(1);
      seen = round;
    }
  }

  // Waits for an open round other than `seen`.
  uint64_t await(uint64_t seen, Upcoming::Progress& fetched) {
    auto is_new = [&](uint64_t round) { return round % 2 == 1 && round != seen; };
    for (int spins = 0; spins < SPINS; spins++) {
      if (const uint64_t round = round_.load(); is_new(round)) return round;
      if (!upcoming_.fetch(place, fetched)) pause();
    }
    const auto end = std::chrono::steady_clock::now() + AWAKE;
    while (std::chrono::steady_clock::now() < end) {
      if (const uint64_t round = round_.load(); is_new(round)) return round;
      if (!upcoming_.fetch(place, fetched)) sched_yield();
    }
    std::unique_lock<std::mutex> lock(sleeping_);
    asleep_.fetch_add(1);
    uint64_t round;
    wake_.wait(lock, [&] { return is_new(round = round_.load()); });
    asleep_.fetch_sub(1);
    return round;
  }

  Upcoming upcoming_;
  alignas(64) std::atomic<uint64_t> round_{0};
  alignas(64) std::atomic<int> present_{0};
  std::atomic<int> places_{0}, asleep_{0};
  void (*work_)(void*) = nullptr;
  void* context_ = nullptr;
  int size_ = 0;
  std::mutex calling_, sleeping_;
  std::condition_variable wake_;
};

}  // namespace

int place_in_team() { return place; }

void call_team(int threads, void (*work)(void*), void* context, const Weights* weights) {
  static Team* team = new Team;  // never destroyed: its members may outlive everything
  team->call(threads, work, context, weights);
}

}  // namespace quire
