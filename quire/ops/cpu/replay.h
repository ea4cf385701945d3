// Makes kernels recordable: adds a function that takes the kernel's arguments as 64-bit words (see replay.cpp).
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace quire {

template <auto F>
struct Recorded;

template <class... A, void (*F)(A...)>
struct Recorded<F> {
  template <class T>
  static T read(int64_t word) {
    T value;
    memcpy(&value, &word, sizeof(T));  // little-endian: a smaller value occupies the word's first bytes
    return value;
  }

  template <size_t... I>
  static void call(const int64_t* words, std::index_sequence<I...>) {
    F(read<A>(words[I])...);
  }
};

template <class... A>
constexpr auto places_of(void (*)(A...)) {
  return std::index_sequence_for<A...>{};
}

}  // namespace quire

#define RECORDABLE(kernel) \
  extern "C" void kernel##_recorded(const int64_t* words) { \
    quire::Recorded<kernel>::call(words, quire::places_of(kernel)); \
  }
