// Attention's products with AMX (tiles.h), for bfloat16. Lines of keys, and the values of 16 tokens, are already stored
// as tiles: 16 words for each of 16 tokens, and eight words, of two tokens each, for each of 16 elements.
#pragma once

#include "attention_scores.h"
#include "tiles.h"

#ifdef QUIRE_TILES

namespace quire {

// scores[row][16 line ...] = q[row] . keys of the line, for the lines [first, last). words: of a query. stride: of keys.
// ahead: all keys of the next tile, to prefetch.
inline void score_in_tiles(Tiles& tiles, const uint32_t* q, int rows, int words, const uint32_t* const* keys, int stride,
                           int first, int last, float* scores, const uint32_t* const* ahead) {
  for (int row = 0; row < rows; row += AMX_ROWS) {
    tiles.configure(std::min(AMX_ROWS, rows - row));
    for (int line = first; line < last; line += 2) {
      const int both = std::min(2, last - line);
      tiles.for_sums(both, [](auto tile, int, int) { zero_tile<tile.value>(); });
      for (int w = 0; w < words; w += TILE) {
        const int some = std::min(TILE, words - w);
        for (int l = 0; row == 0 && l < both; l++)
          for (int i = w; ahead[line + l] && i < w + some; i++) fetch(ahead[line + l] + i * stride);
        const uint32_t* second = keys[both > 1 ? line + 1 : line];
        tiles.multiply<true>((const char*)(q + row * words + w), words * 4, keys[line] + w * stride, second + w * stride,
                             stride, some, both);
      }
      tiles.for_sums(both, [&](auto tile, int r, int l) {
        store_tile<tile.value>(scores + (row + r) * TILE_KEYS + (line + l) * LANES, TILE_KEYS * sizeof(float));
      });
    }
  }
}

// out[row] = out * rescale[row] + p[row] . values, for the lines [first, last) of 16 tokens. p: [rows, TILE_KEYS] in
// bfloat16. dim: words per row of values, and elements of a result. ahead: all values of the next tile, to prefetch.
inline void weigh_in_tiles(Tiles& tiles, const uint32_t* p, int rows, const uint32_t* const* values, int dim, int first,
                           int last, float* out, const float* rescale, const uint32_t* const* ahead) {
  constexpr int WORDS = LANES / 2, OF_P = TILE_KEYS / 2;  // of a line's tokens; of a row of p
  for (int row = 0; row < rows; row++)
    for (int i = 0; rescale[row] != 1 && i < dim; i += LANES)
      store(out + row * dim + i, load(out + row * dim + i) * rescale[row]);
  for (int row = 0; row < rows; row += AMX_ROWS) {
    tiles.configure(std::min(AMX_ROWS, rows - row), WORDS);
    for (int from = 0; from < dim; from += 2 * LANES) {
      const int both = std::min(2, (dim - from) / LANES);
      auto place = [&](int r, int l) { return out + (row + r) * dim + from + l * LANES; };
      tiles.for_sums(both, [&](auto tile, int r, int l) { load_tile<tile.value>(place(r, l), dim * sizeof(float)); });
      for (int line = first; line < last; line++) {
        for (int i = 0; row == 0 && ahead[line] && i < WORDS * both; i++)
          fetch(ahead[line] + i / both * dim + from + i % both * LANES);
        const uint32_t* w = values[line] + from;
        tiles.multiply<true>((const char*)(p + row * OF_P + line * WORDS), OF_P * 4, w, w + LANES, dim, WORDS, both);
      }
      tiles.for_sums(both, [&](auto tile, int r, int l) { store_tile<tile.value>(place(r, l), dim * sizeof(float)); });
    }
  }
}

// Copies a line of values, with zeros for the tokens outside [from, to), of which only some are in the line.
inline const uint32_t* copy_of_tokens(const uint32_t* values, int dim, int from, int to, float* copy) {
  uint32_t* made = reinterpret_cast<uint32_t*>(copy);
  for (int token = 0; token < LANES; token += 2, values += dim, made += dim) {
    const uint32_t kept = (token >= from && token < to ? 0xffffu : 0) |
                          (token + 1 >= from && token + 1 < to ? 0xffff0000u : 0);
    for (int i = 0; i < dim; i += LANES) store(made + i, load_words(values + i) & kept);
  }
  return reinterpret_cast<uint32_t*>(copy);
}

}  // namespace quire

#endif
