// The limits of a machine's memory and arithmetic units, measured with plain loops that do nothing else.

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

typedef uint64_t u64x8 __attribute__((vector_size(64)));

std::atomic<uint64_t> sink;  // takes every result, so that no loop can be left out

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Runs work(thread) on `threads` threads that start together; returns the seconds of the slowest one.
template <class Work>
double together(int threads, Work work) {
  std::atomic<int> waiting{threads};
  std::vector<double> seconds(threads);
  auto run = [&](int thread) {
    waiting--;
    while (waiting > 0) {
    }
    auto start = std::chrono::steady_clock::now();
    work(thread);
    seconds[thread] = seconds_since(start);
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; t++) others.emplace_back(run, t);
  run(0);
  for (auto& other : others) other.join();
  double slowest = 0;
  for (double s : seconds) slowest = s > slowest ? s : slowest;
  return slowest;
}

// Reads [begin, end) in `STREAMS` sequential streams, as a matrix-vector product over that many rows would.
template <int STREAMS>
void read(const char* begin, const char* end) {
  constexpr int LINE = 64, AHEAD = 32 * LINE;
  int64_t length = (end - begin) / STREAMS / LINE * LINE;
  u64x8 sums[STREAMS][4] = {};
  for (int64_t at = 0; at + 4 * LINE <= length; at += 4 * LINE) {
    for (int s = 0; s < STREAMS; s++) {
      const char* p = begin + s * length + at;
      for (int j = 0; j < 4; j++) {
        __builtin_prefetch(p + AHEAD + j * LINE);
        u64x8 v;
        memcpy(&v, p + j * LINE, LINE);
        sums[s][j] += v;
      }
    }
  }
  u64x8 sum = {};
  for (auto& stream : sums) {
    for (auto& part : stream) sum += part;
  }
  sink += sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

// Independent chains keep the units busy through the latency of each operation. Their indices are constants, so the
// chains stay in registers.
constexpr int CHAINS = 16;

template <class Vector, class Step, size_t... I>
void multiply(int64_t rounds, Step step, std::index_sequence<I...>) {
  Vector chains[CHAINS] = {};
  for (int64_t i = 0; i < rounds; i++) {
    ((chains[I] = step(chains[I])), ...);
    (([&] { asm volatile("" : "+v"(chains[I])); }()), ...);  // as if something else read it: no step can be left out
  }
  Vector sum = {};
  ((sum += chains[I]), ...);
  uint64_t word;
  memcpy(&word, &sum, sizeof(word));
  sink += word;
}

template <class Vector, class Step>
void multiply(int64_t rounds, Step step) {
  multiply<Vector>(rounds, step, std::make_index_sequence<CHAINS>());
}

}  // namespace

extern "C" {

// `bytes` of memory, on huge pages if available, first touched by the threads that will read it; null on failure.
void* quire_allocate(int64_t bytes, int32_t threads) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  madvise(data, bytes, MADV_HUGEPAGE);
  together(threads, [&](int t) {
    int64_t begin = bytes / threads * t, end = t + 1 == threads ? bytes : bytes / threads * (t + 1);
    memset(static_cast<char*>(data) + begin, t + 1, end - begin);
  });
  return data;
}

void quire_free(void* data, int64_t bytes) { munmap(data, bytes); }

// Seconds that the threads take to read all regions, each thread its part of every region, in 1, 2 or 4 streams.
double quire_read(const void* const* regions, const int64_t* bytes, int64_t count, int32_t threads, int32_t streams) {
  return together(threads, [&](int t) {
    for (int64_t i = 0; i < count; i++) {
      const char* region = static_cast<const char*>(regions[i]);
      int64_t part = bytes[i] / threads / 64 * 64;
      const char* begin = region + part * t;
      const char* end = t + 1 == threads ? region + bytes[i] : begin + part;
      (streams == 1 ? read<1> : streams == 2 ? read<2> : read<4>)(begin, end);
    }
  });
}

// Seconds for moving a cache line from one processor to another, averaged over many round trips.
double quire_hop(int32_t here, int32_t there, int64_t ways) {
  alignas(64) std::atomic<int> turn{0};
  double seconds = 0;
  auto run = [&](int processor, int mine) {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(processor, &only);
    pthread_setaffinity_np(pthread_self(), sizeof(only), &only);
    auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < ways; i++) {
      while (turn.load() != mine) {
      }
      turn.store(1 - mine);
    }
    if (mine) seconds = seconds_since(start);
  };
  std::thread first(run, here, 0), second(run, there, 1);
  first.join(), second.join();
  return seconds / static_cast<double>(2 * ways);
}

// Operations per second in registers (a multiply-add counts as two). kind 0: float32, 1: bfloat16 dot products, 2: int8
// dot products. Returns 0 if this processor has no 512-bit instruction for it.
double quire_product_rate(int32_t kind, int32_t threads, int64_t rounds) {
  int64_t operations = 0;
  double seconds = 1;
#ifdef __AVX512F__
  if (kind == 0) {
    operations = 2 * 16;
    seconds = together(threads, [&](int t) {
      __m512 a = _mm512_set1_ps(t + 0.5f), b = _mm512_set1_ps(t + 0.25f);
      multiply<__m512>(rounds, [&](__m512 c) { return _mm512_fmadd_ps(a, b, c); });
    });
  }
#endif
#ifdef __AVX512BF16__
  if (kind == 1) {
    operations = 2 * 32;
    seconds = together(threads, [&](int t) {
      __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f803f00 + t), b = (__m512bh)_mm512_set1_epi32(0x3f003f80 + t);
      multiply<__m512>(rounds, [&](__m512 c) { return _mm512_dpbf16_ps(c, a, b); });
    });
  }
#endif
#ifdef __AVX512VNNI__
  if (kind == 2) {
    operations = 2 * 64;
    seconds = together(threads, [&](int t) {
      __m512i a = _mm512_set1_epi32(0x01020304 + t), b = _mm512_set1_epi32(0x04030201 + t);
      multiply<__m512i>(rounds, [&](__m512i c) { return _mm512_dpbusd_epi32(c, a, b); });
    });
  }
#endif
  return operations * CHAINS * threads * static_cast<double>(rounds) / seconds;
}
}
