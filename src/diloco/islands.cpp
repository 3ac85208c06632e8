#include "diloco/islands.h"

#include <lockstep/error.h>
#include <lockstep/island.h>

#include "base/hash.h"
#include "rank_page/operation_label.h"

namespace lockstep::diloco {
namespace {



/// Each with its length before it.
std::string together(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) {
    hub::put(text, static_cast<uint64_t>(part.size()));
    text += part;
  }
  return text;
}

IslandRound read_round(std::string_view body) {
  IslandRound round{.number = hub::take<int64_t>(body), .giver = hub::take<int32_t>(body)};
  const auto count = hub::take<int32_t>(body);
  for (int i = 0; i < count; ++i) {
    const auto island = hub::take<int32_t>(body);
    round.sent[island] = hub::take_bytes(body);
  }
  return round;
}

}  // namespace

Islands::Islands(HubPlace place, const Group& here) : here_(here), place_(std::move(place)) {
  if (here_.rank() == 0) client_ = std::make_unique<HubClient>(place_);
}

std::unique_ptr<Islands> Islands::of_environment(const Group& here) {
  std::optional<HubPlace> place = HubPlace::of_environment();
  if (!place) return nullptr;
  return std::unique_ptr<Islands>(new Islands(std::move(*place), here));
}

Islands::Joined Islands::join(int64_t steps, uint64_t model) {
  std::string text;
  if (leads()) {
    try {
      HubClient::Message message = client_->join(steps, model);
      text = static_cast<char>(message.kind) + std::move(message.body);
    } catch (const Error& error) {
      text = static_cast<char>(hub::Kind::kRefused) + std::string(error.what());
    }
  }
  const OperationLabel label("a machine's way into the rounds of DiLoCo");
  text = here_.broadcast_bytes(text);
  std::string_view rest = text;
  const auto kind = hub::take<hub::Kind>(rest);
  if (kind == hub::Kind::kRefused) throw Error(std::string(rest));
  is_in_ = true;
  if (kind == hub::Kind::kGive) return {};
  Joined joined{.round = hub::take<int64_t>(rest), .starts = hub::take<uint8_t>(rest) != 0};
  joined.state = std::string(rest);
  return joined;
}

void Islands::give(int64_t round, const std::string& own_slice) {
  const OperationLabel label("the outer state of DiLoCo for another machine");
  const std::vector<std::string> slices = here_.gather_bytes(own_slice);
  if (!leads()) return;
  std::string body;
  hub::put(body, round);
  client_->give(body + together(slices));
}

std::string Islands::slice_of(const std::string& state) const {
  std::string_view rest = state;
  for (int rank = 0; rank < here_.rank(); ++rank) hub::take_bytes(rest);
  return std::string(hub::take_bytes(rest));
}

std::vector<IslandRound> Islands::contribute(int64_t round, bool takes_part, uint64_t outer,
                                             const std::string& own_slice, std::string& text) {
  const OperationLabel label("a round of DiLoCo");
  std::string own;
  hub::put(own, outer);
  const std::vector<std::string> slices = here_.gather_bytes(own + own_slice);
  text.clear();
  if (leads()) {
    std::string body;
    hub::put(body, round);
    hub::put(body, static_cast<uint8_t>(takes_part ? 1 : 0));
    std::string numbers;
    uint64_t all = Hash::kStart;
    for (std::string_view slice : slices) {
      all = Hash::mixed(all, hub::take<uint64_t>(slice));
      numbers += slice;
    }
    hub::put(body, all);
    body += numbers;
    const auto results = client_->contribute(body);
    text = together({results.begin(), results.end()});
  }
  text = here_.broadcast_bytes(text);
  std::vector<IslandRound> rounds;
  for (std::string_view rest = text; !rest.empty();) rounds.push_back(read_round(hub::take_bytes(rest)));
  is_in_ = !rounds.empty();
  return rounds;
}

void Islands::leave() {
  if (leads()) client_->leave();
  is_in_ = false;
}

}  // namespace lockstep::diloco

namespace lockstep {

Island island() {
  const auto place = diloco::HubPlace::of_environment();
  return place ? Island{place->island, place->islands} : Island{};
}

Shard island_shard(const Context& context) {
  const Island own = island();
  Shard shard(context);
  shard.rank += own.number * context.world_size();
  shard.world_size *= own.count;
  return shard;
}

}  // namespace lockstep
