#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::shm {

using Nonce = std::array<std::byte, 16>;
/// Throws Error if the system has no random numbers.
Nonce random_nonce();
std::string hex(const Nonce& nonce);

/// The facts that a rank tells all others about itself while a group is formed.
struct Card {
  std::string error;  ///< not empty: the reason why it cannot join
  std::string host;
  std::string boot_id;
  std::string socket_name;
  std::string nonce;
  uint32_t layout = 0;
  int world_size = 0;
  size_t segment_bytes = 0;
  std::vector<int> cpus;
  double quota = 0;
  int launched_rank = -1;  ///< the launcher's number for it

  std::string text() const;
  static Card parse(const std::string& text);
};

/// The result that each rank tells all others after trying to join.
struct Outcome {
  std::string error;         ///< empty: it has joined
  bool consequence = false;  ///< it failed because another rank did

  std::string text() const;
  static Outcome parse(const std::string& text);
};

/// Throws Error naming the hosts unless all ranks are on one machine.
void check_one_machine(const std::vector<Card>& cards);
/// Whether every rank has a processor of its own, by affinity and by quota.
bool ranks_fit(const std::vector<Card>& cards);

}  // namespace lockstep::shm
