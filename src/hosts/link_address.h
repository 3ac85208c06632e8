#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::hosts {

/// With --encrypt each machine of a run has a loopback address that stands for it on all machines: on its own its ranks
/// listen there, and on the others the agent does, and carries what arrives to the machine. All of 127.0.0.0/8 is
/// loopback, so the addresses need no configuration. Where they begin depends on the run: two runs on a machine do not
/// meet.
class LinkAddresses {
 public:
  LinkAddresses() = default;
  LinkAddresses(const std::string& run_id, int machines);
  LinkAddresses(uint32_t first, int machines) : first_(first), machines_(machines) {}

  uint32_t first() const { return first_; }
  int machines() const { return machines_; }
  /// "127.93.17.3".
  std::string text_of(int machine) const;
  /// In host byte order.
  uint32_t of(int machine) const { return first_ + static_cast<uint32_t>(machine); }

 private:
  uint32_t first_ = 0;
  int machines_ = 0;
};

/// A port on which a rank of a machine listens.
struct LinkEnd {
  int machine = 0;
  uint16_t port = 0;
  bool operator==(const LinkEnd&) const = default;
};

/// Finds the ends that engines publish in the key-value store: any engine's, because it must publish the socket address
/// of its listener, as the kernel writes it.
class LinkEndFinder {
 public:
  explicit LinkEndFinder(const LinkAddresses& addresses) : addresses_(addresses) {}

  /// The ends in the next bytes of a connection to the store.
  std::vector<LinkEnd> find(int connection, std::string_view bytes);

 private:
  const LinkAddresses addresses_;
  std::map<int, std::string> tails_;  // an address may come in two pieces
};

}  // namespace lockstep::hosts
