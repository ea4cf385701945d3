// Products with AMX. One instruction multiplies a tile of x (up to 16 rows of 16 words) with a tile of a panel (16
// words for each of 16 outputs), both as stored in memory (panels.h).
//
// With QUIRE_SOFTWARE_TILES, functions with the same results replace the instructions, for tests on other processors.
#pragma once

#if defined(QUIRE_SOFTWARE_TILES) || (defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__))
#define QUIRE_TILES

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifndef QUIRE_SOFTWARE_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {

constexpr int TILE = 16;           // rows per tile, and 32-bit words per row
constexpr int AMX_ROWS = 2 * TILE;  // rows of x at a time: two tiles

// Tiles 0 to 3 hold sums: 0 and 1 for rows 0 to 15, 2 and 3 for rows 16 to 31; even tiles for the first line of
// outputs, odd tiles for the second. Tiles 4 and 5 hold x, 6 and 7 the panel; `words` is the number of words that they
// multiply at a time.
struct TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  TileConfiguration(int count, int words) {
    for (int tile : {0, 1}) set(tile, std::min(count, TILE), TILE);
    set(4, std::min(count, TILE), words);
    if (count > TILE) {
      for (int tile : {2, 3}) set(tile, count - TILE, TILE);
      set(5, count - TILE, words);
    }
    for (int tile : {6, 7}) set(tile, words, TILE);
  }

  void set(int tile, int count, int words) { row_bytes[tile] = uint16_t(4 * words), rows[tile] = uint8_t(count); }
};

#ifdef QUIRE_SOFTWARE_TILES

inline bool has_tiles() { return true; }

struct SoftwareTiles {
  TileConfiguration configuration{TILE, TILE};
  uint32_t tiles[8][TILE][TILE];
};
inline thread_local SoftwareTiles software;

inline void configure_tiles(const TileConfiguration& configuration) {
  software.configuration = configuration;
  memset(software.tiles, 0, sizeof(software.tiles));
}
inline void release_tiles() {}

template <int T>
void zero_tile() { memset(software.tiles[T], 0, sizeof(software.tiles[T])); }

template <int T>
void load_tile(const void* from, int64_t stride) {
  zero_tile<T>();
  for (int r = 0; r < software.configuration.rows[T]; r++)
    memcpy(software.tiles[T][r], (const char*)from + r * stride, software.configuration.row_bytes[T]);
}

template <int T>
void store_tile(void* to, int64_t stride) {
  for (int r = 0; r < software.configuration.rows[T]; r++)
    memcpy((char*)to + r * stride, software.tiles[T][r], software.configuration.row_bytes[T]);
}

template <class T>
T part_of(uint32_t word, int i) {
  T parts[4 / sizeof(T)];
  memcpy(parts, &word, 4);
  return parts[i];
}

// Multiplies bfloat16. The first and the second elements of words have separate sums, rounded after each step and added
// at the end.
template <int SUMS, int X, int W>
void multiply_tiles_bf16() {
  auto value = [](uint32_t word, int i) {
    const uint32_t bits = uint32_t(part_of<uint16_t>(word, i)) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
  };
  for (int r = 0; r < software.configuration.rows[SUMS]; r++)
    for (int c = 0; c < TILE; c++) {
      float parts[2] = {}, sum;
      for (int w = 0; w < TILE; w++)
        for (int i = 0; i < 2; i++)
          parts[i] = __builtin_fmaf(value(software.tiles[X][r][w], i), value(software.tiles[W][w][c], i), parts[i]);
      memcpy(&sum, &software.tiles[SUMS][r][c], 4);
      sum += parts[0] + parts[1];
      memcpy(&software.tiles[SUMS][r][c], &sum, 4);
    }
}

// Multiplies signed bytes of x with unsigned bytes of the panel.
template <int SUMS, int X, int W>
void multiply_tiles_bytes() {
  for (int r = 0; r < software.configuration.rows[SUMS]; r++)
    for (int c = 0; c < TILE; c++)
      for (int w = 0; w < TILE; w++)
        for (int i = 0; i < 4; i++)
          software.tiles[SUMS][r][c] +=
              part_of<int8_t>(software.tiles[X][r][w], i) * part_of<uint8_t>(software.tiles[W][w][c], i);
}

#else

// Whether the system lets this process use tiles. Permission must be requested, since tiles enlarge a thread's saved
// state.
inline bool has_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return allowed;
}

inline void configure_tiles(const TileConfiguration& configuration) {
  asm volatile("ldtilecfg %0" ::"m"(configuration));
}
inline void release_tiles() { asm volatile("tilerelease" ::); }

template <int T>
void zero_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }

template <int T>
void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
}

template <int T>
void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(to), "r"(stride) : "memory");
}

template <int SUMS, int X, int W>
void multiply_tiles_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(W));
}

template <int SUMS, int X, int W>
void multiply_tiles_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(W));
}

#endif

// Configures the thread's tiles for a number of rows and of words, and releases them when destroyed.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles() {
    if (count_) release_tiles();
  }

  // words: the number of words that multiply() gets, except that the last time may have fewer.
  void configure(int count, int words = TILE) {
    if (count != count_ || words != words_) configure_tiles(TileConfiguration(count_ = count, words_ = words));
  }

  // Calls f(Constant<tile>, first row, line) for each tile of sums. lines: 1 or 2.
  template <class F>
  void for_sums(int lines, F f) const {
    f(std::integral_constant<int, 0>{}, 0, 0);
    if (lines > 1) f(std::integral_constant<int, 1>{}, 0, 1);
    if (count_ <= TILE) return;
    f(std::integral_constant<int, 2>{}, TILE, 0);
    if (lines > 1) f(std::integral_constant<int, 3>{}, TILE, 1);
  }

  // Adds the products of up to `words_` words of each row of x with 1 or 2 lines of a panel. Rows of x are `x_stride`
  // bytes apart, words of the panel `stride` 32-bit words.
  template <bool IS_BF16>
  void multiply(const char* x, int64_t x_stride, const uint32_t* w, int64_t stride, int words, int lines) {
    multiply<IS_BF16>(x, x_stride, w, w + TILE, stride, words, lines);
  }

  // The same, for two lines in different places.
  template <bool IS_BF16>
  void multiply(const char* x, int64_t x_stride, const uint32_t* w, const uint32_t* second, int64_t stride, int words,
                int lines) {
    if (words < words_) {  // the rest of a tile is zero
      memset(x_, 0, sizeof(x_)), memset(w_, 0, sizeof(w_));
      for (int r = 0; r < count_; r++) memcpy(x_[r], x + r * x_stride, words * 4);
      for (int i = 0; i < words; i++) memcpy(w_[0][i], w + i * stride, TILE * 4);
      for (int i = 0; lines > 1 && i < words; i++) memcpy(w_[1][i], second + i * stride, TILE * 4);
      x = (const char*)x_, x_stride = sizeof(x_[0]), w = w_[0][0], second = w_[1][0], stride = TILE;
    }
    load_tile<4>(x, x_stride);
    if (count_ > TILE) load_tile<5>(x + TILE * x_stride, x_stride);
    load_tile<6>(w, stride * 4);
    if (lines > 1) load_tile<7>(second, stride * 4);
    for_sums(lines, [&](auto sums, int row, int line) {
      constexpr int S = sums.value, X = S < 2 ? 4 : 5, W = S % 2 ? 7 : 6;
      if constexpr (IS_BF16) multiply_tiles_bf16<S, X, W>();
      else multiply_tiles_bytes<S, X, W>();
      (void)row, (void)line;
    });
  }

 private:
  int count_ = 0, words_ = 0;
  alignas(64) uint32_t x_[AMX_ROWS][TILE], w_[2][TILE][TILE];
};

}  // namespace quire

#endif
