#include "data_parallel/tensor_memory.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

namespace lockstep::tensor_memory_test {
namespace {

constexpr int64_t kLarge = int64_t{1} << 20;  // floats: 4 MiB

at::Tensor floats(int64_t count) { return at::empty({count}, at::kFloat); }

/// What `body` returns, in a process of its own: what it changes is the process's. SIGALRM ends one that hangs.
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

TEST(TensorMemory, OfAFreedTensorServesTheNext) {
  EXPECT_TRUE(holds([] {
    at::Tensor before = floats(kLarge).fill_(2);
    keep_tensor_memory();
    void* place = floats(kLarge).data_ptr();
    for (int i = 0; i < 10; ++i) {
      const at::Tensor again = floats(kLarge);
      if (again.data_ptr() != place || floats(kLarge).data_ptr() == place) return false;
    }
    before.resize_({2 * kLarge});  // moves from the one to the other
    const bool moved = before[kLarge - 1].item<float>() == 2;
    before = at::Tensor();
    for (int step = 0; step < 10; ++step) end_step_of_tensor_memory();
    return moved && at::ones({kLarge}).sum().item<float>() == kLarge;
  }));
}

TEST(TensorMemory, RawMemoryOfAnySize) {
  EXPECT_TRUE(holds([] {
    void* of_malloc = c10::GetCPUAllocator()->raw_allocate(8 << 20);
    c10::Allocator* before = c10::GetCPUAllocator();
    keep_tensor_memory();
    c10::Allocator* now = c10::GetCPUAllocator();
    for (const size_t bytes : {1, 1000, 1 << 20, 8 << 20}) {
      void* memory = now->raw_allocate(bytes);
      static_cast<char*>(memory)[bytes - 1] = 1;
      now->raw_deallocate(memory);
    }
    now->raw_deallocate(of_malloc);
    return now != before;
  }));
}

TEST(TensorMemory, TheUsersWordCounts) {
  EXPECT_TRUE(holds([] {
    setenv("MALLOC_TRIM_THRESHOLD_", "134217728", 1);
    keep_tensor_memory();
    return c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator();
  }));
  EXPECT_TRUE(holds([] {
    struct Own final : c10::Allocator {
      c10::DataPtr allocate(size_t bytes) override { return c10::GetDefaultCPUAllocator()->allocate(bytes); }
      void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
    };
    static Own own;
    c10::SetCPUAllocator(&own);
    keep_tensor_memory();
    return c10::GetCPUAllocator() == &own;
  }));
}

TEST(TensorMemory, MoreThanThereIsIsLibTorchsError) {
  EXPECT_TRUE(holds([] {
    keep_tensor_memory();
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
    keep_tensor_memory();
    floats(kLarge);  // what LibTorch initialises once does not survive a fork in its middle
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
