// Quantizes dense weights to 8 or 4 bits on loading (defined in ops/reference/quantized.py), and reads rows of 8-bit
// weights.
#include <algorithm>
#include <vector>

#include "panels.h"
#include "vector.h"

using namespace quire;

namespace {

constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits

// Returns the codes minus their centre, as floats.
inline f32x16 codes_of(f32x16 x, float inverse, float centre) {
  f32x16 code = x * inverse + SHIFT - SHIFT;
  code = where(code < -centre, splat(-centre), code);
  return where(code > centre - 1, splat(centre - 1), code);
}

// Quantizes a group of n weights to codes, one per byte, and returns the scale. factors: [count], multiples of the
// usual scale to try.
template <class T>
float quantize_group(const T* x, int64_t n, float centre, const float* factors, int count, uint8_t* codes) {
  f32x16 low = {}, high = {};
  for_lanes(n, [&](int64_t i, int lanes) {
    const f32x16 v = load_up_to(x + i, lanes);
    low = larger(low, -v), high = larger(high, v);
  });
  const float least = -maximum(low), most = maximum(high), extreme = most > -least ? most : least;
  float best = 0, least_error = -1;
  for (int f = 0; f < count; f++) {
    const float scale = extreme / -centre * factors[f], inverse = scale != 0 ? 1 / scale : 0;
    f32x16 errors = {};
    for_lanes(n, [&](int64_t i, int lanes) {
      const f32x16 v = load_up_to(x + i, lanes), off = codes_of(v, inverse, centre) * scale - v;
      errors += off * off;
    });
    const float error = sum(errors);
    if (least_error < 0 || error < least_error) least_error = error, best = scale;
  }
  const float inverse = best != 0 ? 1 / best : 0;
  f32x16 products = {}, squares = {};
  for_lanes(n, [&](int64_t i, int lanes) {
    const f32x16 v = load_up_to(x + i, lanes), code = codes_of(v, inverse, centre);
    products += v * code, squares += code * code;
    const i32x16 whole = to_int(code + centre);
    for (int j = 0; j < lanes; j++) codes[i + j] = uint8_t(whole[j]);
  });
  const float total = sum(squares);
  return total > 0 ? sum(products) / total : 0;
}

template <class T>
void quantize(const T* weight, int64_t out, int64_t in, int bits, int64_t group, const float* factors, int count,
              uint8_t* codes, float* scales, int threads) {
  const int64_t groups = (in + group - 1) / group, bytes = bits == 8 ? in : (in + 1) / 2;
  for_each(out, threads, [&](int64_t o) {
    thread_local std::vector<uint8_t> row;
    row.assign(in + 1, uint8_t(1 << (bits - 1)));
    uint8_t* whole = bits == 8 ? codes + o * bytes : row.data();
    for (int64_t g = 0; g < groups; g++)
      scales[o * groups + g] = quantize_group(weight + o * in + g * group, std::min(group, in - g * group),
                                              float(1 << (bits - 1)), factors, count, whole + g * group);
    if (bits == 4)
      for (int64_t i = 0; i < bytes; i++) codes[o * bytes + i] = uint8_t(row[2 * i] | row[2 * i + 1] << 4);
  });
}

// codes: [out, in], scales: [out, groups], both in panels; result: [count, in].
template <class T>
void byte_rows(const uint32_t* codes, const float* scales, int64_t out, int64_t in, int64_t group, const int64_t* ids,
               int64_t count, T* result, int threads) {
  const Shape of_codes{0, out, (in + 3) / 4}, of_scales{0, out, (in + group - 1) / group};
  for_each(count, threads, [&](int64_t i) {
    const int64_t stride = of_codes.lines(ids[i] / PANEL) * LANES;
    const uint32_t* from = codes + first_word(of_codes, ids[i]);
    const float* scale = scales + first_word(of_scales, ids[i]);
    for_lanes(in, [&](int64_t first, int lanes) {
      alignas(64) float values[LANES] = {};
      for (int j = 0; j < lanes; j++) {
        const int64_t input = first + j;
        const uint32_t code = from[input / 4 * stride] >> input % 4 * 8 & 255;
        values[j] = (float(code) - 128) * scale[input / group * stride];
      }
      store_up_to(result + i * in + first, load(values), lanes);
    });
  }, 8);
}

}  // namespace

// weight: [out, in] -> codes: [out, in], or [out, ceil(in / 2)] with two per byte; scales: [out, groups].
extern "C" void quire_quantize(int dtype, const void* weight, int64_t out, int64_t in, int bits, int64_t group,
                               const float* factors, int count, void* codes, float* scales, int threads) {
  with_type(dtype, [&](auto type) {
    quantize((const decltype(type)*)weight, out, in, bits, group, factors, count, (uint8_t*)codes, scales, threads);
  });
}

// Dequantizes the rows `ids` of a weight with 8-bit codes (centre 128) and float32 scales, both in panels: [count, in].
extern "C" void quire_byte_rows(int dtype, const void* codes, const float* scales, int64_t out, int64_t in,
                                int64_t group, const int64_t* ids, int64_t count, void* result, int threads) {
  with_type(dtype, [&](auto type) {
    byte_rows((const uint32_t*)codes, scales, out, in, group, ids, count, (decltype(type)*)result, threads);
  });
}
