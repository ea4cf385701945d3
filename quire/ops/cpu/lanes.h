// Vectors of 16 lanes, and operations on them that C++ operators cannot express. With AVX-512, a vector is one
// register, in the compiler's own vector type. Elsewhere it is a Wide: two AVX2 registers, or four NEON or SSE
// registers. The compiler also has vector types larger than a register, but gcc keeps their values in memory.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

// Always inlined: a Wide that is passed to a function goes through memory.
#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire {

constexpr int LANES = 16;

typedef uint8_t u8x16 __attribute__((vector_size(16)));

// Reinterprets bits: __m512bh and f32x16, for example, are the same register.
template <class To, class From>
QUIRE_INLINE To as(From from) {
  static_assert(sizeof(To) == sizeof(From), "as<> reinterprets, it does not convert");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

#ifdef __AVX512F__

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

template <class V>
QUIRE_INLINE V read(const void* p) {
  V v;
  memcpy(&v, p, sizeof(v));
  return v;
}

template <class V>
QUIRE_INLINE void write(void* p, V v) { memcpy(p, &v, sizeof(v)); }

// Lanes of a where the mask is set, of b elsewhere. A Wide has no operator ?:.
template <class V>
QUIRE_INLINE V where(i32x16 mask, V a, V b) { return mask ? a : b; }

template <int... I, class V>
QUIRE_INLINE V shuffle(V a, V b) { return __builtin_shufflevector(a, b, I...); }

QUIRE_INLINE f32x16 to_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }
QUIRE_INLINE i32x16 to_int(f32x16 v) { return __builtin_convertvector(v, i32x16); }
QUIRE_INLINE u32x16 widened(u16x16 v) { return as<u32x16>(_mm512_cvtepu16_epi32(as<__m256i>(v))); }
QUIRE_INLINE u16x16 low_halves(u32x16 v) { return as<u16x16>(_mm512_cvtepi32_epi16(as<__m512i>(v))); }
QUIRE_INLINE u8x16 low_bytes(u32x16 v) { return as<u8x16>(_mm512_cvtepi32_epi8(as<__m512i>(v))); }

// a * b + c, rounded once if the processor has an instruction for it. Kernels fuse operations only through this
// function. The compiler must not (-ffp-contract=off in build.py): it fuses an expression in one instance of a kernel
// and not in another, so a row's result would depend on how many rows are computed with it.
QUIRE_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return as<f32x16>(_mm512_fmadd_ps(as<__m512>(a), as<__m512>(b), as<__m512>(c)));
}

QUIRE_INLINE bool any(i32x16 mask) { return _mm512_test_epi32_mask(as<__m512i>(mask), as<__m512i>(mask)) != 0; }

#else

#ifdef __AVX2__
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif
constexpr int PARTS = 64 / REGISTER;

// Calls f(i) for each part. i is a constant, since a variable index would keep all parts in memory.
template <class F, int... P>
QUIRE_INLINE void for_parts(F f, std::integer_sequence<int, P...>) { (f(std::integral_constant<int, P>{}), ...); }
template <class F>
QUIRE_INLINE void for_parts(F f) { for_parts(f, std::make_integer_sequence<int, PARTS>{}); }

// Returns the vector whose parts are f(i).
template <class V, class F>
QUIRE_INLINE V each(F f) {
  V made;
  for_parts([&](auto i) { made.parts[i] = f(i); });
  return made;
}

template <class E>
struct Wide {
  typedef E Part __attribute__((vector_size(REGISTER)));
  static constexpr int SIZE = REGISTER / sizeof(E);
  using Mask = Wide<std::conditional_t<sizeof(E) == 4, int32_t, int64_t>>;

  Part parts[PARTS];

  Wide() = default;
  QUIRE_INLINE Wide(E x) : Wide(each<Wide>([&](auto) { return x - Part{}; })) {}
  template <class... X>
  constexpr Wide(E first, E second, X... others)
      : Wide(Values{{first, second, E(others)...}}, std::make_integer_sequence<int, PARTS>{}) {}

  QUIRE_INLINE E operator[](int i) const { return parts[i / SIZE][i % SIZE]; }
  friend QUIRE_INLINE Wide operator-(Wide a) { return each<Wide>([&](auto i) { return -a.parts[i]; }); }
#define QUIRE_OPERATOR(op)                                            \
  friend QUIRE_INLINE Wide operator op(Wide a, Wide b) {              \
    return each<Wide>([&](auto i) { return a.parts[i] op b.parts[i]; }); \
  }                                                                   \
  QUIRE_INLINE Wide& operator op##=(Wide b) { return *this = *this op b; }
  QUIRE_OPERATOR(+)
  QUIRE_OPERATOR(-)
  QUIRE_OPERATOR(*)
  QUIRE_OPERATOR(/)
  QUIRE_OPERATOR(&)
  QUIRE_OPERATOR(|)
  QUIRE_OPERATOR(^)
  QUIRE_OPERATOR(<<)
  QUIRE_OPERATOR(>>)
#undef QUIRE_OPERATOR
#define QUIRE_COMPARISON(op)                                          \
  friend QUIRE_INLINE Mask operator op(Wide a, Wide b) {              \
    return each<Mask>([&](auto i) { return a.parts[i] op b.parts[i]; }); \
  }
  QUIRE_COMPARISON(<)
  QUIRE_COMPARISON(>)
  QUIRE_COMPARISON(<=)
  QUIRE_COMPARISON(>=)
  QUIRE_COMPARISON(==)
  QUIRE_COMPARISON(!=)
#undef QUIRE_COMPARISON

 private:
  struct Values {
    E lane[PARTS * SIZE];
  };
  template <int... P>
  constexpr Wide(Values v, std::integer_sequence<int, P...>)
      : parts{part(v, P * SIZE, std::make_integer_sequence<int, SIZE>{})...} {}
  template <int... L>
  static constexpr Part part(Values v, int from, std::integer_sequence<int, L...>) { return Part{v.lane[from + L]...}; }
};

typedef Wide<float> f32x16;
typedef Wide<int32_t> i32x16;
typedef Wide<uint32_t> u32x16;
typedef Wide<uint64_t> u64x8;

struct u16x16 {
  typedef uint16_t Part __attribute__((vector_size(REGISTER / 2)));
  Part parts[PARTS];
};

template <class To, class E>
QUIRE_INLINE To as(Wide<E> from) { return each<To>([&](auto i) { return (typename To::Part)from.parts[i]; }); }

// Used instead of memcpy, which gcc would turn into copies of integers.
template <class Part>
struct Unaligned {
  typedef Part Type __attribute__((aligned(1), may_alias));
};

template <class V>
QUIRE_INLINE V read(const void* p) {
  using Part = typename V::Part;
  return each<V>([&](auto i) { return Part(((const typename Unaligned<Part>::Type*)p)[i.value]); });
}

template <class V>
QUIRE_INLINE void write(void* p, V v) {
  for_parts([&](auto i) { ((typename Unaligned<typename V::Part>::Type*)p)[i] = v.parts[i]; });
}

template <class E>
QUIRE_INLINE Wide<E> where(i32x16 mask, Wide<E> a, Wide<E> b) {
  return each<Wide<E>>([&](auto i) { return mask.parts[i] ? a.parts[i] : b.parts[i]; });
}

// Part P of a shuffle's result: lanes of one or two parts of the operands.
template <int P, int... I>
struct Picked {
  static constexpr int SIZE = sizeof...(I) / PARTS;
  static constexpr int lane(int i) {
    constexpr int lanes[] = {I...};
    return lanes[P * SIZE + i];
  }
  static constexpr int source(int i) { return lane(i) / SIZE; }
  static constexpr int second() {
    for (int i = 1; i < SIZE; i++)
      if (source(i) != source(0)) return source(i);
    return source(0);
  }
  static constexpr int place(int i) { return lane(i) % SIZE + (source(i) == source(0) ? 0 : SIZE); }

  template <class E, int... L>
  static QUIRE_INLINE auto of(const Wide<E>& a, const Wide<E>& b, std::integer_sequence<int, L...>) {
    constexpr int FIRST = source(0), SECOND = second();
    static_assert(((source(L) == FIRST || source(L) == SECOND) && ...));
    return __builtin_shufflevector((FIRST < PARTS ? a : b).parts[FIRST % PARTS],
                                   (SECOND < PARTS ? a : b).parts[SECOND % PARTS], place(L)...);
  }
};

template <int... I, class E>
QUIRE_INLINE Wide<E> shuffle(Wide<E> a, Wide<E> b) {
  return each<Wide<E>>([&](auto i) {
    return Picked<i.value, I...>::of(a, b, std::make_integer_sequence<int, Wide<E>::SIZE>{});
  });
}

QUIRE_INLINE f32x16 to_float(i32x16 v) {
  return each<f32x16>([&](auto i) { return __builtin_convertvector(v.parts[i], f32x16::Part); });
}

QUIRE_INLINE i32x16 to_int(f32x16 v) {
  return each<i32x16>([&](auto i) { return __builtin_convertvector(v.parts[i], i32x16::Part); });
}

QUIRE_INLINE u32x16 widened(u16x16 v) {
#ifdef __AVX2__  // gcc 12 compiles the conversion to five instructions
  return each<u32x16>([&](auto i) { return (u32x16::Part)_mm256_cvtepu16_epi32((__m128i)v.parts[i]); });
#else
  return each<u32x16>([&](auto i) { return __builtin_convertvector(v.parts[i], u32x16::Part); });
#endif
}

QUIRE_INLINE u16x16 low_halves(u32x16 v) {
  return each<u16x16>([&](auto i) { return __builtin_convertvector(v.parts[i], u16x16::Part); });
}

QUIRE_INLINE u8x16 low_bytes(u32x16 v) {
#ifdef __ARM_NEON
  const uint16x8_t first = vcombine_u16(vmovn_u32(v.parts[0]), vmovn_u32(v.parts[1]));
  const uint16x8_t second = vcombine_u16(vmovn_u32(v.parts[2]), vmovn_u32(v.parts[3]));
  return as<u8x16>(vcombine_u8(vmovn_u16(first), vmovn_u16(second)));
#elif defined(__AVX2__)  // gcc 12 joins the halves in memory, and waits for them
  const u32x16 bytes = v & 0xffu;
  const __m256i halves = _mm256_packus_epi32((__m256i)bytes.parts[0], (__m256i)bytes.parts[1]);
  const __m256i sorted = _mm256_permute4x64_epi64(halves, 0xd8);
  return as<u8x16>(_mm_packus_epi16(_mm256_castsi256_si128(sorted), _mm256_extracti128_si256(sorted, 1)));
#else
  typedef uint16_t Halves __attribute__((vector_size(32)));
  return __builtin_convertvector(as<Halves>(low_halves(v)), u8x16);
#endif
}

QUIRE_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__ARM_NEON)
  return each<f32x16>([&](auto i) { return vfmaq_f32(c.parts[i], a.parts[i], b.parts[i]); });
#elif defined(__AVX2__) && defined(__FMA__)
  return each<f32x16>([&](auto i) { return _mm256_fmadd_ps(a.parts[i], b.parts[i], c.parts[i]); });
#else
  return a * b + c;
#endif
}

QUIRE_INLINE bool any(i32x16 mask) {
  i32x16::Part all = {};
  for_parts([&](auto i) { all |= mask.parts[i]; });
  int32_t some = 0;
#pragma GCC unroll 8
  for (int i = 0; i < i32x16::SIZE; i++) some |= all[i];
  return some != 0;
}

#endif

QUIRE_INLINE f32x16 splat(float x) { return x - f32x16{}; }
QUIRE_INLINE u32x16 splat(uint32_t x) { return x - u32x16{}; }
QUIRE_INLINE i32x16 splat(int32_t x) { return x - i32x16{}; }

}  // namespace quire
