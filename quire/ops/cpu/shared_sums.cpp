// Adds up and gathers data across the ranks of one machine, through shared memory.
//
// A rank copies its data into its slot, announces its arrival, waits for the others, and adds up all slots in the order
// of ranks, so that all ranks get the same bits. If a rank needs only its share of the sum, it adds up that part of the
// slots. To gather rows, it copies the other ranks' slots. Even and odd rounds have separate slots. When a rank begins
// a round, all others have arrived at the previous round, so none still reads the slots that it writes.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "replay.h"
#include "team.h"
#include "vector.h"

using namespace quire;

namespace {

constexpr int SPINS = 200;  // a few microseconds; then the core is yielded, perhaps to a rank that this one waits for

struct alignas(64) Arrival {
  std::atomic<uint64_t> round;
};

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

struct Memory {
  char* start;  // an Arrival for each rank, then 2 * ranks slots, all zero at first
  int rank, ranks;
  int64_t slot_bytes;

  // Runs one round: publishes `bytes` bytes to the other ranks, and returns the slots once all ranks have filled
  // theirs.
  const char* exchange(const void* data, int64_t bytes) const {
    Arrival* arrivals = (Arrival*)start;
    const uint64_t round = arrivals[rank].round.load(std::memory_order_relaxed) + 1;
    char* slots = start + ranks * sizeof(Arrival) + round % 2 * ranks * slot_bytes;
    if (bytes) memcpy(slots + rank * slot_bytes, data, bytes);
    arrivals[rank].round.store(round, std::memory_order_release);
    for (int other = 0; other < ranks; other++)
      for (int spins = 0; arrivals[other].round.load(std::memory_order_acquire) < round; spins++)
        spins < SPINS ? pause() : void(sched_yield());
    return slots;
  }
};

// out: [stop - start], the elements [start, stop) of the sum; may be data + start.
template <class T>
void reduce(const T* data, int64_t count, T* out, int64_t start, int64_t stop, const Memory& memory) {
  const int64_t most = memory.slot_bytes / int64_t(sizeof(T));
  for (int64_t first = 0; first < count; first += most) {
    const int64_t size = std::min(count - first, most);
    const char* slots = memory.exchange(data + first, size * sizeof(T));
    const int64_t from = std::max(first, start), to = std::min(first + size, stop);
    if (from < to)
      add_up(out + from - start, slots + (from - first) * sizeof(T), memory.ranks, memory.slot_bytes, to - from);
  }
}

}  // namespace

extern "C" void quire_reduce(int dtype, const void* data, int64_t count, void* out, int64_t start, int64_t stop,
                             void* memory, int rank, int ranks, int64_t slot_bytes) {
  const Memory shared{(char*)memory, rank, ranks, slot_bytes};
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    reduce((const T*)data, count, (T*)out, start, stop, shared);
  });
}
RECORDABLE(quire_reduce)

// data: this rank's part of `out`. out: [total] bytes, in parts of `part` bytes; the last parts may be shorter or
// empty.
extern "C" void quire_gather(const void* data, void* out, int64_t part, int64_t total, void* memory, int rank, int ranks,
                             int64_t slot_bytes) {
  const Memory shared{(char*)memory, rank, ranks, slot_bytes};
  for (int64_t first = 0; first < part; first += slot_bytes) {
    const int64_t most = std::min(part - first, slot_bytes);
    auto size = [&](int of) { return std::clamp(total - of * part - first, int64_t(0), most); };
    const char* slots = shared.exchange((const char*)data + first, size(rank));
    for (int of = 0; of < ranks; of++)
      if (size(of)) memcpy((char*)out + of * part + first, slots + of * slot_bytes, size(of));
  }
}
RECORDABLE(quire_gather)
