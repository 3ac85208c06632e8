#include "diloco/islands.h"

#include <atomic>

#include <c10/util/Exception.h>

#include <lockstep/error.h>
#include <lockstep/island.h>

#include "base/hash.h"
#include "rank_page/operation_label.h"

namespace lockstep::diloco {
namespace {

std::atomic<bool> asked_for_shard{false}, has_islands{false};

constexpr char kMachineIn = 'i', kMachineOut = 'o', kMachineAsked = 'a';

/// How a machine stands, as the first rank tells the others.
std::string letter_of(const HubClient& client, bool is_in) {
  return std::string(1, is_in ? kMachineIn : client.is_asked_to_stop() ? kMachineAsked : kMachineOut);
}

/// Each with its length before it.
std::string put_together(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) {
    hub::put(text, static_cast<uint64_t>(part.size()));
    text += part;
  }
  return text;
}

std::string together(const std::deque<std::string>& results) { return put_together({results.begin(), results.end()}); }

IslandRound read_round(std::string_view body) {
  IslandRound round;
  round.number = hub::take<int64_t>(body);
  round.giver = hub::take<int32_t>(body);
  const auto count = hub::take<int32_t>(body);
  for (int i = 0; i < count && !body.empty(); ++i) {
    const auto island = hub::take<int32_t>(body);
    round.sent[island] = hub::take_bytes(body);
  }
  return round;
}

std::vector<IslandRound> read_rounds(std::string_view text) {
  std::vector<IslandRound> rounds;
  while (!text.empty()) rounds.push_back(read_round(hub::take_bytes(text)));
  return rounds;
}

}  // namespace

bool has_asked_for_island_shard() { return asked_for_shard; }

Islands::Islands(HubPlace place, const Group& here, const IslandTurns& turns_of)
    : turns(turns_of), here_(here), place_(std::move(place)) {
  if (here_.rank() == 0) client_ = std::make_unique<HubClient>(place_);
}

Islands::~Islands() { has_islands = false; }

std::unique_ptr<Islands> Islands::of_environment(const Group& here, const IslandTurns& turns) {
  std::optional<HubPlace> place = HubPlace::of_environment();
  if (!place) return nullptr;
  if (has_islands.exchange(true))
    throw Error(
        "DiLoCo: `lockstep run --islands` supports one DiLoCo at a time, and this process has another; train the "
        "models "
        "one after the other, or leave --islands out");
  return std::unique_ptr<Islands>(new Islands(std::move(*place), here, turns));
}

template <typename Speak>
std::string Islands::on_all(const Speak& speak) const {
  constexpr char kSaid = 's', kFailed = 'f';
  std::string text;
  if (leads()) {
    try {
      text = kSaid + speak();
    } catch (const std::exception& error) {
      text = kFailed + std::string(error.what());
    }
  }
  text = here_.broadcast_bytes(text);
  if (text.front() == kFailed) throw Error(text.substr(1));
  return text.substr(1);
}

Islands::Joined Islands::join(int64_t round, const std::string& model) {
  const OperationLabel label("a machine's way into the rounds of DiLoCo");
  const std::string text = on_all([&] {
    HubClient::Message message = client_->join(round, model, turns.fragments());
    return static_cast<char>(message.kind) + std::move(message.body);
  });
  std::string_view rest = text;
  is_in_ = true;
  const auto kind = hub::take<hub::Kind>(rest);
  Joined joined;
  joined.counted.resize(static_cast<size_t>(turns.fragments()));
  if (kind == hub::Kind::kGive) return joined;
  joined.round = hub::take<int64_t>(rest);
  joined.starts = hub::take<uint8_t>(rest) != 0;
  for (int64_t first = 0; first < turns.fragments(); ++first) {
    Counted& counted = joined.counted[turns.fragment_of(first)];
    counted.step = hub::take<int64_t>(rest);
    counted.round = hub::take<int64_t>(rest);
  }
  joined.state = std::string(rest);
  return joined;
}

void Islands::give(int64_t round, const std::string& own_slice) {
  const OperationLabel label("the outer state of DiLoCo for another machine");
  const std::vector<std::string> slices = here_.gather_bytes(own_slice);
  if (!leads()) return;
  std::string body;
  hub::put(body, round);
  client_->give(body + put_together(slices));
}

std::string Islands::slice_of(const std::string& state) const {
  std::string_view rest = state;
  for (int rank = 0; rank < here_.rank(); ++rank) hub::take_bytes(rest);
  return std::string(hub::take_bytes(rest));
}

std::vector<IslandRound> Islands::read(const std::string& text, size_t begin) {
  is_in_ = text.front() == kMachineIn;
  asked_to_stop_ = text.front() == kMachineAsked;
  return read_rounds(std::string_view(text).substr(begin));
}

Islands::Came Islands::contribute(const Contribution& own, const std::string& own_slice, const std::string& more,
                                  bool waits, std::string& text) {
  const OperationLabel label("a round of DiLoCo");
  constexpr char kSent = 's', kNotSent = 'n';
  std::string head;
  hub::put(head, own.outer);
  const std::vector<std::string> slices = here_.gather_bytes(head + own_slice);
  text = on_all([&] {
    std::string body, numbers;
    uint64_t outer = Hash::kStart;
    for (std::string_view slice : slices) {
      outer = Hash::mixed(outer, hub::take<uint64_t>(slice));
      numbers += slice;
    }
    hub::put(body, own.round);
    hub::put(body, own.step);
    hub::put(body, static_cast<uint8_t>(own.takes_part ? 1 : 0));
    hub::put(body, outer);
    std::deque<std::string> come;
    const auto sent = client_->contribute(own.round, body + numbers + more, come);
    bool is_in = sent != HubClient::Sent::kLost;
    if (waits && sent == HubClient::Sent::kYes) is_in = client_->results_until(own.round, come);
    return letter_of(*client_, is_in) + (sent == HubClient::Sent::kYes ? kSent : kNotSent) + together(come);
  });
  return {text[1] == kSent, read(text, 2)};
}

std::vector<IslandRound> Islands::results(std::string& text) {
  const OperationLabel label("a round of DiLoCo");
  text = on_all([&] {
    const auto come = client_->results();
    return letter_of(*client_, !client_->is_lost()) + together(come);
  });
  return read(text);
}

std::vector<IslandRound> Islands::results_until(int64_t round, std::string& text) {
  const OperationLabel label("a round of DiLoCo");
  text = on_all([&] {
    std::deque<std::string> come;
    const bool is_in = client_->results_until(round, come);
    return letter_of(*client_, is_in) + together(come);
  });
  return read(text);
}

void Islands::warn(const std::string& text) const {
  if (leads()) TORCH_WARN("DiLoCo: machine ", island(), text);
}

void Islands::leave() {
  if (leads()) client_->leave();
  is_in_ = false;
  has_left_ = true;
}

}  // namespace lockstep::diloco

namespace lockstep {

Island island() {
  const auto place = diloco::HubPlace::of_environment();
  return place ? Island{place->island, place->islands} : Island{};
}

Shard island_shard(Shard own) {
  diloco::asked_for_shard = true;
  const Island machine = island();
  own.rank += machine.number * own.world_size;
  own.world_size *= machine.count;
  return own;
}

}  // namespace lockstep
