#include "hosts/link_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>

namespace lockstep::hosts {
namespace {

/// Family, port and address of a sockaddr_in.
constexpr size_t kEndBytes = 8;
constexpr uint32_t kFirstOfRuns = 0x7f400000;  // 127.64.0.0
constexpr uint32_t kPlaces = 0x600000 / 4096;  // up to 127.160.0.0, each with room for 4096 machines

}  // namespace

LinkAddresses::LinkAddresses(const std::string& run_id, int machines)
    : first_(kFirstOfRuns + static_cast<uint32_t>(std::hash<std::string>()(run_id) % kPlaces) * 4096 + 1),
      machines_(machines) {}

std::string LinkAddresses::text_of(int machine) const {
  const in_addr address{htonl(of(machine))};
  std::array<char, INET_ADDRSTRLEN> text{};
  ::inet_ntop(AF_INET, &address, text.data(), text.size());
  return text.data();
}

std::vector<LinkEnd> LinkEndFinder::find(int connection, std::string_view bytes) {
  std::string& tail = tails_[connection];
  const std::string all = tail + std::string(bytes);
  std::vector<LinkEnd> found;
  for (size_t at = 0; at + kEndBytes <= all.size(); ++at) {
    sa_family_t family;
    in_port_t port;
    uint32_t address;
    std::memcpy(&family, &all[at], sizeof family);
    if (family != AF_INET) continue;
    std::memcpy(&port, &all[at + 2], sizeof port);
    std::memcpy(&address, &all[at + 4], sizeof address);
    const uint32_t machine = ntohl(address) - addresses_.first();
    if (port == 0 || machine >= static_cast<uint32_t>(addresses_.machines())) continue;
    const LinkEnd end{static_cast<int>(machine), ntohs(port)};
    if (std::find(found.begin(), found.end(), end) == found.end()) found.push_back(end);
  }
  tail = all.substr(all.size() - std::min(all.size(), kEndBytes - 1));
  return found;
}

}  // namespace lockstep::hosts
