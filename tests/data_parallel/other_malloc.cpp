#include <cstddef>

// A malloc that is not glibc's, to be preloaded. It calls glibc's.

extern "C" {
void* __libc_malloc(size_t bytes);
void other_malloc() {}
void* malloc(size_t bytes) { return __libc_malloc(bytes); }
}
