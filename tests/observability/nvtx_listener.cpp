// Writes the names of NVTX ranges to $NVTX_NAMES, a line for each: ">name" when one begins, "<" when it ends. NVTX loads
// this library in place of Nsight Systems when NVTX_INJECTION64_PATH names it. Layouts and numbers: nvToolsExt.h, version 3.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct EventAttributes {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const char* message;
};

struct Callbacks {
    size_t struct_size;
    int (*get_module_function_table)(int module, void**** table, unsigned* size);
};

constexpr int kCallbacks = 1, kCore2 = 5;  // of export tables, of modules
constexpr int kPush = 4, kPop = 5, kRegister = 10, kCreateDomain = 12;

FILE* names() {
    static FILE* file = std::fopen(std::getenv("NVTX_NAMES"), "a");
    return file;
}

int push(void*, const EventAttributes* attributes) {
    std::fprintf(names(), ">%s\n", attributes->message);
    std::fflush(names());
    return 0;
}

int pop(void*) {
    std::fputs("<\n", names());
    std::fflush(names());
    return 0;
}

const char* keep(void*, const char* text) { return strdup(text); }  // a registered string is its own handle

void* create_domain(const char* name) { return strdup(name); }

}  // namespace

extern "C" int InitializeInjectionNvtx2(const void* (*get_export_table)(uint32_t id)) {
    const auto* callbacks = static_cast<const Callbacks*>(get_export_table(kCallbacks));
    void*** table = nullptr;
    unsigned size = 0;
    if (callbacks == nullptr || !callbacks->get_module_function_table(kCore2, &table, &size) || size <= kCreateDomain) return 0;
    *table[kPush] = reinterpret_cast<void*>(push);
    *table[kPop] = reinterpret_cast<void*>(pop);
    *table[kRegister] = reinterpret_cast<void*>(keep);
    *table[kCreateDomain] = reinterpret_cast<void*>(create_domain);
    return 1;
}
