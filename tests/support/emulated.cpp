// Runs kernels in an emulator for tests/support/emulated.py, which describes the protocol.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int INTEGERS = 32, FLOATS = 8;  // arguments, at most

void take(void* to, size_t size) {
  if (fread(to, 1, size, stdin) != size) exit(0);  // the test has ended
}

uint64_t number() {
  uint64_t value;
  take(&value, sizeof(value));
  return value;
}

struct Region {  // of the test's memory, and its copy here
  uint64_t address, size;
  std::vector<char> storage;
  char* copy;

  Region() : address(number()), size(number()), storage(size + 128) {
    const uintptr_t start = (uintptr_t(storage.data()) + 63) / 64 * 64;
    copy = (char*)start + address % 64;  // aligned as there
    take(copy, size);
  }
};

std::vector<Region> regions;

uint64_t to_here(uint64_t address) {
  for (const Region& r : regions)
    if (address >= r.address && address < r.address + r.size) return uint64_t(r.copy) + address - r.address;
  return 0;
}

uint64_t to_there(uint64_t address) {
  for (const Region& r : regions)
    if (address >= uint64_t(r.copy) && address < uint64_t(r.copy) + r.size)
      return r.address + address - uint64_t(r.copy);
  return 0;
}

template <size_t... I, size_t... F>
void call(void* function, const uint64_t* integers, const float* floats, std::index_sequence<I...>,
          std::index_sequence<F...>) {
  // Integers and floats are counted separately by the calling convention, and each integer on the stack takes 8 bytes.
  using Kernel = void (*)(decltype(I, uint64_t())..., decltype(F, float())...);
  reinterpret_cast<Kernel>(function)(integers[I]..., floats[F]...);
}

}  // namespace

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  for (;;) {
    std::string name(number(), ' ');
    take(&name[0], name.size());
    regions.clear();
    for (uint64_t count = number(); count > 0; count--) regions.emplace_back();
    std::vector<uint64_t*> pointers;  // in structures
    for (uint64_t count = number(); count > 0; count--) pointers.push_back((uint64_t*)to_here(number()));
    uint64_t integers[INTEGERS] = {};
    float floats[FLOATS] = {};
    int num_integers = 0, num_floats = 0;
    for (uint64_t count = number(); count > 0; count--) {
      const uint64_t letter = number(), value = number();
      if (letter == 'f') memcpy(&floats[num_floats++], &value, sizeof(float));
      else integers[num_integers++] = letter == 'p' ? to_here(value) : value;
    }
    for (uint64_t* pointer : pointers) *pointer = to_here(*pointer);
    void* function = dlsym(library, name.c_str());
    if (!function) return 2;
    call(function, integers, floats, std::make_index_sequence<INTEGERS>{}, std::make_index_sequence<FLOATS>{});
    for (uint64_t* pointer : pointers) *pointer = to_there(*pointer);
    for (const Region& r : regions) fwrite(r.copy, 1, r.size, stdout);
    fflush(stdout);
  }
}
