#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "collectives/shm/weak_memory.h"

// What the compiler calls under -fsanitize=thread, and memcpy and its like by way of the linker's --wrap. This file is
// compiled without it, and no sanitizer's library is linked.

using lockstep::shm::Scheduler;
using lockstep::shm::WeakMemory;

namespace {

bool tracked(const volatile void* address) {
  return WeakMemory::active != nullptr && WeakMemory::active->tracks(const_cast<const void*>(address));
}
void read(const void* address, size_t bytes) {
  if (tracked(address)) WeakMemory::active->read(address, bytes);
}
void write(const void* address, size_t bytes) {
  if (tracked(address)) WeakMemory::active->write(address, bytes);
}

template <typename T>
T atomic_load(const volatile T* word, int order) {
  const T newest = __atomic_load_n(word, __ATOMIC_SEQ_CST);
  if (!tracked(word)) return newest;
  // Another rank may store before it goes on, so the model looks for itself where it knows the word.
  return static_cast<T>(WeakMemory::active->load(const_cast<const T*>(word), newest, order));
}

template <typename T>
void atomic_store(volatile T* word, T value, int order) {
  if (tracked(word))
    WeakMemory::active->store(const_cast<const T*>(word), __atomic_load_n(word, __ATOMIC_SEQ_CST), value, order);
  __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
}

/// `change` returns what the word becomes.
template <typename T, typename Change>
T atomic_change(volatile T* word, int order, const Change& change) {
  const bool is_tracked = tracked(word);
  if (is_tracked) Scheduler::active->before_access(const_cast<const T*>(word), true);
  const T before = __atomic_load_n(word, __ATOMIC_SEQ_CST), after = change(before);
  if (is_tracked) WeakMemory::active->exchange(const_cast<const T*>(word), before, after, order);
  __atomic_store_n(word, after, __ATOMIC_SEQ_CST);  // one thread only
  return before;
}

template <typename T>
bool atomic_compare_exchange(volatile T* word, T* expected, T value, int order) {
  const bool is_tracked = tracked(word);
  if (is_tracked) Scheduler::active->before_access(const_cast<const T*>(word), true);
  const T before = __atomic_load_n(word, __ATOMIC_SEQ_CST);
  if (before != *expected) {
    *expected = before;  // nothing is acquired, which is the least that an order of failure promises
    return false;
  }
  if (is_tracked) WeakMemory::active->exchange(const_cast<const T*>(word), before, value, order);
  __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
  return true;
}

}  // namespace

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define LOCKSTEP_ACCESS(bytes)                                               \
  void __tsan_read##bytes(void* address) { read(address, bytes); }           \
  void __tsan_write##bytes(void* address) { write(address, bytes); }         \
  void __tsan_unaligned_read##bytes(void* address) { read(address, bytes); } \
  void __tsan_unaligned_write##bytes(void* address) { write(address, bytes); }
LOCKSTEP_ACCESS(1)
LOCKSTEP_ACCESS(2)
LOCKSTEP_ACCESS(4)
LOCKSTEP_ACCESS(8)
LOCKSTEP_ACCESS(16)
void __tsan_read_range(void* address, size_t bytes) { read(address, bytes); }
void __tsan_write_range(void* address, size_t bytes) { write(address, bytes); }

#define LOCKSTEP_ATOMIC(bits)                                                                                      \
  uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* word, int order) {                      \
    return atomic_load(word, order);                                                                               \
  }                                                                                                                \
  void __tsan_atomic##bits##_store(volatile uint##bits##_t* word, uint##bits##_t value, int order) {               \
    atomic_store(word, value, order);                                                                              \
  }                                                                                                                \
  uint##bits##_t __tsan_atomic##bits##_exchange(volatile uint##bits##_t* word, uint##bits##_t value, int order) {  \
    return atomic_change(word, order, [&](uint##bits##_t) { return value; });                                      \
  }                                                                                                                \
  uint##bits##_t __tsan_atomic##bits##_fetch_add(volatile uint##bits##_t* word, uint##bits##_t value, int order) { \
    return atomic_change(word, order,                                                                              \
                         [&](uint##bits##_t found) { return static_cast<uint##bits##_t>(found + value); });        \
  }                                                                                                                \
  uint##bits##_t __tsan_atomic##bits##_fetch_sub(volatile uint##bits##_t* word, uint##bits##_t value, int order) { \
    return atomic_change(word, order,                                                                              \
                         [&](uint##bits##_t found) { return static_cast<uint##bits##_t>(found - value); });        \
  }                                                                                                                \
  uint##bits##_t __tsan_atomic##bits##_fetch_or(volatile uint##bits##_t* word, uint##bits##_t value, int order) {  \
    return atomic_change(word, order,                                                                              \
                         [&](uint##bits##_t found) { return static_cast<uint##bits##_t>(found | value); });        \
  }                                                                                                                \
  uint##bits##_t __tsan_atomic##bits##_fetch_and(volatile uint##bits##_t* word, uint##bits##_t value, int order) { \
    return atomic_change(word, order,                                                                              \
                         [&](uint##bits##_t found) { return static_cast<uint##bits##_t>(found & value); });        \
  }                                                                                                                \
  bool __tsan_atomic##bits##_compare_exchange_strong(volatile uint##bits##_t* word, uint##bits##_t* expected,      \
                                                     uint##bits##_t value, int order, int) {                       \
    return atomic_compare_exchange(word, expected, value, order);                                                  \
  }                                                                                                                \
  bool __tsan_atomic##bits##_compare_exchange_weak(volatile uint##bits##_t* word, uint##bits##_t* expected,        \
                                                   uint##bits##_t value, int order, int) {                         \
    return atomic_compare_exchange(word, expected, value, order);                                                  \
  }
LOCKSTEP_ATOMIC(8)
LOCKSTEP_ATOMIC(32)
LOCKSTEP_ATOMIC(64)

void __tsan_atomic_thread_fence(int order) {
  if (WeakMemory::active != nullptr) WeakMemory::active->fence(order);
}
void __tsan_atomic_signal_fence(int) {}

void* __real_memcpy(void* to, const void* from, size_t bytes);
void* __real_memmove(void* to, const void* from, size_t bytes);
void* __real_memset(void* to, int value, size_t bytes);

void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  read(from, bytes), write(to, bytes);
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memmove(void* to, const void* from, size_t bytes) {
  read(from, bytes), write(to, bytes);
  return __real_memmove(to, from, bytes);
}
void* __wrap_memset(void* to, int value, size_t bytes) {
  write(to, bytes);
  return __real_memset(to, value, bytes);
}

}  // extern "C"
