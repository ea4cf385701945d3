// The product of queries with a tile of keys, for attention and for the indexer of sparse attention.
#pragma once

#include "attention.h"

namespace quire {

// The kernels prefetch the next tile while they compute. They prefetch into the L2 cache: L1 has too few fill buffers
// to cover the latency of memory (measured: 12 ms per step with L2, 15 ms with L1).
inline void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// scores[r][16 c ...] = q[r] . keys of the c-th 16 tokens. ahead: all keys of the next tile, to prefetch; or null.
template <class S, int R, int C>
void score(const uint32_t* q, int words, const uint32_t* const* keys, int stride, float* scores,
           const uint32_t* const* ahead) {
  const typename S::Expand expand;
  const uint32_t* next[TILE_LINES];
  int count = 0;
  for (int c = 0; ahead && c < TILE_LINES; c++)
    if (ahead[c]) next[count++] = ahead[c];
  f32x16 sums[R][C] = {};
  for (int w = 0; w < words / S::LINES; w++) {
    u32x16 lines[C][S::LINES];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) expand(load_words(keys[c] + w * stride), lines[c]);
    for (int i = 0; i < count; i++) fetch(next[i] + w * stride);
#pragma GCC unroll 4
    for (int j = 0; j < S::LINES; j++)
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        u32x16 word = splat(q[r * words + w * S::LINES + j]);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[r][c] = add_dot<typename S::T>(sums[r][c], lines[c][j], word);
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(scores + r * TILE_KEYS + c * LANES, sums[r][c]);
}

}  // namespace quire
