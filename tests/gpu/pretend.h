#pragma once

#include <string>

#include <c10/util/env.h>

namespace lockstep::testing {

/// NCCL takes this process for a machine of its own, which it reaches through the loopback interface. So it connects
/// several ranks that use one GPU.
inline void pretend_to_be_a_machine(int rank) {
  c10::utils::set_env("NCCL_HOSTID", ("rank" + std::to_string(rank)).c_str());
  c10::utils::set_env("NCCL_SOCKET_IFNAME", "lo");
  c10::utils::set_env("NCCL_NET", "Socket");
}

}  // namespace lockstep::testing
