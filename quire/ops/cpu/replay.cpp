// Replays recorded calls (recording.py) in order. Each is stored as [function, number of words, words ...].
#include "replay.h"

extern "C" void quire_replay(const int64_t* calls, int64_t count) {
  for (const int64_t* end = calls + count; calls < end; calls += 2 + calls[1])
    reinterpret_cast<void (*)(const int64_t*)>(calls[0])(calls + 2);
}
