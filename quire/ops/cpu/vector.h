// Arithmetic on vectors of 16 lanes (lanes.h). Intrinsics are used only where a specific instruction matters (bf16 dot
// products, conversions of bf16 and fp16).
#pragma once

#include "lanes.h"

namespace quire {

struct bf16 {
  uint16_t bits;
};

struct fp16 {
  uint16_t bits;
};

// Calls f(T{}), where T is the type with code `dtype` (CODES in build.py). A translation unit for one type (units.py)
// supports only that type.
template <class F>
inline void with_type(int dtype, F f) {
#ifdef QUIRE_TYPE
  f(QUIRE_TYPE{});
#else
  if (dtype == 0) f(float{});
  else if (dtype == 1) f(bf16{});
  else f(fp16{});
#endif
}

// Calls f(T{}, W{}) with the types of tensors and of a weight, which is float32 if is_wide.
template <class F>
inline void with_types(int dtype, int is_wide, F f) {
  with_type(dtype, [&](auto type) { is_wide ? f(type, float{}) : f(type, type); });
}

const i32x16 LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

QUIRE_INLINE u32x16 load_words(const uint32_t* p) { return read<u32x16>(p); }
QUIRE_INLINE f32x16 load(const float* p) { return read<f32x16>(p); }
QUIRE_INLINE f32x16 load(const bf16* p) { return as<f32x16>(widened(read<u16x16>(p)) << 16); }

// Converts float16 to float32, exactly.
QUIRE_INLINE f32x16 widened_fp16(u16x16 v) {
#if defined(__AVX512F__)
  return as<f32x16>(_mm512_cvtph_ps(as<__m256i>(v)));
#elif defined(__AVX2__) && defined(__F16C__)
  return each<f32x16>([&](auto i) { return (f32x16::Part)_mm256_cvtph_ps((__m128i)v.parts[i]); });
#elif defined(__ARM_NEON)
  return each<f32x16>([&](auto i) { return (f32x16::Part)vcvt_f32_f16(as<float16x4_t>(v.parts[i])); });
#else
  const u32x16 bits = widened(v), size = (bits & 0x7fff) << 13;
  const f32x16 finite = as<f32x16>(size) * 0x1p112f;  // also correct for subnormal numbers
  const u32x16 other = as<u32x16>(where(size >= 0x1fu << 23, as<f32x16>(size | 0x7f800000u), finite));
  return as<f32x16>(other | (bits & 0x8000) << 16);
#endif
}

QUIRE_INLINE f32x16 load(const fp16* p) { return widened_fp16(read<u16x16>(p)); }

QUIRE_INLINE void store(uint32_t* p, u32x16 v) { write(p, v); }
QUIRE_INLINE void store(float* p, f32x16 v) { write(p, v); }

// Rounds to bfloat16, in the upper half of each lane: to nearest, ties to even, like torch.
QUIRE_INLINE u32x16 rounded_bits(f32x16 v) {
  const u32x16 bits = as<u32x16>(v);
  return where(v == v, bits + 0x7fff + ((bits >> 16) & 1), splat(0x7fc00000u));
}

QUIRE_INLINE u16x16 round_to_bf16(f32x16 v) {
#ifdef __AVX512BF16__
  return as<u16x16>(_mm512_cvtneps_pbh(as<__m512>(v)));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return each<u16x16>([&](auto i) { return as<u16x16::Part>(vcvt_bf16_f32(v.parts[i])); });
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const u32x16 high = rounded_bits(v) >> 16;
  const __m256i pairs = _mm256_packus_epi32((__m256i)high.parts[0], (__m256i)high.parts[1]);
  return as<u16x16>(_mm256_permute4x64_epi64(pairs, 0xd8));
#else
  return low_halves(rounded_bits(v) >> 16);
#endif
}

// Rounds to float16: to nearest, ties to even.
QUIRE_INLINE u16x16 round_to_fp16(f32x16 v) {
#if defined(__AVX512F__)
  return as<u16x16>(_mm512_cvtps_ph(as<__m512>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__) && defined(__F16C__)
  return each<u16x16>([&](auto i) { return (u16x16::Part)_mm256_cvtps_ph((__m256)v.parts[i], _MM_FROUND_TO_NEAREST_INT); });
#elif defined(__ARM_NEON)
  return each<u16x16>([&](auto i) { return as<u16x16::Part>(vcvt_f16_f32((float32x4_t)v.parts[i])); });
#else
  const u32x16 bits = as<u32x16>(v), size = bits & 0x7fffffff;
  const f32x16 x = as<f32x16>(size);
  const u32x16 normal = ((size + 0xfff + ((size >> 13) & 1)) >> 13) - (112 << 10);
  const u32x16 small = as<u32x16>(x + 0.5f) & 0x7ff;  // adding 1/2 leaves multiples of 2^-24
  const u32x16 finite = where(x < 0x1p-14f, small, where(x < 65536.0f, normal, splat(uint32_t(0x7c00))));
  return low_halves(where(v == v, finite, splat(uint32_t(0x7e00))) | ((bits >> 16) & 0x8000));
#endif
}

QUIRE_INLINE void store(bf16* p, f32x16 v) { write(p, round_to_bf16(v)); }
QUIRE_INLINE void store(fp16* p, f32x16 v) { write(p, round_to_fp16(v)); }

QUIRE_INLINE f32x16 rounded_to(f32x16 v, float) { return v; }
QUIRE_INLINE f32x16 rounded_to(f32x16 v, bf16) {
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return as<f32x16>(widened(round_to_bf16(v)) << 16);
#else
  return as<f32x16>(rounded_bits(v) & 0xffff0000u);
#endif
}
QUIRE_INLINE f32x16 rounded_to(f32x16 v, fp16) { return widened_fp16(round_to_fp16(v)); }

// Loads the bits of each element as an integer.
QUIRE_INLINE u32x16 load_bits(const float* p) { return read<u32x16>(p); }
template <class T>
QUIRE_INLINE u32x16 load_bits(const T* p) { return widened(read<u16x16>(p)); }

// Loads the first n < 16 elements; the other lanes are 0.
template <class T>
inline f32x16 load_part(const T* p, int n) {
  T part[LANES] = {};
  for (int i = 0; i < n; i++) part[i] = p[i];
  return load(part);
}

template <class T>
inline void store_part(T* p, f32x16 v, int n) {
  T part[LANES];
  store(part, v);
  for (int i = 0; i < n; i++) p[i] = part[i];
}

// Calls f(offset, lanes) for n elements in steps of 16; only the last step may have fewer lanes.
template <class F>
inline void for_lanes(int64_t n, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(i, LANES);
  if (i < n) f(i, int(n - i));
}

template <class T>
QUIRE_INLINE f32x16 load_up_to(const T* p, int n) {
  return n == LANES ? load(p) : load_part(p, n);
}

template <class T>
QUIRE_INLINE void store_up_to(T* p, f32x16 v, int n) {
  if (n == LANES) store(p, v);
  else store_part(p, v, n);
}

QUIRE_INLINE f32x16 fma(f32x16 a, f32x16 b, float c) { return fma(a, b, splat(c)); }

QUIRE_INLINE f32x16 larger(f32x16 a, f32x16 b) { return where(a > b, a, b); }

// Combines all lanes with `combine` and returns the result in each lane.
template <class V, class F>
inline V folded(V v, F combine) {
  v = combine(v, shuffle<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(v, v));
  v = combine(v, shuffle<4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11>(v, v));
  v = combine(v, shuffle<2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13>(v, v));
  return combine(v, shuffle<1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14>(v, v));
}

inline float maximum(f32x16 v) { return folded(v, [](f32x16 a, f32x16 b) { return larger(a, b); })[0]; }
inline float sum(f32x16 v) { return folded(v, [](f32x16 a, f32x16 b) { return a + b; })[0]; }

// Transposes 16 x 16 words by exchanging larger and larger blocks across the diagonal.
inline void transpose(u32x16* v) {
  auto exchange = [&](int distance, auto low, auto high) {
    for (int i = 0; i < LANES; i++)
      if (!(i & distance)) {
        const u32x16 a = v[i], b = v[i + distance];
        v[i] = low(a, b), v[i + distance] = high(a, b);
      }
  };
#define QUIRE_SHUFFLE(...) [](u32x16 a, u32x16 b) { return shuffle<__VA_ARGS__>(a, b); }
  exchange(1, QUIRE_SHUFFLE(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
           QUIRE_SHUFFLE(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
  exchange(2, QUIRE_SHUFFLE(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
           QUIRE_SHUFFLE(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
  exchange(4, QUIRE_SHUFFLE(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
           QUIRE_SHUFFLE(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
  exchange(8, QUIRE_SHUFFLE(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
           QUIRE_SHUFFLE(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
#undef QUIRE_SHUFFLE
}

// 2^x with a relative error of 1.0e-7; 0 for x below -126, where the result would be subnormal. x must be below 128.
QUIRE_INLINE f32x16 exp2(f32x16 x) {
  f32x16 clamped = larger(x, splat(-126.0f));
  const f32x16 shift = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  f32x16 shifted = clamped + shift;
  f32x16 f = clamped - (shifted - shift);  // in [-1/2, 1/2]
  f32x16 p = splat(0.0013276472028438645f);
  p = fma(p, f, 0.009675541479846317f);
  p = fma(p, f, 0.05550713274650802f);
  p = fma(p, f, 0.24022119721166582f);
  p = fma(p, f, 0.6931469670632635f);
  p = fma(p, f, 1.000000071655221f);
  f32x16 scaled = as<f32x16>(as<u32x16>(p) + (as<u32x16>(shifted) << 23));
  return where(x < -126.0f, f32x16{}, scaled);
}

// Relative error 2e-7. Uses Cephes' polynomial near 0, where the exponential formula loses digits.
inline f32x16 tanh(f32x16 x) {
  f32x16 size = where(x < 0.0f, -x, x), square = x * x;
  f32x16 p = splat(-5.70498872745e-3f);
  p = fma(p, square, 2.06390887954e-2f);
  p = fma(p, square, -5.37397155531e-2f);
  p = fma(p, square, 1.33314422036e-1f);
  p = fma(p, square, -3.33332819422e-1f);
  f32x16 grown = exp2(where(size < 40.0f, size, splat(40.0f)) * 2.8853900817779268f);
  f32x16 far = 1.0f - 2.0f / (grown + 1.0f);
  return where(size < 0.625f, fma(x * square, p, x), where(x < 0.0f, -far, far));
}

// The standard normal distribution function, with a relative error of 1e-5 even in the lower tail. It is computed as t
// * exp(-x^2 / 2) times exp2 of a polynomial in t, where t = 1 / (1 + 0.4 |x|). The polynomial was fitted at Chebyshev
// nodes for |x| < 14.
inline f32x16 normal_distribution(f32x16 x) {
  f32x16 t = 1.0f / (1.0f + 0.4f * where(x < 0.0f, -x, x));
  f32x16 p = splat(0.276698911f);
  p = fma(p, t, -1.41620878f);
  p = fma(p, t, 2.82860752f);
  p = fma(p, t, -2.54610317f);
  p = fma(p, t, 0.795098092f);
  p = fma(p, t, -0.267053262f);
  p = fma(p, t, 0.538132596f);
  p = fma(p, t, 1.43833632f);
  p = fma(p, t, -2.64750809f);
  f32x16 tail = t * exp2(p - 0.72134752f * x * x);
  return where(x < 0.0f, tail, 1.0f - tail);
}

// Natural logarithm of positive normal numbers, with a relative error of 1e-7 even near 1 (Cephes' logf).
inline f32x16 log(f32x16 x) {
  u32x16 bits = as<u32x16>(x) + (0x3f800000u - 0x3f3504f3u);  // splits the exponent at sqrt(1/2)
  f32x16 e = to_float(as<i32x16>(bits >> 23) - 127);
  f32x16 f = as<f32x16>((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
  f32x16 p = splat(7.0376836292e-2f);
  p = fma(p, f, -1.1514610310e-1f);
  p = fma(p, f, 1.1676998740e-1f);
  p = fma(p, f, -1.2420140846e-1f);
  p = fma(p, f, 1.4249322787e-1f);
  p = fma(p, f, -1.6668057665e-1f);
  p = fma(p, f, 2.0000714765e-1f);
  p = fma(p, f, -2.4999993993e-1f);
  p = fma(p, f, 3.3333331174e-1f);
  f32x16 square = f * f;
  f32x16 tail = p * f * square + e * -2.12194440e-4f - 0.5f * square;
  return f + tail + e * 0.693359375f;
}

template <class T>
constexpr int PAIR = 4 / sizeof(T);  // elements per 32-bit word

// Adds the products of 32-bit words, each a float32 or a pair of bfloat16.
template <class T>
QUIRE_INLINE f32x16 dot(f32x16 sum, u32x16 line, u32x16 word);

template <>
QUIRE_INLINE f32x16 dot<float>(f32x16 sum, u32x16 line, u32x16 word) {
  return fma(as<f32x16>(line), as<f32x16>(word), sum);
}

template <>
QUIRE_INLINE f32x16 dot<bf16>(f32x16 sum, u32x16 line, u32x16 word) {
#ifdef __AVX512BF16__
  return as<f32x16>(_mm512_dpbf16_ps(as<__m512>(sum), as<__m512bh>(line), as<__m512bh>(word)));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return each<f32x16>([&](auto i) {
    return vbfdotq_f32(sum.parts[i], as<bfloat16x8_t>(line.parts[i]), as<bfloat16x8_t>(word.parts[i]));
  });
#else
  sum = fma(as<f32x16>(line << 16), as<f32x16>(word << 16), sum);
  return fma(as<f32x16>(line & 0xffff0000u), as<f32x16>(word & 0xffff0000u), sum);
#endif
}

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool MULTIPLIES_BF16 = true;
#else
constexpr bool MULTIPLIES_BF16 = false;
#endif

// sum + dot(line, word). With AVX2, assembly keeps the sum in its register: gcc 12 would move sums around until it runs
// out of registers.
template <class T>
QUIRE_INLINE f32x16 add_dot(f32x16 sum, u32x16 line, u32x16 word) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>)
    return each<f32x16>([&](auto i) {
      f32x16::Part part = sum.parts[i];
      asm("vfmadd231ps %2, %1, %0" : "+x"(part) : "x"(line.parts[i]), "x"(word.parts[i]));
      return part;
    });
#endif
  return dot<T>(sum, line, word);
}

// Loads a line that the compiler must not keep in registers after its use, since sums need the registers.
QUIRE_INLINE u32x16 read_again(const uint32_t* p) {
  asm volatile("" : "+r"(p));
  return load_words(p);
}

// The type used in products: float16 is first widened to float32, and so is bfloat16 if no instruction multiplies it.
template <class T>
using Factor = std::conditional_t<std::is_same_v<T, bf16> && MULTIPLIES_BF16, bf16, float>;

// The number of lines of factors per line of words. If words are widened, it is two: their first elements, then their
// second ones.
template <class T>
constexpr int UNPACKED = PAIR<T> / PAIR<Factor<T>>;

template <class T>
QUIRE_INLINE void unpack(u32x16 words, u32x16* lines) {
  if constexpr (UNPACKED<T> == 1) {
    lines[0] = words;
  } else if constexpr (std::is_same_v<T, bf16>) {
    lines[0] = words << 16, lines[1] = words & 0xffff0000u;
  } else {
#ifdef __AVX512F__
    typedef uint16_t Elements __attribute__((vector_size(64)));
    const Elements given = as<Elements>(words);
    const __m512i sorted = as<__m512i>(__builtin_shufflevector(
        given, given, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23,
        25, 27, 29, 31));
    lines[0] = as<u32x16>(_mm512_cvtph_ps(_mm512_castsi512_si256(sorted)));
    lines[1] = as<u32x16>(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(sorted, 1)));
#else
    for (int i = 0; i < 2; i++) lines[i] = as<u32x16>(widened_fp16(low_halves(words >> 16 * i)));
#endif
  }
}

// Returns the i-th of these lines.
template <class T>
QUIRE_INLINE u32x16 unpack(u32x16 words, int i) {
  if constexpr (UNPACKED<T> == 1) {
    return words;
  } else if constexpr (std::is_same_v<T, bf16>) {
    return i ? words & 0xffff0000u : words << 16;
  } else {
    u32x16 lines[2];
    unpack<T>(words, lines);
    return lines[i];
  }
}

// Loads one line of consecutive factors.
template <class T>
QUIRE_INLINE u32x16 load_factors(const T* p) {
  if constexpr (UNPACKED<T> == 1) return load_words((const uint32_t*)p);
  else return as<u32x16>(load(p));
}

template <class T, class F>
inline void copy_factors(const T* from, int64_t n, F* to) {
  if constexpr (std::is_same_v<T, F>) memcpy(to, from, n * sizeof(T));
  else for_lanes(n, [&](int64_t i, int lanes) { store_up_to(to + i, load_up_to(from + i, lanes), lanes); });
}

// The numbers of rows and lines whose sums matrix products keep in registers.
#ifdef __AVX512F__
constexpr int MAX_ROWS = 6, MAX_COLUMNS = 4;  // 24 accumulators of the 32 registers
#else
constexpr int MAX_ROWS = 4, MAX_COLUMNS = 1;
#endif

template <int N>
using Constant = std::integral_constant<int, N>;

// Calls f(Constant<n>, start) for pieces of `count` of at most MAX. A piece's size n is a compile-time constant.
template <int MAX, class F>
inline void in_pieces(int count, F f) {
  int at = 0;
  for (; count - at >= MAX; at += MAX) f(Constant<MAX>{}, at);
  if constexpr (MAX > 4)
    if (count - at >= 4) f(Constant<4>{}, at), at += 4;
  if constexpr (MAX > 2)
    if (count - at >= 2) f(Constant<2>{}, at), at += 2;
  if constexpr (MAX > 1)
    if (count - at >= 1) f(Constant<1>{}, at);
}

// Calls f(Constant<count>) for 1 <= count <= MAX.
template <int MAX, class F>
inline void with_rows(int count, F f) {
  if constexpr (MAX > 1)
    if (count < MAX) return with_rows<MAX - 1>(count, f);
  f(Constant<MAX>{});
}

}  // namespace quire
