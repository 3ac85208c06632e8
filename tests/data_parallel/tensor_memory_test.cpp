#include "data_parallel/tensor_memory.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

namespace lockstep::tensor_memory_test {
namespace {

constexpr int64_t kLarge = int64_t{1} << 20;  // floats: 4 MiB

at::Tensor floats(int64_t count) { return at::empty({count}, at::kFloat); }

/// Runs `body` in a separate process, because it changes the process's allocator, and returns its result. SIGALRM ends
/// one that hangs.
bool holds(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    _exit(body() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status == 0;
}

/// The process's resident memory in bytes.
int64_t resident() {
  std::ifstream file("/proc/self/statm");
  int64_t all = 0, pages = 0;
  file >> all >> pages;
  return pages * ::sysconf(_SC_PAGESIZE);
}

/// The tensors of a step: 96 MiB in all.
void use_much() {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 24; ++i) tensors.push_back(floats(kLarge).fill_(1));
}
constexpr int64_t kMuch = int64_t{80} << 20;

TEST(TensorMemory, OfAFreedTensorServesTheNext) {
  EXPECT_TRUE(holds([] {
    at::Tensor before = floats(kLarge).fill_(2);
    TensorMemory memory(true);
    void* place = floats(kLarge).data_ptr();
    for (int i = 0; i < 10; ++i) {
      const at::Tensor again = floats(kLarge);
      if (again.data_ptr() != place || floats(kLarge).data_ptr() == place) return false;
    }
    before.resize_({2 * kLarge});  // moves from one allocator to the other
    const bool moved = before[kLarge - 1].item<float>() == 2;
    before = at::Tensor();
    for (int step = 0; step < 10; ++step) memory.end_step();
    return moved && at::ones({kLarge}).sum().item<float>() == kLarge;
  }));
}

TEST(TensorMemory, RawMemoryOfAnySize) {
  EXPECT_TRUE(holds([] {
    void* of_malloc = c10::GetCPUAllocator()->raw_allocate(8 << 20);
    c10::Allocator* before = c10::GetCPUAllocator();
    TensorMemory memory(true);
    c10::Allocator* now = c10::GetCPUAllocator();
    for (const size_t bytes : {1, 1000, 1 << 20, 8 << 20}) {
      void* block = now->raw_allocate(bytes);
      static_cast<char*>(block)[bytes - 1] = 1;
      now->raw_deallocate(block);
    }
    now->raw_deallocate(of_malloc);
    return now != before;
  }));
}

TEST(TensorMemory, TheUsersWordCounts) {
  EXPECT_TRUE(holds([] {
    setenv("MALLOC_TRIM_THRESHOLD_", "134217728", 1);
    TensorMemory memory(true);
    return c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator();
  }));
  EXPECT_TRUE(holds([] {
    struct Own final : c10::Allocator {
      c10::DataPtr allocate(size_t bytes) override { return c10::GetDefaultCPUAllocator()->allocate(bytes); }
      void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
    };
    static Own own;
    c10::SetCPUAllocator(&own);
    TensorMemory memory(true);
    return c10::GetCPUAllocator() == &own;
  }));
}

TEST(TensorMemory, GoesBackWithTheLastOwner) {
  EXPECT_TRUE(holds([] {
    floats(kLarge).fill_(1);
    const int64_t before = resident();
    auto first = std::make_unique<TensorMemory>(true), second = std::make_unique<TensorMemory>(true);
    use_much();
    at::Tensor survivor = floats(kLarge).fill_(3);
    first = nullptr;
    if (resident() - before < kMuch) return false;  // the second owner still keeps it
    second = nullptr;
    if (resident() - before > kMuch / 4) return false;
    if (survivor.sum().item<float>() != 3 * kLarge) return false;
    survivor = at::Tensor();
    use_much();
    const TensorMemory third(true);
    use_much();
    return resident() - before > kMuch;
  }));
}

TEST(TensorMemory, OfMallocsHeapGoesBackOnRequest) {
  EXPECT_TRUE(holds([] {
    const TensorMemory memory(true);
    const int64_t before = resident();
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 48; ++i) tensors.push_back(floats(kLarge / 8).fill_(1));  // 512 KiB each: the heap's
    const at::Tensor behind_them = floats(16).fill_(1);
    tensors.clear();
    constexpr int64_t kHalf = int64_t{12} << 20;
    if (resident() - before < kHalf) return false;
    TensorMemory::release();
    return resident() - before < kHalf && behind_them.sum().item<float>() == 16;
  }));
}

TEST(TensorMemory, OfTensorsGoesBackOnRequest) {
  EXPECT_TRUE(holds([] {
    const TensorMemory memory(true);
    const int64_t before = resident();
    use_much();
    if (resident() - before < kMuch) return false;
    TensorMemory::release();
    return resident() - before < kMuch / 4;
  }));
}

TEST(TensorMemory, GoesBackWhileOnlyEvaluationRuns) {
  EXPECT_TRUE(holds([] {
    TensorMemory memory(true);
    const int64_t before = resident();
    for (int step = 0; step < 5; ++step) {
      use_much();
      memory.end_step();
    }
    if (resident() - before < kMuch) return false;
    for (int batch = 0; batch < 300; ++batch) floats(kLarge).fill_(1);
    return resident() - before < kMuch / 4;
  }));
}

TEST(TensorMemory, StaysAsItIsWhereTheOptionSaysSo) {
  EXPECT_TRUE(holds([] {
    TensorMemory memory(false);
    memory.end_step();
    return c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator();
  }));
}

/// A generator that steps once for every five steps of its critic: its steps count, and each finds its memory again.
TEST(TensorMemory, OfSeveralModelsCountsTheStepsOfEach) {
  EXPECT_TRUE(holds([] {
    TensorMemory critic(true), generator(true);
    const void* place = floats(kLarge).data_ptr();
    for (int step = 0; step < 10; ++step) {
      if (floats(kLarge).data_ptr() != place) return false;
      generator.end_step();
      for (int i = 0; i < 5; ++i) critic.end_step();
    }
    return true;
  }));
  EXPECT_TRUE(holds([] {  // the others do not wait for an idle one
    TensorMemory trains(true), rests(true);
    const int64_t before = resident();
    use_much();
    for (int step = 0; step < 70; ++step) trains.end_step();
    return resident() - before < kMuch / 4;
  }));
}

TEST(TensorMemory, MoreThanThereIsIsLibTorchsError) {
  EXPECT_TRUE(holds([] {
    TensorMemory memory(true);
    try {
      floats(int64_t{1} << 50);
      return false;
    } catch (const c10::Error&) {
      return true;
    }
  }));
}

TEST(TensorMemory, AForkedChildGoesOn) {
  EXPECT_TRUE(holds([] {
    TensorMemory memory(true);
    floats(kLarge);  // LibTorch's one-time initialisation must not be interrupted by a fork
    std::atomic<bool> over{false};
    std::thread other([&] {
      while (!over) floats(kLarge);
    });
    bool all = true;
    for (int i = 0; i < 50; ++i) all &= holds([] { return floats(kLarge).numel() == kLarge; });
    over = true;
    other.join();
    return all;
  }));
}

}  // namespace
}  // namespace lockstep::tensor_memory_test
