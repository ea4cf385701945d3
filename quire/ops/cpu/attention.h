// Shared by the attention kernels: the layout of the cache, and the division of a step's work into tasks.
//
// A block of a layer's cache is [kv_heads][2][block_size * dim] elements; dim is head_dim padded to a multiple of 16
// with zeros. Parts of the block for other layers follow it in memory, so the block stride is an argument. Keys are
// transposed. Keys and values are interleaved in pairs (bfloat16, float16) or stored singly (float32), so everything is
// read in lines of 16 32-bit words, 64 bytes. A dot product multiplies each word (a pair) with one broadcast word of
// the other operand. Float16 pairs are first widened to two words. No sum runs across the lanes of a register:
//
//   keys, [dim / 2][block_size] words                      values, [block_size / 2][dim] words
//                token 0     token 1     ... token 15                   dim 0       dim 1      ... dim D-1
//   dims 0,1   | k0[0] k0[1] | k1[0] k1[1] | ... |          tokens 0,1 | v0[0] v1[0] | v0[1] v1[1] | ... |
//   dims 2,3   | k0[2] k0[3] | k1[2] k1[3] | ... |          tokens 2,3 | v2[0] v3[0] | v2[1] v3[1] | ... |
//
//   scores[row][16 tokens] += keys line . q[row][2 dims]    out[row][16 dims] += values line . p[row][2 tokens]
//
// One-byte cells (attention_cells.h) have the same layout with four cells per word: keys in [dim / 4][block_size]
// words, values in [block_size / 4][dim] words. The keys and the values are each followed by block_size float32 scales.
//
// A block of a latent cache (MLA) is [kv_heads][1][block_size * dim]: keys, whose first out_dim elements are the
// values. A tile is transposed into the layout of values when it is visited, once for all query heads.
//
// A latent cache for sparse attention is read token by token (by slot), so a block is [block_size][dim] elements,
// followed by block_size scales for cells. The tokens that a query selects are gathered into tiles with the layout of
// keys.
#pragma once

#include "attention_cells.h"
#include "vector.h"

namespace quire {

constexpr int TILE_KEYS = 64, TILE_LINES = TILE_KEYS / LANES;
constexpr int TILE_ROWS = 64;        // the approximate number of rows in a tile of queries
constexpr int TASKS_PER_THREAD = 4;  // enough for all threads to finish at about the same time
constexpr int64_t PARALLEL_COST = 8 * 256;  // with less work, one thread finishes before a second one wakes up

// Geometry and Step are mirrored in quire/attention/cpu.py, which also has the sizes of Task and Merge.
struct Geometry {
  int32_t dtype, cells;  // cells: 0 for elements of dtype, 1 for int8, 2 for fp8, 3 for float16 of float32
  int32_t is_latent, heads, kv_heads, block_size;
  int32_t head_dim, dim;     // of queries and keys; dim is padded
  int32_t out_dim, out_pad;  // of values and the result; out_pad is padded
  int32_t by_slot;           // whether block tables list the slot of each key instead of blocks

  int group() const { return heads / kv_heads; }
  // The number of keys in the shortest splits (see split_end). Merging a split of this size takes 1 % of the time of
  // computing it. With few KV heads, splits must be shorter so that a single sequence occupies all threads.
  int split_keys() const { return is_latent ? 256 : kv_heads < 8 ? 512 : 1024; }
  int planes() const { return is_latent ? 1 : 2; }
};

// Tokens per word of values.
template <class S>
constexpr int TOKENS = 4 / sizeof(typename S::Element);

// The size of a block's keys or values in one head, in 32-bit words.
template <class S>
inline int64_t plane_words(const Geometry& g) {
  return int64_t(g.block_size) * (g.dim / TOKENS<S> + S::SCALED);
}

// Calls f(S{}) with the geometry's storage format. A translation unit for one type (units.py) is compiled for elements of
// this type, for one-byte cells, or for float16.
template <class F>
inline void with_storage(const Geometry& g, F f) {
  with_type(g.dtype, [&](auto type) {
    using T = decltype(type);
#if !defined(QUIRE_CELLS)
    if (g.cells == 1) return f(Cells<T, Int8>{});
    if (g.cells == 2) return f(Cells<T, Fp8>{});
    if (std::is_same_v<T, float> && g.cells == 3) return f(Narrowed{});
    f(Whole<T>{});
#elif QUIRE_CELLS == 2
    f(Narrowed{});
#elif QUIRE_CELLS
    g.cells == 1 ? f(Cells<T, Int8>{}) : f(Cells<T, Fp8>{});
#else
    f(Whole<T>{});
#endif
  });
}

// Divides a sequence's keys into splits, whose boundaries depend only on the model and the position: 32 splits of
// split_keys keys, then 16 splits for each doubling of the position. Every row computes a result for each split and
// merges the results in order. So a row's result is bitwise the same, whichever threads compute its splits. Returns the
// end of the split that contains `key`.
inline int split_end(const Geometry& g, int key) {
  int size = g.split_keys();
  while (key / size >= 32) size *= 2;
  return (key / size + 1) * size;
}

struct Task {
  int32_t request;
  int32_t token, tokens;       // first row of q, number of rows
  int32_t position;            // of the first token in its sequence
  int32_t key_begin, key_end;  // whole splits; the last one ends at the last token's key
  int32_t partial;             // first row of the partial results, or -1 if the task covers all keys
  int32_t cost;
};

// Tokens whose splits were computed by several tasks.
struct Merge {
  int32_t token, tokens, partial, splits;
};

struct Step {
  const int32_t* block_table;
  int64_t table_stride;
  const Task* tasks;
  const Merge* merges;
  int32_t num_tasks, num_merges, partial_rows, threads;
};

}  // namespace quire
