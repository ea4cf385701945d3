// Applies masks of allowed tokens to logits. Most masks allow either few tokens or nearly all, so words of 32 tokens
// are masked or skipped as a whole where possible.
#include <algorithm>
#include <limits>

#include "team.h"
#include "vector.h"

using namespace quire;

namespace {

constexpr int WORD = 32;  // tokens per word of a mask

template <class T>
void forbid(T* logits, int64_t vocab, const uint32_t* words, T never) {
  for (int64_t begin = 0; begin < vocab; begin += WORD) {
    const uint32_t word = words[begin / WORD];
    const int64_t end = std::min(begin + WORD, vocab);
    if (word == 0) {
      std::fill(logits + begin, logits + end, never);
    } else if (word != ~0u) {
      for (int64_t t = begin; t < end; t++)
        if (!(word >> (t - begin) & 1)) logits[t] = never;
    }
  }
}

}  // namespace

extern "C" void quire_apply_token_masks(int dtype, void* logits, int64_t stride, int64_t vocab, const int64_t* places,
                                        int64_t masks, const uint32_t* bits, int threads) {
  const int64_t words = (vocab + WORD - 1) / WORD;
  for_each(masks, masks * vocab > 65536 ? threads : 1, [=](int64_t i) {
    with_type(dtype, [&](auto never) {
      store_part(&never, splat(-std::numeric_limits<float>::infinity()), 1);
      forbid((decltype(never)*)logits + places[i] * stride, vocab, bits + i * words, never);
    });
  });
}
