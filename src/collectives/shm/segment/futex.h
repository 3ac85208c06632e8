#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace lockstep {

/// Sleeps while `word` holds `expected`, for at most `timeout`. May return early, so the caller checks again. The word
/// may lie in memory shared between processes.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, std::chrono::microseconds timeout);

/// Wakes every thread that sleeps on `word`, in every process.
void futex_wake_all(const std::atomic<uint32_t>& word);

/// Tells the processor that this is a spin loop.
inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace lockstep
