// The product of probabilities with a tile of values, and conversions of a tile's layout and type.
#pragma once

#include "attention_scores.h"

namespace quire {

// out[r][from + 16 c ...] = out * rescale[r] + p[r] . values. ahead: all values of the next tile, to prefetch; or null.
template <class S, int R, int C>
void weigh(const uint32_t* p, const uint32_t* const* values, int from, int count, float* out, int dim,
           const float* rescale, const uint32_t* const* ahead) {
  out += from;
  constexpr int STEPS = LANES / TOKENS<S>;                // words of values per 16 tokens
  constexpr int WORDS = TILE_KEYS / PAIR<typename S::T>;  // words per row of p
  const typename S::Expand expand;
  f32x16 sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) sums[r][c] = load(out + r * dim + c * LANES) * rescale[r];
  for (int w = 0; w < count; w++) {
    u32x16 lines[C][S::LINES];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) expand(load_words(values[w] + from + c * LANES), lines[c]);
    for (int v = w; ahead && v < TILE_LINES * STEPS; v += count)
      if (ahead[v / STEPS])
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) fetch(ahead[v / STEPS] + v % STEPS * dim + from + c * LANES);
#pragma GCC unroll 4
    for (int j = 0; j < S::LINES; j++)
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        u32x16 word = splat(p[r * WORDS + w * S::LINES + j]);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sums[r][c] = add_dot<typename S::T>(sums[r][c], lines[c][j], word);
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(out + r * dim + c * LANES, sums[r][c]);
}

// Transposes the keys of 16 tokens into values of `dims` elements: lines across tokens become lines across dims.
template <class T>
void transpose(const uint32_t* keys, int stride, int dims, uint32_t* values) {
  constexpr int P = PAIR<T>;
  for (int w = 0; w < dims / P; w++) {
    u32x16 line = load_words(keys + w * stride);
    if (P == 2) {  // words of (token, dims 2w and 2w + 1) become words of (two tokens, dim)
      u32x16 other = shuffle<1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14>(line, line);
      u32x16 first = (line & 0xffffu) | other << 16, second = (line & 0xffff0000u) | other >> 16;
      line = shuffle<0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31>(first, second);
    }
    uint32_t words[LANES];
    store(words, line);
    for (int i = 0; i < LANES / P; i++) memcpy(values + i * dims + w * P, words + i * P, P * sizeof(uint32_t));
  }
}

// Expands rows of the cache, `columns` words each, into LINES times as many rows of T. Prefetches the same part of
// `ahead`.
template <class S>
void expand(const uint32_t* from, int from_stride, int rows, int columns, uint32_t* to, int to_stride,
            const uint32_t* ahead) {
  const typename S::Expand expand;
  for (int w = 0; w < rows; w++)
    for (int i = 0; i < columns; i += LANES) {
      u32x16 lines[S::LINES];
      expand(load_words(from + w * from_stride + i), lines);
      if (ahead) fetch(ahead + w * from_stride + i);
      for (int j = 0; j < S::LINES; j++) store(to + (w * S::LINES + j) * to_stride + i, lines[j]);
    }
}

}  // namespace quire
