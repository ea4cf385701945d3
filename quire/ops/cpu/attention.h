// What the attention kernels share: the layout of the cache, and how a step's work is cut into tasks.
//
// A block of a layer's cache is [kv_heads][2][block_size * dim] elements; dim is head_dim padded to a multiple of 16 with
// zeros. Between it and the next block lie the other layers' parts of the block: the block stride is an argument. Keys
// are transposed, and keys and values are interleaved in pairs (bfloat16 and float16; "pairs" of one for float32), so
// that everything is read as lines of 16 32-bit words, 64 bytes. A dot product combines each word, a pair, with one
// broadcast word of the other operand. (Pairs of float16 are widened first, and are two words then.) No sum ever runs
// across a register:
//
//   keys, [dim / 2][block_size] words                      values, [block_size / 2][dim] words
//                token 0     token 1     ... token 15                   dim 0       dim 1      ... dim D-1
//   dims 0,1   | k0[0] k0[1] | k1[0] k1[1] | ... |          tokens 0,1 | v0[0] v1[0] | v0[1] v1[1] | ... |
//   dims 2,3   | k0[2] k0[3] | k1[2] k1[3] | ... |          tokens 2,3 | v2[0] v3[0] | v2[1] v3[1] | ... |
//
//   scores[row][16 tokens] += keys line . q[row][2 dims]    out[row][16 dims] += values line . p[row][2 tokens]
//
// Cells of one byte (attention_cells.h) have the same layout, in words of four: keys in [dim / 4][block_size] words,
// values in [block_size / 4][dim]. The keys and the values are each followed by block_size float32 scales.
//
// A block of a latent cache (MLA) is [kv_heads][1][block_size * dim]: keys, whose first out_dim elements are the values. A
// tile of them is brought into the layout of values when it is visited, once for all query heads.
//
// A latent cache by slots (sparse attention) is read token by token, so a block is [block_size][dim] elements, followed
// by block_size scales if they are cells. A tile of the tokens that a query has selected is brought into the layout of
// keys.
#pragma once

#include "attention_cells.h"
#include "vector.h"

namespace quire {

constexpr int TILE_KEYS = 64, TILE_LINES = TILE_KEYS / LANES;
constexpr int TILE_ROWS = 64;        // the approximate number of rows in a tile of queries
constexpr int TASKS_PER_THREAD = 4;  // enough for threads to end together
constexpr int64_t PARALLEL_COST = 8 * 256;  // below it, one thread is done before a second one has woken up

// Geometry and Step are mirrored in quire/attention/cpu.py, which also knows the sizes of Task and Merge.
struct Geometry {
  int32_t dtype, cells;  // cells: 0 for elements of dtype, 1 for int8, 2 for fp8, 3 for float16 of float32
  int32_t is_latent, heads, kv_heads, block_size;
  int32_t head_dim, dim;     // of queries and keys, and that padded
  int32_t out_dim, out_pad;  // of values and the result, and that padded
  int32_t by_slot;           // whether block tables list the slot of each key instead of blocks

  int group() const { return heads / kv_heads; }
  // Keys of the shortest splits (see split_end). Merging a split costs 1 % of computing one of this size; with few KV
  // heads, splits must be shorter for a single sequence to occupy all threads.
  int split_keys() const { return is_latent ? 256 : kv_heads < 8 ? 512 : 1024; }
  int planes() const { return is_latent ? 1 : 2; }
};

// Tokens in a line of values.
template <class S>
constexpr int TOKENS = 4 / sizeof(typename S::Element);

// The size of a block's keys or values in one head, in 32-bit words.
template <class S>
inline int64_t plane_words(const Geometry& g) {
  return int64_t(g.block_size) * (g.dim / TOKENS<S> + S::SCALED);
}

// f(S{}) with the storage format of the geometry. A unit for one type (units.py) has elements of this type, cells of one
// byte, or float16.
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

// The keys of a sequence are divided into splits, whose borders depend only on the model and the position: 32 splits
// of split_keys, and from there 16 splits between two powers of two. Every row computes a result for each split and merges
// the results in order. So a row's result is the same bit for bit, whichever thread computes which splits. Returns the
// end of the split that holds `key`.
inline int split_end(const Geometry& g, int key) {
  int size = g.split_keys();
  while (key / size >= 32) size *= 2;
  return (key / size + 1) * size;
}

struct Task {
  int32_t request;
  int32_t token, tokens;       // rows of q, and how many
  int32_t position;            // of the first token in its sequence
  int32_t key_begin, key_end;  // whole splits; the last one ends with the last token's key
  int32_t partial;             // first row of the partial results, or -1 if the task has all keys
  int32_t cost;
};

// The rows of some tokens, whose splits were computed by several tasks.
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
