// Operations on heads before attention. Inputs: [tokens, heads, dim] with strides; outputs: contiguous.
#include <cmath>
#include <cstring>

#include "replay.h"
#include "team.h"
#include "vector.h"

using namespace quire;

namespace {

constexpr int64_t PARALLEL_ELEMENTS = 32768;  // with less work, one thread finishes before a second one wakes up

template <class F>
void for_heads(int64_t tokens, int64_t heads, int64_t dim, int threads, F f) {
  for_each(tokens * heads, tokens * heads * dim >= PARALLEL_ELEMENTS ? threads : 1,
           [=](int64_t i) { f(i, i / heads, i % heads); });
}

// See `sharpen` in ops/reference/elementwise.py.
template <class T>
void sharpen(const T* q, int64_t stride, int64_t head_stride, int64_t tokens, int64_t heads, int64_t dim,
             const int64_t* positions, float scale, int64_t length, int64_t offset, T* out, int threads) {
  for_heads(tokens, heads, dim, threads, [=](int64_t row, int64_t token, int64_t head) {
    const float factor = 1.0f + scale * std::log1p(float((positions[token] + offset) / length));
    const T* from = q + token * stride + head * head_stride;
    for_lanes(dim, [&](int64_t i, int n) { store_up_to(out + row * dim + i, load_up_to(from + i, n) * factor, n); });
  });
}

enum Which { QUERY, KEY, VALUE };

template <class T>
void append_positions(Which which, const T* x, int64_t stride, int64_t head_stride, int64_t tokens, int64_t heads,
                      int64_t dim, const T* slopes, const int64_t* positions, T* out, int threads) {
  for_heads(tokens, heads, dim, threads, [=](int64_t row, int64_t token, int64_t head) {
    T* to = out + row * (dim + 2);
    memcpy(to, x + token * stride + head * head_stride, dim * sizeof(T));
    const int64_t low = positions[token] & 255;
    f32x16 digits = {};
    if (which == KEY) digits = f32x16{float(positions[token] - low), float(low)};
    if (which == QUERY) digits = splat(load_part(slopes + head, 1)[0]);
    store_part(to + dim, digits, 2);
  });
}

}  // namespace

extern "C" {

// Concatenates two tensors along dim. first, second: [tokens, heads, dim], elements of `size` bytes.
void quire_join(int64_t tokens, int64_t heads, int64_t size, const void* first, int64_t stride, int64_t head_stride,
                int64_t dim, const void* second, int64_t second_stride, int64_t second_head_stride, int64_t second_dim,
                void* out, int threads) {
  const int64_t width = dim + second_dim;
  for_heads(tokens, heads, width, threads, [=](int64_t row, int64_t token, int64_t head) {
    char* to = (char*)out + row * width * size;
    memcpy(to, (const char*)first + (token * stride + head * head_stride) * size, dim * size);
    memcpy(to + dim * size, (const char*)second + (token * second_stride + head * second_head_stride) * size,
           second_dim * size);
  });
}

void quire_sharpen(int dtype, const void* q, int64_t stride, int64_t head_stride, int64_t tokens, int64_t heads,
                   int64_t dim, const int64_t* positions, float scale, int64_t length, int64_t offset, void* out,
                   int threads) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    sharpen((const T*)q, stride, head_stride, tokens, heads, dim, positions, scale, length, offset, (T*)out, threads);
  });
}

// which: 0 for queries, 1 for keys, 2 for values.
void quire_append_positions(int dtype, int which, const void* x, int64_t stride, int64_t head_stride, int64_t tokens,
                            int64_t heads, int64_t dim, const void* slopes, const int64_t* positions, void* out,
                            int threads) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    append_positions(Which(which), (const T*)x, stride, head_stride, tokens, heads, dim, (const T*)slopes, positions,
                     (T*)out, threads);
  });
}
}

RECORDABLE(quire_join)
RECORDABLE(quire_sharpen)
RECORDABLE(quire_append_positions)
