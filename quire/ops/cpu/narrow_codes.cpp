// Packs and unpacks rows of narrow codes (narrow_codes.h).
#include "narrow_codes.h"
#include "team.h"

using namespace quire;

namespace {

// f(unit, its bytes of wide codes, how many there are in the row)
template <int BITS, class F>
void for_units(int64_t bytes, F f) {
  constexpr int64_t SIZE = 4 * BITS;
  for (int64_t from = 0; from < bytes; from += SIZE) f(from / SIZE, from, size_t(std::min(SIZE, bytes - from)));
}

}  // namespace

extern "C" {

// Codes of 4 or 8 bits, [rows, bytes], less `base` each, in `bits` bits: [rows, units of 32 codes, words].
void quire_narrow_codes(int bits, const uint8_t* codes, int64_t rows, int64_t bytes, int base, uint32_t* result,
                        int threads) {
  with_bits(bits, [&](auto constant) {
    constexpr int N = constant.value, BITS = wide_bits(N);
    const int64_t row_words = (bytes + 4 * BITS - 1) / (4 * BITS) * N;
    for_each(rows, threads, [=](int64_t row) {
      for_units<BITS>(bytes, [=](int64_t unit, int64_t from, size_t size) {
        uint32_t wide[BITS] = {}, narrow[N];
        memcpy(wide, codes + row * bytes + from, size);
        for (uint32_t& word : wide) word -= in_each_field(BITS, 1) * uint32_t(base);
        narrow_codes<N>(wide, narrow);
        memcpy(result + row * row_words + unit * N, narrow, sizeof(narrow));
      });
    });
  });
}

// The other way.
void quire_widen_codes(int bits, const uint32_t* codes, int64_t rows, int64_t bytes, int base, uint8_t* result,
                       int threads) {
  with_bits(bits, [&](auto constant) {
    constexpr int N = constant.value, BITS = wide_bits(N);
    const int64_t row_words = (bytes + 4 * BITS - 1) / (4 * BITS) * N;
    for_each(rows, threads, [=](int64_t row) {
      for_units<BITS>(bytes, [=](int64_t unit, int64_t from, size_t size) {
        uint32_t wide[BITS];
        widen_codes<N>([=](int i) { return codes[row * row_words + unit * N + i]; }, wide);
        for (uint32_t& word : wide) word += in_each_field(BITS, 1) * uint32_t(base);
        memcpy(result + row * bytes + from, wide, size);
      });
    });
  });
}
}
