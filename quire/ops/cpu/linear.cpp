// The dense product with weights in panels (panels.h): packing, multiplying, and reading rows back.
#include "blocks.h"
#include "panels.h"
#include "replay.h"

#include <climits>

using namespace quire;

namespace {

template <class T>
struct Dense {
  using F = Factor<T>;
  static constexpr int LINES = UNPACKED<T>;
  static constexpr bool IS_BF16 = std::is_same_v<F, bf16>;  // whether products multiply bfloat16
  // Otherwise words are unpacked twice: other processors have too few registers for the second line, and unpacking
  // bfloat16 is cheap.
  static constexpr bool UNPACKS_AT_ONCE = std::is_same_v<T, fp16> && MAX_COLUMNS > 1;
#ifndef __AVX512F__
  // Sums take up to 12 of AVX2's 16 registers (24 of NEON's 32): from six rows with one line to one row with four
  // lines.
  static constexpr bool IN_BLOCKS = IS_BF16;
  // For this many visits, lines are unpacked once and stored one after the other.
  static constexpr int UNPACKS_FROM = IN_BLOCKS ? INT_MAX : std::is_same_v<T, fp16> ? 3 : 5;
  static constexpr int64_t UNPACKED_BYTES = 1 << 16;  // of a part: its four lines do not fit into L1 together
  struct Rows {
    static constexpr int ROWS = IN_BLOCKS ? MAX_ROWS : 6, IN_ORDER = IN_BLOCKS ? MAX_ROWS : 1;
  };
  struct Blocking {
    static constexpr int COLUMNS = IN_BLOCKS ? MAX_COLUMNS : PANEL_LINES;
    static constexpr bool FETCHES = false, BY_LINE = true;
    static constexpr int TOGETHER = IN_BLOCKS ? 0 : 1024;
    static int64_t chunk(int pieces) { return pieces < UNPACKS_FROM ? CHUNK_BYTES : UNPACKED_BYTES / LINES; }
  };
  static constexpr int columns(int rows) { return rows == 1 ? PANEL_LINES : rows <= 3 ? 2 : 1; }
#else
  static constexpr int UNPACKS_FROM = INT_MAX;
  static constexpr int columns(int) { return PANEL_LINES; }
#endif

  const uint32_t* weights;
  const F* x;  // [rows, in]
  int64_t x_stride;
  const T* bias;  // [out] or null
  T* result;      // [rows, out]
  int64_t out, row_words;

#ifdef QUIRE_TILES
  bool in_tiles(int64_t) const { return IS_BF16 && has_tiles(); }

  // A tile's products are added to each other before they are added to the sum, so tiles must begin at fixed words.
  int64_t step() const { return in_tiles(0) ? TILE : 1; }

  void visit_tiles(Tiles& tiles, const Part& part, int64_t row, int count, int line, float* sums, Ahead& ahead) const {
    tiles.configure(count);
    const int stride = part.stride(), both = std::min(2, part.lines - line);
    const int64_t words = part.words;
    const char* from = reinterpret_cast<const char*>(x + row * x_stride + PAIR<T> * part.word);
    const uint32_t* w = part.weights + line * LANES;
    Ahead::Pace pace = ahead.pace((words + TILE - 1) / TILE);
    tiles.for_sums(both, [&](auto tile, int r, int l) {
      if (part.is_first()) zero_tile<tile.value>();
      else load_tile<tile.value>(sums + r * PANEL + l * LANES, PANEL * sizeof(float));
    });
    for (int64_t i = 0; i < words; i += TILE) {
      ahead.fetch(pace);
      tiles.multiply<true>(from + i * 4, x_stride * sizeof(F), w + i * stride, stride,
                           int(std::min<int64_t>(TILE, words - i)), both);
    }
    tiles.for_sums(both, [&](auto tile, int r, int l) {
      store_tile<tile.value>(sums + r * PANEL + l * LANES, PANEL * sizeof(float));
    });
  }
#else
  int64_t step() const { return 1; }
#endif

  void expect(int64_t, int) const {}
  bool unpacks(int pieces, bool) const { return pieces >= UNPACKS_FROM; }

  Part part(int64_t panel, int64_t word, int64_t words, int lines, int pieces, bool, Unpacked& unpacked,
            Ahead& ahead) const {
    Part part{panel, lines, word, words, weights + panel * PANEL * row_words + word * lines * LANES};
    if (unpacks(pieces, false)) part.weights = in_lines(part, unpacked.words, ahead), part.is_wide = true;
    return part;
  }

  // Returns a part's lines, unpacked: [lines, words * LINES, LANES].
  const uint32_t* in_lines(const Part& part, std::vector<uint32_t>& kept, Ahead& ahead) const {
    const int64_t count = part.words * LINES;
    uint32_t* const all = room(kept, part.lines * count * LANES);
    const uint32_t* from = part.weights;
    Ahead::Pace pace = ahead.pace(part.words);
    for (int64_t i = 0; i < count; i += LINES) {
      ahead.fetch(pace);
      for (int line = 0; line < part.lines; line++, from += LANES) {
        u32x16 factors[LINES];
        unpack<T>(load_words(from), factors);
#pragma GCC unroll 2
        for (int j = 0; j < LINES; j++) store(all + (line * count + i + j) * LANES, factors[j]);
      }
    }
    return all;
  }

  template <int R, int C>
  void visit(const Part& part, int64_t row, int line, float* sums, Ahead& ahead) const {
    if constexpr (C == 1 && UNPACKS_FROM < INT_MAX)
      if (part.is_wide) {
        add_unpacked<R>(part, row, line, sums, ahead);
        if (part.word + part.words == row_words && visits_write(part.panel)) write(part.panel, row, R, line, C, sums);
        return;
      }
    constexpr int AT_ONCE = std::min(C, columns(R));
    for (int c = 0; c < C; c += AT_ONCE) {
      Ahead fetched = ahead.portion((C - c) / AT_ONCE);
      add_products<R, AT_ONCE>(part, row, line + c, sums + c * LANES, fetched);
    }
    // After the last part, the sums are complete. Each visit writes its own results, so that the next visit computes
    // while the results' cache lines are fetched.
    if (part.word + part.words == row_words && visits_write(part.panel)) write(part.panel, row, R, line, C, sums);
  }

  // Adds the products of R rows and an unpacked line.
  template <int R>
  void add_unpacked(const Part& part, int64_t row, int line, float* sums, Ahead& ahead) const {
    const int64_t count = part.words * LINES, bytes = x_stride * sizeof(F);
    const uint32_t* w = part.weights + line * count * LANES;
    const char* from = reinterpret_cast<const char*>(x + row * x_stride + PAIR<T> * part.word);
    constexpr int AT_ONCE = 8;
    Ahead::Pace pace = ahead.pace((count + AT_ONCE - 1) / AT_ONCE);
    f32x16 sum[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) sum[r] = part.is_first() ? f32x16{} : load(sums + r * PANEL);
    auto add = [&] __attribute__((always_inline)) {
      const u32x16 factors = load_words(w);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        uint32_t word;
        memcpy(&word, from + r * bytes, 4);
        sum[r] = add_dot<F>(sum[r], factors, splat(word));
      }
      w += LANES, from += 4;
    };
    for (int64_t left = count; left > 0; left -= AT_ONCE) {
      ahead.fetch(pace);
      if (left >= AT_ONCE)
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; i++) add();
      else
        for (int64_t i = 0; i < left; i++) add();
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) store(sums + r * PANEL, sum[r]);
  }

  // Keeps the sums in registers throughout the part.
  template <int R, int C>
  void add_products(const Part& part, int64_t row, int line, float* sums, Ahead& ahead) const {
    const int stride = part.stride();
    const int64_t words = part.words;
    Ahead::Pace pace = ahead.pace(words);
    const uint32_t* w = part.weights + line * LANES;
    const char* from = reinterpret_cast<const char*>(x + row * x_stride + PAIR<T> * part.word);
    const int64_t bytes = x_stride * sizeof(F);
    f32x16 sum[R][C];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sum[r][c] = part.is_first() ? f32x16{} : load(sums + r * PANEL + c * LANES);
#ifdef QUIRE_BLOCKS
    if constexpr (R > 1 && IS_BF16) {
      Blocks<R, f32x16> blocks(sum);
      blocks.add_lines(w, stride, words, from, bytes, [&] { ahead.fetch(pace); });
      blocks.write(sum);
    } else
#endif
    for (int64_t i = 0; i < words; i++, w += stride) {
      ahead.fetch(pace);
      u32x16 line[C][LINES];
#pragma GCC unroll 2
      for (int j = 0; j < LINES; j++) {
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          if constexpr (!UNPACKS_AT_ONCE) line[c][j] = unpack<T>(read_again(w + c * LANES), j);
          else if (j == 0) unpack<T>(load_words(w + c * LANES), line[c]);
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
          uint32_t word;
          memcpy(&word, from + r * bytes + (i * LINES + j) * 4, 4);
          const u32x16 words = splat(word);
#pragma GCC unroll 4
          for (int c = 0; c < C; c++) sum[r][c] = add_dot<F>(sum[r][c], line[c][j], words);
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) store(sums + r * PANEL + c * LANES, sum[r][c]);
  }

  void write(int64_t panel, int64_t row, int rows, int line, int lines, const float* sums) const {
    for (int r = 0; r < rows; r++)
      for (int64_t i = 0, output = first_output(panel) + line * LANES; i < lines * LANES; i += LANES, output += LANES) {
        const f32x16 sum = load(sums + r * PANEL + i);
        store(result + (row + r) * out + output, bias ? sum + load(bias_of(panel) + output) : sum);
      }
  }

  // Whether the visits of the last part write the results instead of `finish`: true if all 64 outputs of the panel
  // exist.
  bool visits_write(int64_t panel) const {
#ifdef QUIRE_TILES
    if (in_tiles(0)) return false;
#endif
    return first_output(panel) + PANEL <= out;
  }

  int64_t panels() const { return (out + PANEL - 1) / PANEL; }  // per expert
  int64_t first_output(int64_t panel) const { return panel % panels() * PANEL; }
  const T* bias_of(int64_t panel) const { return bias + panel / panels() * out; }

  void finish(int64_t panel, int64_t first, int rows, const float* sums) const {
    if (!visits_write(panel)) write_sums(sums, panel, first, rows, bias, result, out);
  }
};

}  // namespace

extern "C" {

// x: [rows, in] -> result: [rows, out]. packed: from quire_panels, `words` words per row, each with one or two
// elements. bounds: see Shape, or null.
void quire_linear(int dtype, const void* x, int64_t x_stride, int64_t rows, const void* packed, int64_t out,
                  int64_t words, const void* bias, const int64_t* bounds, int64_t experts, void* result, int threads) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    auto run = [&](const Factor<T>* factors, int64_t stride) {
      Dense<T> dense{(const uint32_t*)packed, factors, stride, (const T*)bias, (T*)result, out, words};
      multiply(dense, {rows, out, words, bounds, experts}, threads);
    };
    if constexpr (UNPACKED<T> == 1) {
      run((const T*)x, x_stride);
    } else {
      const Widened wide = widened_rows((const T*)x, x_stride, rows, 2 * words, 2 * words, threads);
      run(wide.rows, wide.stride);
    }
  });
}

// Packs [out, words] 32-bit words into panels. Works in place (packed == weight) if out is a multiple of 16: a panel
// then has the size of its rows.
void quire_panels(const void* weight, int64_t out, int64_t words, void* packed, int threads) {
  const Shape shape{0, out, words};
  for_each(shape.panels(), threads, [&](int64_t panel) {
    const int64_t count = std::min<int64_t>(PANEL, out - panel * PANEL), width = shape.lines(panel) * LANES;
    const uint32_t* from = (const uint32_t*)weight + panel * PANEL * shape.words;
    std::vector<uint32_t> rows(width * shape.words + LANES);  // padded for the last load
    memcpy(rows.data(), from, count * shape.words * sizeof(uint32_t));
    uint32_t* to = (uint32_t*)packed + panel * PANEL * shape.words;
    for (int64_t word = 0; word < shape.words; word += LANES)
      for (int64_t i = 0; i < width; i += LANES) {
        u32x16 block[LANES];
        for (int r = 0; r < LANES; r++) block[r] = load_words(rows.data() + (i + r) * shape.words + word);
        transpose(block);
        for (int w = 0; w < std::min<int64_t>(LANES, shape.words - word); w++)
          store(to + (word + w) * width + i, block[w]);
      }
  });
}

// Reads the rows `ids` of a packed weight: [count, words].
void quire_panel_rows(const void* packed, int64_t out, int64_t words, const int64_t* ids, int64_t count, void* result,
                      int threads) {
  const Shape shape{0, out, words};
  for_each(count, threads, [&](int64_t i) {
    const uint32_t* from = (const uint32_t*)packed + first_word(shape, ids[i]);
    const int64_t stride = shape.lines(ids[i] / PANEL) * LANES;
    uint32_t* to = (uint32_t*)result + i * shape.words;
    for (int64_t word = 0; word < shape.words; word++) to[word] = from[word * stride];
  }, 8);
}
}

RECORDABLE(quire_linear)
