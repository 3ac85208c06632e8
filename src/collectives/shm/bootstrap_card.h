#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::shm {

using Nonce = std::array<std::byte, 16>;
/// Throws Error where the system gives none.
Nonce random_nonce();
std::string hex(const Nonce& nonce);

std::string host_name();
/// Names the kernel that runs: equal for processes of one machine.
std::string boot_id();

/// What a rank of a group that forms tells all others about itself.
struct Card {
  std::string error;  ///< it cannot join
  std::string host;
  std::string boot_id;
  std::string socket_name;
  std::string nonce;
  uint32_t layout = 0;
  int world_size = 0;
  size_t segment_bytes = 0;
  std::vector<int> cpus;
  double quota = 0;
  int launched_rank = -1;  ///< its number in the launcher's count

  std::string text() const;
  static Card parse(const std::string& text);
};

/// How it went, which all ranks tell all others when they have tried to join.
struct Outcome {
  std::string error;         ///< empty: it stands
  bool consequence = false;  ///< of what befell a rank that it does not know

  std::string text() const;
  static Outcome parse(const std::string& text);
};

/// Throws Error naming the hosts unless all ranks are on one machine.
void check_one_machine(const std::vector<Card>& cards);
/// Whether every rank has a processor to itself, by affinity and by quota.
bool ranks_fit(const std::vector<Card>& cards);

}  // namespace lockstep::shm
