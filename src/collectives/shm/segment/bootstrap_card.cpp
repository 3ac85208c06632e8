#include "collectives/shm/segment/bootstrap_card.h"

#include <sys/random.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/rank_names.h"

namespace lockstep::shm {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Card, error, host, boot_id, socket_name, nonce, layout, world_size,
                                                segment_bytes, cpus, quota, launched_rank)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Outcome, error, consequence)

Nonce random_nonce() {
  Nonce nonce;
  if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) throw_errno("getrandom");
  return nonce;
}

std::string hex(const Nonce& nonce) {
  std::string text;
  for (std::byte b : nonce) {
    text += "0123456789abcdef"[static_cast<unsigned>(b) >> 4];
    text += "0123456789abcdef"[static_cast<unsigned>(b) & 15];
  }
  return text;
}

namespace {

/// Errors may quote file names, which may hold any bytes.
std::string dump(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

std::string Card::text() const { return dump(*this); }
Card Card::parse(const std::string& text) { return nlohmann::json::parse(text).get<Card>(); }

std::string Outcome::text() const { return dump(*this); }
Outcome Outcome::parse(const std::string& text) { return nlohmann::json::parse(text).get<Outcome>(); }

void check_one_machine(const std::vector<Card>& cards) {
  struct Machine {
    std::string boot_id, host;
    std::vector<int> ranks;
  };
  std::vector<Machine> machines;
  for (size_t r = 0; r < cards.size(); ++r) {
    auto at =
        std::find_if(machines.begin(), machines.end(), [&](const auto& m) { return m.boot_id == cards[r].boot_id; });
    if (at == machines.end()) at = machines.insert(at, {cards[r].boot_id, cards[r].host, {}});
    at->ranks.push_back(static_cast<int>(r));
  }
  if (machines.size() == 1) return;
  std::string places;
  for (const Machine& machine : machines)
    places += (places.empty() ? "" : "; ") + rank_names(machine.ranks) + " on host " + machine.host;
  throw Error("shared memory needs all ranks of a group on one machine, but they run on " +
              std::to_string(machines.size()) + ": " + places +
              ". Use the gloo backend for groups that span machines.");
}

bool ranks_fit(const std::vector<Card>& cards) {
  std::map<int, int> sharers;
  for (const Card& card : cards)
    for (int cpu : card.cpus) ++sharers[cpu];
  for (const Card& card : cards) {
    double share = 0;
    for (int cpu : card.cpus) share += 1.0 / sharers[cpu];
    if (card.quota > 0) share = std::min(share, card.quota / static_cast<double>(cards.size()));
    if (share < 1 - 1e-9) return false;
  }
  return true;
}

}  // namespace lockstep::shm
