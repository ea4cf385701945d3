// Packs and unpacks rows of narrow codes (narrow_codes.h).
#include "narrow_codes.h"
#include "team.h"

using namespace quire;

namespace {

// f(first byte, stored word, bytes) for each unit of a row of wide codes, of which the last one may be smaller.
template <int BITS, class F>
void for_units(int64_t bytes, F f) {
  constexpr int64_t SIZE = 4 * wide_words(BITS);
  for (int64_t from = 0, word = 0; from < bytes; from += SIZE, word += stored_words(BITS))
    f(from, word, size_t(std::min(SIZE, bytes - from)));
}

template <int BITS>
constexpr int64_t row_words(int64_t bytes) {
  constexpr int64_t SIZE = 4 * wide_words(BITS);
  return (bytes + SIZE - 1) / SIZE * stored_words(BITS);
}

}  // namespace

extern "C" {

// Codes of 4 or 8 bits, [rows, bytes], less `base` each, to units of `bits` bits: words [rows, whole units].
void quire_narrow_codes(int bits, const uint8_t* codes, int64_t rows, int64_t bytes, int base, uint32_t* result,
                        int threads) {
  with_bits(bits, [&](auto constant) {
    constexpr int BITS = constant.value;
    for_each(rows, threads, [=](int64_t row) {
      for_units<BITS>(bytes, [=](int64_t from, int64_t first, size_t size) {
        uint32_t wide[wide_words(BITS)] = {}, stored[stored_words(BITS)];
        memcpy(wide, codes + row * bytes + from, size);
        for (uint32_t& word : wide) word -= in_each_field(wide_bits(BITS), 1) * uint32_t(base);
        narrow_codes<BITS>(wide, stored);
        memcpy(result + row * row_words<BITS>(bytes) + first, stored, sizeof(stored));
      });
    });
  });
}

// The other way.
void quire_widen_codes(int bits, const uint32_t* codes, int64_t rows, int64_t bytes, int base, uint8_t* result,
                       int threads) {
  with_bits(bits, [&](auto constant) {
    constexpr int BITS = constant.value;
    for_each(rows, threads, [=](int64_t row) {
      for_units<BITS>(bytes, [=](int64_t from, int64_t first, size_t size) {
        uint32_t wide[wide_words(BITS)];
        const uint32_t* stored = codes + row * row_words<BITS>(bytes) + first;
        widen_codes<BITS>([=](int i) { return stored[i]; }, wide);
        for (uint32_t& word : wide) word += in_each_field(wide_bits(BITS), 1) * uint32_t(base);
        memcpy(result + row * bytes + from, wide, size);
      });
    });
  });
}
}
