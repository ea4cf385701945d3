// Sums over the ranks of a machine, through memory that they share.
//
// A rank copies its summand into a slot of its own, says that it has arrived, waits for the others, and adds up all
// slots in the order of the ranks: so all ranks have the same bits. Slots exist twice, for rounds with even and with odd
// numbers. A rank that begins a round has seen all others arrive at the round before, so nobody still reads the slots
// that it writes.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "replay.h"
#include "vector.h"

using namespace quire;

namespace {

constexpr int SPINS = 200;  // a few microseconds; then the core is offered to others, perhaps to a rank that is awaited

struct alignas(64) Arrival {
  std::atomic<uint64_t> round;
};

inline void pause() {
#ifdef __SSE2__
  _mm_pause();
#endif
}

template <class T>
void add_up(T* out, const char* slots, int ranks, int64_t slot_bytes, int64_t count) {
  auto part = [&](int rank) { return (const T*)(slots + rank * slot_bytes); };
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    f32x16 sum = load(part(0) + i);
    for (int rank = 1; rank < ranks; rank++) sum += load(part(rank) + i);
    store(out + i, sum);
  }
  if (i == count) return;
  f32x16 sum = load_part(part(0) + i, int(count - i));
  for (int rank = 1; rank < ranks; rank++) sum += load_part(part(rank) + i, int(count - i));
  T rest[LANES];
  store(rest, sum);
  memcpy(out + i, rest, (count - i) * sizeof(T));
}

template <class T>
void all_reduce(T* data, int64_t count, char* memory, int rank, int ranks, int64_t slot_bytes) {
  Arrival* arrivals = (Arrival*)memory;
  for (int64_t first = 0; first < count; first += slot_bytes / int64_t(sizeof(T))) {
    const int64_t size = std::min(count - first, slot_bytes / int64_t(sizeof(T)));
    const uint64_t round = arrivals[rank].round.load(std::memory_order_relaxed) + 1;
    char* slots = memory + ranks * sizeof(Arrival) + round % 2 * ranks * slot_bytes;
    memcpy(slots + rank * slot_bytes, data + first, size * sizeof(T));
    arrivals[rank].round.store(round, std::memory_order_release);
    for (int other = 0; other < ranks; other++)
      for (int spins = 0; arrivals[other].round.load(std::memory_order_acquire) < round; spins++)
        spins < SPINS ? pause() : void(sched_yield());
    add_up(data + first, slots, ranks, slot_bytes, size);
  }
}

}  // namespace

// memory: an Arrival for each rank, then 2 * ranks slots of slot_bytes, all zero at first.
extern "C" void quire_all_reduce(int is_bf16, void* data, int64_t count, void* memory, int rank, int ranks,
                                 int64_t slot_bytes) {
  if (is_bf16)
    all_reduce((bf16*)data, count, (char*)memory, rank, ranks, slot_bytes);
  else
    all_reduce((float*)data, count, (char*)memory, rank, ranks, slot_bytes);
}
RECORDABLE(quire_all_reduce)
