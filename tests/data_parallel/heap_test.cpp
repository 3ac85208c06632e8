#include "data_parallel/heap.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {
namespace {

/// What a step does to the heap: takes blocks, writes to them, frees all.
void step() {
  std::vector<std::unique_ptr<char[]>> blocks;
  constexpr size_t kBytes = 4 << 20;
  for (int i = 0; i < 20; ++i) {
    blocks.emplace_back(new char[kBytes]);
    std::memset(blocks.back().get(), 1, kBytes);
  }
}

long faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

/// Runs `prepare` and some steps in a separate process. Returns what `prepare` returned, and whether the later steps
/// had no page faults (80 MiB are 20,480 pages).
struct Outcome {
  bool answer, kept;
};
Outcome steps_after(const std::function<bool()>& prepare) {
  const pid_t child = fork();
  if (child == 0) {
    const bool answer = prepare();
    for (int i = 0; i < 3; ++i) step();
    const long before = faults();
    for (int i = 0; i < 3; ++i) step();
    _exit((answer ? 1 : 0) + (faults() - before < 1000 ? 2 : 0));
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  return {(WEXITSTATUS(status) & 1) != 0, (WEXITSTATUS(status) & 2) != 0};
}

/// Whether malloc is glibc's and nobody has set it: found out here, not by what is tested.
bool the_programs_malloc_is_glibcs() {
  Dl_info malloc_lies{}, libc_lies{};
  for (const char* name : {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"})
    if (getenv(name) != nullptr) return false;
  return dladdr(dlsym(RTLD_DEFAULT, "malloc"), &malloc_lies) != 0 &&
         dladdr(dlsym(RTLD_DEFAULT, "gnu_get_libc_version"), &libc_lies) != 0 &&
         malloc_lies.dli_fbase == libc_lies.dli_fbase;
}

TEST(Heap, KeepsWhatAStepFrees) {
  if (!the_programs_malloc_is_glibcs())
    GTEST_SKIP() << "SKIPPED BECAUSE this malloc is not glibc's, or MALLOC_* variables are set";
  const Outcome outcome = steps_after(keep_freed_memory);
  EXPECT_TRUE(outcome.answer);
  EXPECT_TRUE(outcome.kept);
  EXPECT_FALSE(steps_after([] { return false; }).kept) << "glibc does it by itself: keep_freed_memory() is not needed";
}

TEST(Heap, TheUsersWordCounts) {
  for (const auto& [name, value] : std::vector<std::pair<const char*, const char*>>{
           {"MALLOC_TRIM_THRESHOLD_", "1"},
           {"MALLOC_MMAP_THRESHOLD_", "1"},
           {"GLIBC_TUNABLES", "glibc.cpu.x=1:glibc.malloc.trim_threshold=1"}}) {
    const Outcome outcome = steps_after([&] {
      setenv(name, value, 1);
      return keep_freed_memory();
    });
    EXPECT_FALSE(outcome.answer) << name;
    EXPECT_FALSE(outcome.kept) << name;
  }
}

/// What print_heap prints with this library preloaded.
std::string heap_under(const std::string& library) {
  FILE* pipe = ::popen(("env -u MALLOC_TRIM_THRESHOLD_ -u MALLOC_MMAP_THRESHOLD_ -u GLIBC_TUNABLES LD_PRELOAD='" +
                        library + "' '" LOCKSTEP_BIN_DIR "/print_heap' 2>/dev/null")
                           .c_str(),
                       "r");
  std::string printed;
  for (int c; (c = std::fgetc(pipe)) != EOF;) printed += static_cast<char>(c);
  ::pclose(pipe);
  return printed;
}

/// glibc's mallopt() returns 1 even if malloc is not glibc's; that was once taken at its word.
TEST(Heap, AnotherMallocIsLeftAsItIs) {
  if (heap_under("") != "glibc keeps") GTEST_SKIP() << "SKIPPED BECAUSE malloc here is not glibc's to begin with";
  EXPECT_EQ(heap_under(LOCKSTEP_BIN_DIR "/other_malloc.so"), "another as it was");
}

TEST(Heap, JemallocIsLeftAsItIs) {
  const std::string heap = heap_under("libjemalloc.so.2");
  if (heap.starts_with("glibc")) GTEST_SKIP() << "SKIPPED BECAUSE there is no libjemalloc.so.2 (libjemalloc2)";
  EXPECT_EQ(heap, "another as it was");
}

TEST(Heap, GivesBackWhatItHasKept) {
  if (!the_programs_malloc_is_glibcs())
    GTEST_SKIP() << "SKIPPED BECAUSE this malloc is not glibc's, or MALLOC_* variables are set";
  const Outcome outcome = steps_after([] {
    const bool keeps = keep_freed_memory();
    if (keeps) release_freed_memory();
    return keeps;
  });
  EXPECT_TRUE(outcome.answer);
  EXPECT_FALSE(outcome.kept);
}

}  // namespace
}  // namespace lockstep
