// Vectors of 16 lanes, in the compiler's own vector types: one 512-bit register with AVX-512, two or four smaller ones
// elsewhere. Only where a single instruction matters (bf16 dot products and conversions) are there intrinsics.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace quire {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

constexpr int LANES = 16;
const i32x16 LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// __m512bh and f32x16 are the same register: reinterpret its bits.
template <class To, class From>
inline To as(From from) {
  static_assert(sizeof(To) == sizeof(From), "as<> reinterprets, it does not convert");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

inline f32x16 splat(float x) { return x - f32x16{}; }
inline u32x16 splat(uint32_t x) { return x - u32x16{}; }
inline i32x16 splat(int32_t x) { return x - i32x16{}; }

inline u32x16 load_words(const uint32_t* p) {
  u32x16 v;
  memcpy(&v, p, sizeof(v));
  return v;
}

inline f32x16 load(const float* p) {
  f32x16 v;
  memcpy(&v, p, sizeof(v));
  return v;
}

inline f32x16 load(const bf16* p) {
  u16x16 v;
  memcpy(&v, p, sizeof(v));
  return as<f32x16>(__builtin_convertvector(v, u32x16) << 16);
}

inline void store(float* p, f32x16 v) { memcpy(p, &v, sizeof(v)); }

// To nearest, ties to even, as torch rounds.
inline u16x16 round_to_bf16(f32x16 v) {
#ifdef __AVX512BF16__
  return as<u16x16>(_mm512_cvtneps_pbh(as<__m512>(v)));
#else
  u32x16 bits = as<u32x16>(v);
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(v == v ? rounded : splat(uint32_t(0x7fc0)), u16x16);
#endif
}

inline void store(bf16* p, f32x16 v) {
  u16x16 rounded = round_to_bf16(v);
  memcpy(p, &rounded, sizeof(rounded));
}

inline f32x16 rounded_to(f32x16 v, float) { return v; }
inline f32x16 rounded_to(f32x16 v, bf16) {
  return as<f32x16>(__builtin_convertvector(round_to_bf16(v), u32x16) << 16);
}

// The first n < 16 elements; the others are 0.
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

// f(offset, lanes) over a row in steps of 16; only the last step may have fewer lanes.
template <class F>
inline void for_lanes(int64_t n, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(i, LANES);
  if (i < n) f(i, int(n - i));
}

template <class T>
inline f32x16 load_up_to(const T* p, int n) {
  return n == LANES ? load(p) : load_part(p, n);
}

template <class T>
inline void store_up_to(T* p, f32x16 v, int n) {
  if (n == LANES) store(p, v);
  else store_part(p, v, n);
}

// a * b + c, rounded once where the processor has an instruction for it. This is the only way in which the kernels fuse
// operations: the compiler itself must not (-ffp-contract=off in build.py), since it fuses the same expression in one
// instance of a kernel and not in another, and a row's result would depend on how many rows are computed with it.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return as<f32x16>(_mm512_fmadd_ps(as<__m512>(a), as<__m512>(b), as<__m512>(c)));
#elif defined(__FMA__)
  __m256 x[2], y[2], z[2];
  memcpy(x, &a, 64), memcpy(y, &b, 64), memcpy(z, &c, 64);
  for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
  memcpy(&c, z, 64);
  return c;
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}
inline f32x16 fma(f32x16 a, f32x16 b, float c) { return fma(a, b, splat(c)); }

inline f32x16 larger(f32x16 a, f32x16 b) { return a > b ? a : b; }

#define QUIRE_FOLD(v, combine)                                                                                \
  v = combine(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));        \
  v = combine(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));        \
  v = combine(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));        \
  v = combine(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));

inline float maximum(f32x16 v) {
  QUIRE_FOLD(v, larger)
  return v[0];
}

inline f32x16 plus(f32x16 a, f32x16 b) { return a + b; }

inline float sum(f32x16 v) {
  QUIRE_FOLD(v, plus)
  return v[0];
}

// 16 x 16 words, by exchanging ever larger blocks across the diagonal.
inline void transpose(u32x16* v) {
  auto exchange = [&](int distance, auto low, auto high) {
    for (int i = 0; i < LANES; i++)
      if (!(i & distance)) {
        const u32x16 a = v[i], b = v[i + distance];
        v[i] = low(a, b), v[i + distance] = high(a, b);
      }
  };
#define QUIRE_SHUFFLE(...) [](u32x16 a, u32x16 b) { return __builtin_shufflevector(a, b, __VA_ARGS__); }
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

inline bool any(i32x16 mask) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask(as<__m512i>(mask), as<__m512i>(mask)) != 0;
#else
  u64x8 m = as<u64x8>(mask);
  return (m[0] | m[1] | m[2] | m[3] | m[4] | m[5] | m[6] | m[7]) != 0;
#endif
}

// 2^x to a relative 1.0e-7; 0 below -126, where float32 has no normal numbers left. x must be below 128.
inline f32x16 exp2(f32x16 x) {
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
  return x < -126.0f ? f32x16{} : scaled;
}

// To a relative 2e-7; near 0 by Cephes' polynomial for it, since the exponential cancels there.
inline f32x16 tanh(f32x16 x) {
  f32x16 size = x < 0.0f ? -x : x, square = x * x;
  f32x16 p = splat(-5.70498872745e-3f);
  p = fma(p, square, 2.06390887954e-2f);
  p = fma(p, square, -5.37397155531e-2f);
  p = fma(p, square, 1.33314422036e-1f);
  p = fma(p, square, -3.33332819422e-1f);
  f32x16 grown = exp2((size < 40.0f ? size : splat(40.0f)) * 2.8853900817779268f);
  f32x16 far = 1.0f - 2.0f / (grown + 1.0f);
  return size < 0.625f ? fma(x * square, p, x) : (x < 0.0f ? -far : far);
}

// The standard normal distribution function, to a relative 1e-5 also in the lower tail. That is t = 1 / (1 + 0.4 |x|)
// times exp(-x^2 / 2) times exp2 of a polynomial in t, which was fitted at Chebyshev nodes for |x| < 14.
inline f32x16 normal_distribution(f32x16 x) {
  f32x16 t = 1.0f / (1.0f + 0.4f * (x < 0.0f ? -x : x));
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
  return x < 0.0f ? tail : 1.0f - tail;
}

// Natural logarithm of positive normal numbers, to a relative 1e-7 also near 1 (Cephes' logf).
inline f32x16 log(f32x16 x) {
  u32x16 bits = as<u32x16>(x) + (0x3f800000u - 0x3f3504f3u);  // splits the exponent at sqrt(1/2)
  f32x16 e = __builtin_convertvector(as<i32x16>(bits >> 23) - 127, f32x16);
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
constexpr int PAIR = 4 / sizeof(T);  // elements of a 32-bit word

// Adds the products of 32-bit words, each a float32 or a pair of bfloat16.
template <class T>
inline f32x16 dot(f32x16 sum, u32x16 line, u32x16 word);

template <>
inline f32x16 dot<float>(f32x16 sum, u32x16 line, u32x16 word) {
  return fma(as<f32x16>(line), as<f32x16>(word), sum);
}

template <>
inline f32x16 dot<bf16>(f32x16 sum, u32x16 line, u32x16 word) {
#ifdef __AVX512BF16__
  return as<f32x16>(_mm512_dpbf16_ps(as<__m512>(sum), as<__m512bh>(line), as<__m512bh>(word)));
#else
  sum = fma(as<f32x16>(line << 16), as<f32x16>(word << 16), sum);
  return fma(as<f32x16>(line & 0xffff0000u), as<f32x16>(word & 0xffff0000u), sum);
#endif
}

// Matrix products keep so many rows by so many lines of sums in registers.
#ifdef __AVX512F__
constexpr int MAX_ROWS = 6, MAX_COLUMNS = 4;  // 24 accumulators of the 32 registers
#else
constexpr int MAX_ROWS = 4, MAX_COLUMNS = 1;
#endif

template <int N>
using Constant = std::integral_constant<int, N>;

// f(Constant<n>, start): cuts `count` into pieces of at most MAX, each piece's size known to the compiler.
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

// f(Constant<count>) for a count of 1 to MAX.
template <int MAX, class F>
inline void with_rows(int count, F f) {
  if constexpr (MAX > 1)
    if (count < MAX) return with_rows<MAX - 1>(count, f);
  f(Constant<MAX>{});
}

}  // namespace quire
