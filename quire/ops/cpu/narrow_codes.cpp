// Packs and unpacks rows of narrow codes (narrow_codes.h).
#include "narrow_codes.h"
#include "team.h"

using namespace quire;

namespace {

// Calls f(Constant<bits>, first byte, first stored word, bytes) for each unit of the wide codes, [rows, bytes]. The
// last unit of a row may be smaller.
template <class F>
void for_units(int bits, int64_t rows, int64_t bytes, int threads, F f) {
  with_bits(bits, [&](auto constant) {
    constexpr int BITS = constant.value;
    constexpr int64_t SIZE = 4 * wide_words(BITS);
    const int64_t row_words = (bytes + SIZE - 1) / SIZE * stored_words(BITS);
    for_each(rows, threads, [=](int64_t row) {
      int64_t word = row * row_words;
      for (int64_t from = 0; from < bytes; from += SIZE, word += stored_words(BITS))
        f(constant, row * bytes + from, word, size_t(std::min(SIZE, bytes - from)));
    });
  });
}

}  // namespace

extern "C" {

// Packs codes of 4 or 8 bits, [rows, bytes], minus `base` each, into units of `bits`-bit codes: words, [rows, whole
// units].
void quire_narrow_codes(int bits, const uint8_t* codes, int64_t rows, int64_t bytes, int base, uint32_t* result,
                        int threads) {
  for_units(bits, rows, bytes, threads, [=](auto constant, int64_t from, int64_t first, size_t size) {
    constexpr int BITS = constant.value;
    uint32_t wide[wide_words(BITS)] = {}, stored[stored_words(BITS)];
    memcpy(wide, codes + from, size);
    for (uint32_t& word : wide) word -= in_each_field(wide_bits(BITS), 1) * uint32_t(base);
    narrow_codes<BITS>(wide, stored);
    memcpy(result + first, stored, sizeof(stored));
  });
}

// The inverse of quire_narrow_codes.
void quire_widen_codes(int bits, const uint32_t* codes, int64_t rows, int64_t bytes, int base, uint8_t* result,
                       int threads) {
  for_units(bits, rows, bytes, threads, [=](auto constant, int64_t from, int64_t first, size_t size) {
    constexpr int BITS = constant.value;
    uint32_t wide[wide_words(BITS)];
    widen_codes<BITS>([=](int i) { return codes[first + i]; }, wide);
    for (uint32_t& word : wide) word += in_each_field(wide_bits(BITS), 1) * uint32_t(base);
    memcpy(result + from, wide, size);
  });
}
}
