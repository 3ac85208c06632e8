#include <string>

#include <lockstep/error.h>

#include "collectives/nccl/nccl_backend.h"

// Replaces nccl_backend.cpp if LibTorch has no NCCL.

namespace lockstep::nccl_engine {

c10::intrusive_ptr<c10d::Backend> make_backend(c10::DeviceType device, const c10::intrusive_ptr<c10d::Store>&, int, int,
                                               std::chrono::milliseconds) {
  throw Error("this Lockstep was built without NCCL, so it communicates tensors on the CPU only, not on " +
              c10::DeviceTypeName(device, /*lower_case=*/true) +
              "; build it with a LibTorch for CUDA and with nccl.h, or move the tensor to the CPU");
}

std::string gpu_name(c10::Device) { return ""; }

}  // namespace lockstep::nccl_engine
