// The shared part of products with weights in panels, for all formats.
//
// A panel holds the weights of 64 outputs as 32-bit words; the last panel has only the remaining outputs, padded to a
// multiple of 16. Each word has one output's weights for a few neighbouring inputs: one in float32, two in bfloat16 or
// float16, four in 8 bits or eight in 4 bits.
//
//                  output 0      output 1    ...  output 63
//     inputs 0, 1 | w[0] w[1]  | w[0] w[1] | ...                 one row of the panel: four registers of 16 words
//     inputs 2, 3 | w[2] w[3]  | w[2] w[3] | ...
//
// A dot product multiplies a register of weights with one broadcast word of x (float16 is widened first and takes two),
// so no sum runs across a register's lanes, and a panel is read from start to end. Each output is added up in the order
// of its inputs, whatever else is in the batch: a row's result does not depend on the other rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "team.h"
#include "tiles.h"
#include "vector.h"

namespace quire {

constexpr int PANEL = 64, PANEL_LINES = PANEL / LANES;
// Bytes in a part of a panel. All rows visit a part before the next one, so that it stays in the L2 cache. Parts are
// larger for many rows, since starting and ending a visit takes time (3 % of it).
constexpr int64_t CHUNK_BYTES = 1 << 16, LARGE_CHUNK_BYTES = 1 << 17;
constexpr int64_t TILES_CHUNK_BYTES = 1 << 15;  // half of it, two lines, stays in the L1 cache
constexpr int VISITS = 22;  // visits per task: few enough for the rows and their sums to stay in the cache, too
constexpr int64_t PARALLEL_WORDS = 1 << 14;  // with less work, one thread finishes before a second one wakes up

// Prefetches a panel of data stored separately from the codes, such as scales: `words` words per output.
inline void fetch_panel(const uint32_t* words_of_all, int64_t panel, int64_t words, int lines) {
  const uint32_t* at = words_of_all + panel * PANEL * words;
  for (int64_t i = 0; i < words * lines; i++) __builtin_prefetch(at + i * LANES, 0, 2);
}

// Returns memory for `size` elements of four bytes, aligned to a cache line. The thread keeps it in `kept` between
// calls.
template <class T>
T* room(std::vector<T>& kept, int64_t size) {
  if (int64_t(kept.size()) < size + LANES) kept.resize(size + LANES);
  return kept.data() + (64 - reinterpret_cast<uintptr_t>(kept.data()) % 64) / 4 % LANES;
}

// Cache lines to prefetch during a piece of work: `count` lines from `at`.
struct Ahead {
  const char* at;
  int count;

  // Spreads prefetches evenly over the words: bursts would fill the buffers that reads from the caches need.
  struct Pace {
    uint32_t step, due = 0;  // in units of 1 / 65,536 line
  };

  Pace pace(int64_t words) {
    const Pace all{uint32_t((int64_t(count) << 16) / words + 1)};
    count = 0;
    return all;
  }

  // Splits off the first of `portions` equal portions.
  Ahead portion(int portions) {
    const Ahead first{at, count / portions};
    at += first.count * 64, count -= first.count;
    return first;
  }

  // Prefetches into the L2 cache: L1 has too few fill buffers to cover the latency of memory.
  void fetch(Pace& pace) {
    for (pace.due += pace.step; pace.due >= 1 << 16; pace.due -= 1 << 16, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// Consecutive words of a panel, as visits read them: in place or unpacked.
struct Part {
  int64_t panel;
  int lines;
  int64_t word, words;      // index of the first word in a row, number of words
  const uint32_t* weights;  // [words, lines]
  const float *scales = nullptr, *offsets = nullptr;  // [groups, lines], in formats that have them
  bool is_wide = false;                               // whether the weights are unpacked

  bool is_first() const { return word == 0; }
  int stride() const { return lines * LANES; }
};

// A thread's unpacked weights.
struct Unpacked {
  std::vector<uint32_t> words;
  std::vector<float> scales, offsets;
};

// An item of work: a panel, and the rows that are multiplied with it.
struct Item {
  int64_t panel, first;
  int rows;
};

struct Shape {
  int64_t rows, out, words;  // words: 32-bit words per row of the weight
  // For several experts: expert e has the rows [bounds[e], bounds[e + 1]) and `out` outputs. The experts' weights
  // follow each other in whole panels. Null for a single weight.
  const int64_t* bounds = nullptr;
  int64_t experts = 1;

  int64_t panels() const { return (out + PANEL - 1) / PANEL; }  // per expert
  int lines(int64_t panel) const {
    return bounds ? PANEL_LINES : int(std::min<int64_t>(PANEL, out - panel * PANEL) + LANES - 1) / LANES;
  }

  // Lists all items, panel by panel. most: the maximum number of rows per item.
  void list(std::vector<Item>& items, int most) const {
    items.clear();
    for (int64_t e = 0; e < experts; e++) {
      const int64_t begin = bounds ? bounds[e] : 0, end = bounds ? bounds[e + 1] : rows;
      if (begin < end)
        for (int64_t panel = e * panels(); panel < (e + 1) * panels(); panel++)
          for (int64_t first = begin; first < end; first += most)
            items.push_back({panel, first, int(std::min<int64_t>(most, end - first))});
    }
  }
};

// Ranges of consecutive items, one for each thread. A thread reads the weights of its range in order, which suits the
// hardware prefetcher. After its own range, it helps the others.
class Ranges {
 public:
  Ranges(int64_t items, int count) : items_(items), count_(count), next_(room_for(count)) {
    for (int i = 0; i < count; i++) next_[i].item = begin(i);
  }

  // Iterates over the items of one thread.
  struct Walk {
    Ranges& ranges;
    int range, visited = 0;
    int64_t item = 0;  // -1: none left

    explicit Walk(Ranges& all) : ranges(all), range(place_in_team() % all.count_) { advance(); }

    void advance() {
      for (; visited < ranges.count_; visited++, range = (range + 1) % ranges.count_)
        if ((item = ranges.next_[range].item++) < ranges.begin(range + 1)) return;
      item = -1;
    }

    // Takes one more item of the current range. Returns it, or -1.
    int64_t take() {
      const int64_t taken = ranges.next_[range].item++;
      return taken < ranges.begin(range + 1) ? taken : -1;
    }

    // The item that will most likely come next, or -1.
    int64_t next() const { return item + 1 < ranges.begin(range + 1) ? item + 1 : -1; }
  };

 private:
  struct alignas(64) Next {
    std::atomic<int64_t> item;
  };

  // Returns counters, which the calling thread reuses in later calls.
  static Next* room_for(int count) {
    thread_local std::unique_ptr<Next[]> kept;
    thread_local int size = 0;
    if (size < count) kept.reset(new Next[count]), size = count;
    return kept.get();
  }

  int64_t begin(int64_t range) const { return items_ * range / count_; }

  const int64_t items_;
  const int count_;
  Next* const next_;
};

// COLUMNS: the maximum number of lines per visit. FETCHES: whether a visit of a few rows prefetches the whole next
// part. BY_LINE: whether all rows visit a line of an unpacked part before the next line, so that the line stays in the
// L1 cache. TOGETHER: bytes of a panel that a row visits before it visits as many of another panel; 0: it visits one
// panel after the other. chunk(): bytes of a part. A format may define its own Blocking.
template <class Format, class = void>
struct BlockingOf {
  static constexpr bool BY_LINE = false;
  static constexpr int COLUMNS = MAX_COLUMNS;
  static constexpr bool FETCHES = false;
  static constexpr int TOGETHER = 0;
  static int64_t chunk(int pieces) { return pieces > 8 ? LARGE_CHUNK_BYTES : CHUNK_BYTES; }
};
template <class Format>
struct BlockingOf<Format, std::void_t<typename Format::Blocking>> : Format::Blocking {};

// ROWS: the maximum number of rows per visit. IN_ORDER: up to this many rows, a panel is read in order. A format may
// define its own Rows.
template <class Format, class = void>
struct RowsOf {
  static constexpr int ROWS = MAX_ROWS, IN_ORDER = MAX_ROWS;
};
template <class Format>
struct RowsOf<Format, std::void_t<typename Format::Rows>> : Format::Rows {};

// Format provides:
//   weights: the panels
//   step(): a part has a multiple of this many words
//   unpacks(pieces, is_row): whether to unpack a part for this many visits; is_row: the only visit is of a single row
//   part(panel, first word, words, lines, pieces, is_row, unpacked, ahead): a part, unpacked if necessary
//   visit<R, C>(part, first row, line, sums, ahead): adds the products of R rows and C lines to sums [R][PANEL]
//   expect(panel, lines): prefetches data of the next panel other than weights
//   finish(panel, first row, rows, sums): writes the results
// With AMX, it also provides:
//   in_tiles(rows): whether to call visit_tiles instead of visit, for up to AMX_ROWS rows and two lines
//   visit_tiles(tiles, part, first row, rows, line, sums, ahead)
template <class Format>
void multiply(const Format& format, const Shape& shape, int threads) {
  thread_local std::vector<Item> listed;
  int most = VISITS * RowsOf<Format>::ROWS;  // rows per task
#ifdef QUIRE_TILES
  if (format.in_tiles(shape.rows)) most = shape.panels() >= 4 * threads ? 16 * AMX_ROWS : 4 * AMX_ROWS;
#endif
  shape.list(listed, most);
  const Item* const items = listed.data();
  const int64_t number = listed.size();
  const bool pays = threads > 1 && number * PANEL * shape.words >= PARALLEL_WORDS && number > 1;
  const int64_t step = format.step();
#ifdef QUIRE_TILES
  const bool in_tiles = format.in_tiles(shape.rows);
  const int at_once = in_tiles ? AMX_ROWS : RowsOf<Format>::ROWS;
#else
  constexpr bool in_tiles = false;
  constexpr int at_once = RowsOf<Format>::ROWS;
#endif
  const int parts = pays ? threads : 1;
  Ranges ranges(number, parts);
  auto work = [&] {
    thread_local std::vector<float> kept;
    thread_local Unpacked unpacked;
    float* sums = room(kept, most * PANEL);
#ifdef QUIRE_TILES
    Tiles tiles;
#endif
    // Multiplies two items of one row each. The hardware prefetcher follows each panel by itself, to the end of a page
    // and not far ahead, so a single panel leaves a quarter of the memory's bandwidth unused.
    auto multiply_both = [&](const Item& one, const Item& other) {
      const Item* const both[] = {&one, &other};
      const int64_t at_once = std::max<int64_t>(BlockingOf<Format>::TOGETHER / (PANEL * 4) / step, 1) * step;
      for (int64_t word = 0; word < shape.words; word += at_once)
        for (int i = 0; i < 2; i++) {
          const int64_t panel = both[i]->panel, words = std::min(at_once, shape.words - word);
          Ahead none{nullptr, 0};
          const Part part = format.part(panel, word, words, shape.lines(panel), 1, true, unpacked, none);
          in_pieces<BlockingOf<Format>::COLUMNS>(part.lines, [&](auto c, int line) {
            format.template visit<1, c.value>(part, both[i]->first, line, sums + i * PANEL + line * LANES, none);
          });
        }
      for (int i = 0; i < 2; i++) format.finish(both[i]->panel, both[i]->first, 1, sums + i * PANEL);
    };
    auto multiply_one = [&](int64_t item, int64_t next) {
      const int64_t panel = items[item].panel, first = items[item].first;
      const int rows = items[item].rows;
      const int lines = shape.lines(panel);
      const int pieces = (rows + at_once - 1) / at_once;
      const uint32_t* weights = format.weights + panel * PANEL * shape.words;
#ifdef QUIRE_TILES
      const int64_t bytes = in_tiles && pieces > 2 ? TILES_CHUNK_BYTES : BlockingOf<Format>::chunk(pieces);
#else
      const int64_t bytes = BlockingOf<Format>::chunk(pieces);
#endif
      const bool is_row = rows == 1 && !in_tiles, unpacks = format.unpacks(pieces, is_row);
      const int64_t chunk = std::max<int64_t>(bytes / (64 * lines) / step, 1) * step;
      for (int64_t word = 0; word < shape.words; word += chunk) {
        const int64_t words = std::min(chunk, shape.words - word), rest = shape.words - word - words;
        const char* ahead = reinterpret_cast<const char*>(weights + (word + words) * lines * LANES);
        int64_t to_fetch = std::min(chunk, rest) * lines;
        if (!rest && next >= 0) {
          const int64_t then = items[next].panel;
          ahead = reinterpret_cast<const char*>(format.weights + then * PANEL * shape.words);
          to_fetch = then == panel ? 0 : std::min(chunk, shape.words) * shape.lines(then);
          if (then != panel) format.expect(then, shape.lines(then));
        }
        // With few rows, memory limits the speed. For sequential reads, the hardware prefetcher is faster than software
        // prefetches, which wait for L1 fill buffers (37 GB/s on two cores, where memory gave 55). A few lines are
        // still prefetched, since the hardware stops while a panel is finished.
        const bool is_read_in_order = rows <= RowsOf<Format>::IN_ORDER && !BlockingOf<Format>::FETCHES;
        if (pieces == 1 && !unpacks && is_read_in_order) to_fetch = std::min<int64_t>(to_fetch, 16);
        const bool by_line = BlockingOf<Format>::BY_LINE && unpacks;
        const int visits = pieces * (in_tiles ? (lines + 1) / 2 : by_line ? lines : 1), portions = visits + unpacks;
        auto portion = [&](int i) {
          const int64_t from = to_fetch * i / portions, to = to_fetch * (i + 1) / portions;
          return Ahead{ahead + from * 64, int(to - from)};
        };
        Ahead first_portion = unpacks ? portion(0) : Ahead{ahead, 0};
        const Part part = format.part(panel, word, words, lines, pieces, is_row, unpacked, first_portion);
        for (int visited = 0, row = 0; visited < visits; visited++) {
          const int piece = visited % pieces;
          if (piece == 0) row = 0;
          const int count = (rows - row + pieces - piece - 1) / (pieces - piece);  // nearly equal for all pieces
          Ahead fetched = portion(visited + unpacks);
#ifdef QUIRE_TILES
          if (in_tiles) {
            const int line = visited / pieces * 2;
            format.visit_tiles(tiles, part, first + row, count, line, sums + row * PANEL + line * LANES, fetched);
            row += count;
            continue;
          }
#endif
          with_rows<RowsOf<Format>::ROWS>(count, [&](auto r) {
            auto visit = [&](auto c, int line) {
              format.template visit<r.value, c.value>(part, first + row, line, sums + row * PANEL + line * LANES,
                                                      fetched);
            };
            if (by_line) visit(Constant<1>{}, visited / pieces);
            else in_pieces<BlockingOf<Format>::COLUMNS>(lines, visit);
          });
          row += count;
        }
      }
      format.finish(panel, first, rows, sums);
    };
    auto may_be_together = [&](int64_t item) {
      return BlockingOf<Format>::TOGETHER > 0 && items[item].rows == 1 && !format.unpacks(1, true);
    };
    for (Ranges::Walk walk(ranges); walk.item >= 0; walk.advance()) {
      const int64_t other = may_be_together(walk.item) ? walk.take() : -1;
      if (other >= 0 && may_be_together(other)) {
        multiply_both(items[walk.item], items[other]);
      } else {
        multiply_one(walk.item, other >= 0 ? other : walk.next());
        if (other >= 0) multiply_one(other, walk.next());
      }
    }
  };
  const Weights read{reinterpret_cast<const char*>(format.weights), PANEL * shape.words * 4, shape.panels(), parts};
  together(parts, work, shape.rows <= at_once && !shape.bounds ? &read : nullptr);
}

// The index of an output's first word. Its next word is one panel row further.
inline int64_t first_word(const Shape& shape, int64_t output) {
  return output / PANEL * PANEL * shape.words + output % PANEL;
}

// Writes a panel's sums, [rows][PANEL], to result: [all rows, out]. bias: of all experts, [experts, out], or null.
template <class T>
void write_sums(const float* sums, int64_t panel, int64_t first, int rows, const T* bias, T* result, int64_t out) {
  const int64_t panels = (out + PANEL - 1) / PANEL, output = panel % panels * PANEL;
  const int64_t count = std::min<int64_t>(PANEL, out - output);
  if (bias) bias += panel / panels * out;
  for (int row = 0; row < rows; row++)
    for_lanes(count, [&](int64_t i, int n) {
      f32x16 sum = load(sums + row * PANEL + i);
      if (bias) sum += load_up_to(bias + output + i, n);
      store_up_to(result + (first + row) * out + output + i, sum, n);
    });
}

inline void write_sums(int dtype, const float* sums, int64_t panel, int64_t first, int rows, const void* bias,
                       void* result, int64_t out) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    write_sums(sums, panel, first, rows, (const T*)bias, (T*)result, out);
  });
}

struct Widened {
  const float* rows;
  int64_t stride;  // of a row
};

// Widens x: [rows, in] to float32: [rows, width], padded with zeros. This thread's next call overwrites the result.
template <class T>
Widened widened_rows(const T* x, int64_t x_stride, int64_t rows, int64_t in, int64_t width, int threads) {
  thread_local std::vector<float> kept;
  // Rows at distances of a multiple of 4,096 bytes would share few sets of the caches.
  const int64_t stride = width % 1024 == 0 ? width + LANES : width;
  float* const all = room(kept, rows * stride);
  for_each(rows, rows * in > 32768 ? threads : 1, [=](int64_t row) {
    float* const to = all + row * stride;
    for_lanes(in, [&](int64_t i, int n) { store_up_to(to + i, load_up_to(x + row * x_stride + i, n), n); });
    std::fill(to + in, to + width, 0.0f);
  });
  return {all, stride};
}

}  // namespace quire
