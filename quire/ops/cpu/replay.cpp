// Calls that were recorded (recording.py), one after the other: [function, number of words, words ...] each.
#include "replay.h"

extern "C" void quire_replay(const int64_t* calls, int64_t count) {
  for (const int64_t* end = calls + count; calls < end; calls += 2 + calls[1])
    reinterpret_cast<void (*)(const int64_t*)>(calls[0])(calls + 2);
}
