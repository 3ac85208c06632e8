#include "context/device.h"

#include <atomic>

#include <torch/cuda.h>

#include <lockstep/device.h>
#include <lockstep/error.h>

#include "base/environment.h"
#include "rendezvous/world.h"

namespace lockstep {
namespace {

constexpr int kUnknown = -1;
std::atomic<int> remembered{kUnknown};

int local_rank() {
  const int known = remembered;
  if (known != kUnknown) return known;
  const World world = discover_world(Environment::from_process());
  if (world.local_rank) return *world.local_rank;
  if (world.world_size == 1) return 0;
  throw Error(
      "lockstep::device(): the local rank is not known yet, because the launcher does not give it; make the Context "
      "first");
}

}  // namespace

void remember_local_rank(int local_rank) { remembered = local_rank; }

at::Device device_of(int local_rank, int cuda_devices) {
  if (cuda_devices == 0) return at::kCPU;
  return {at::kCUDA, static_cast<c10::DeviceIndex>(local_rank % cuda_devices)};
}

at::Device device() { return device_of(local_rank(), static_cast<int>(torch::cuda::device_count())); }

}  // namespace lockstep
