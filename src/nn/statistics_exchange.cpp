#include "nn/statistics_exchange.h"

#include <algorithm>
#include <numeric>
#include <sstream>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include "base/rank_names.h"
#include "collectives/group_state.h"
#include "nn/layer_error.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

std::vector<int> all_ranks(const Group& group) {
  std::vector<int> ranks(static_cast<size_t>(group.world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

const double* row_of(const at::Tensor& rows, int rank) { return rows.const_data_ptr<double>() + rank * rows.size(1); }

}  // namespace

std::shared_ptr<StatisticsExchange> StatisticsExchange::of(const Group& group) {
  if (const auto& ranks = state_of(group).virtual_ranks; ranks && !ranks->one_each())
    throw Error("a synchronised batch norm needs the batches of all " + std::to_string(ranks->count()) +
                " virtual ranks at once, but " + std::to_string(group.world_size()) +
                " ranks work for them one after the other; start as many ranks as there are virtual ranks, or do not "
                "convert the batch norms");
  if (group.world_size() == 1) return std::make_shared<StatisticsExchange>(group);
  if (auto known = find(group)) return known;
  auto made = std::make_shared<StatisticsExchange>(group);
  state_of(group).statistics = made;
  return made;
}

std::shared_ptr<StatisticsExchange> StatisticsExchange::find(const Group& group) {
  return std::static_pointer_cast<StatisticsExchange>(state_of(group).statistics);
}

StatisticsExchange::StatisticsExchange(const Group& of)
    : group(of.world_size() == 1 ? of : of.subgroup(all_ranks(of)).value()) {
  if (group.world_size() > 1) watch_.emplace(group, state_of(of).backend);
}

int64_t StatisticsExchange::add_layer(const std::string& name, int64_t channels) {
  most_channels_ = std::max(most_channels_, channels);
  names_.push_back(name);
  return static_cast<int64_t>(names_.size()) - 1;
}

std::string StatisticsExchange::name_of(int64_t layer, int64_t channels) const {
  const auto index = static_cast<size_t>(layer);
  if (index < names_.size() && !names_[index].empty()) return names_[index];
  return "a SyncBatchNorm of " + std::to_string(channels) + " channels";
}

std::string StatisticsExchange::number_of(int64_t layer) const {
  if (layer < 0 || static_cast<size_t>(layer) >= names_.size()) return "";
  const auto own = names_.begin() + layer;
  const auto all = std::count(names_.begin(), names_.end(), *own);
  if (all == 1) return "";
  return ", layer " + std::to_string(1 + std::count(names_.begin(), own, *own)) + " of " + std::to_string(all) +
         (own->empty() ? " without a name" : " with that name");
}

std::string StatisticsExchange::place_of(const double* row) const {
  const auto place = static_cast<int64_t>(row[1]), channels = (static_cast<int64_t>(row[2]) - 1) / 2;
  const std::string name = name_of(place / 2, channels);
  const bool says_channels = name.starts_with("a SyncBatchNorm");
  return std::string(place % 2 == 0 ? "the forward of " : "the backward of ") + name +
         (says_channels ? "" : " of " + std::to_string(channels) + " channels") + number_of(place / 2);
}

at::Tensor StatisticsExchange::send(const std::string& name, const std::string& place, const at::Tensor& row) {
  const OperationLabel label(name.empty() ? std::string_view("the statistics of a batch norm") : name);
  watch_->enter(name, place);
  const auto left = c10::make_scope_exit([&] { watch_->leave(); });
  try {
    return group.all_gather(row);
  } catch (const Error& error) {
    if (const std::string found = watch_->verdict(); !found.empty()) throw Error(found);
    const std::string cause = error.what();
    if (name.empty()) throw;
    const bool disagree = own_page().read(group.world_size()).failure == RankFailure::kMismatch;
    const std::string places = disagree ? watch_->places() : "";
    throw layer_error(name, (places.empty() ? "" : "The ranks are at different ones: " + places + ". ") + cause);
  }
}

void StatisticsExchange::check_same_place(const std::string& name, const at::Tensor& rows) const {
  const double* mine = row_of(rows, group.rank());
  bool same = true, same_options = true;
  for (int rank = 0; rank < group.world_size(); ++rank) {
    const double* row = row_of(rows, rank);
    if (row[0] != static_cast<double>(Kind::kStatistics)) continue;
    same &= row[1] == mine[1] && row[2] == mine[2];
    same_options &= row[3] == mine[3] && row[4] == mine[4];
  }
  if (same && same_options) return;
  std::vector<std::optional<std::string>> places;
  for (int rank = 0; rank < group.world_size(); ++rank) {
    const double* row = row_of(rows, rank);
    std::ostringstream place;
    if (row[0] != static_cast<double>(Kind::kStatistics)) {
      place << "join(), without inputs";
    } else {
      place << place_of(row);
      if (same) place << " with eps " << row[3] << " and momentum " << row[4];
    }
    places.emplace_back(place.str());
  }
  if (same)
    throw layer_error(name, "Its options differ: " + said_by_rank(places) + ". Give it the same options on all ranks");
  throw layer_error(name, "The ranks are at different ones: " + said_by_rank(places) +
                              ". All ranks must run the same layers in the same order, forward and backward");
}

at::Tensor StatisticsExchange::gather(int64_t layer, Pass pass, const at::Tensor& row) {
  auto* const header = row.mutable_data_ptr<double>();
  header[0] = static_cast<double>(Kind::kStatistics);
  header[1] = static_cast<double>(2 * layer + (pass == Pass::kBackward));
  header[2] = static_cast<double>(row.numel() - kHeader);
  const std::string name = name_of(layer, (row.numel() - kHeader - 1) / 2), place = place_of(header);
  const at::Tensor rows =
      joining_ ? exchange_within_join(Kind::kStatistics, name, place, row).rows : send(name, place, row);
  check_same_place(name, rows);
  return rows;
}

StatisticsExchange::Table StatisticsExchange::exchange_within_join(Kind kind, const std::string& name,
                                                                   const std::string& place, const at::Tensor& row) {
  const int64_t size = kHeader + 2 * most_channels_ + 1;
  TORCH_CHECK(row.numel() <= size, "a synchronised batch norm of ", (row.numel() - kHeader) / 2,
              " channels, but the widest has ", most_channels_);
  const at::Tensor message = at::zeros({size}, at::kDouble);
  message.narrow(0, 0, row.numel()).copy_(row);
  message.mutable_data_ptr<double>()[0] = static_cast<double>(kind);
  const at::Tensor all = send(name, place, message);
  std::vector<bool> reducing, running;
  for (int rank = 0; rank < group.world_size(); ++rank) {
    const auto of = static_cast<Kind>(static_cast<int>(row_of(all, rank)[0]));
    reducing.push_back(of == Kind::kReduction);
    running.push_back(of == Kind::kStatistics);
  }
  const auto any = [](const std::vector<bool>& ranks) {
    return std::find(ranks.begin(), ranks.end(), true) != ranks.end();
  };
  if (any(reducing) && any(running)) {
    const auto runner = static_cast<int>(std::find(running.begin(), running.end(), true) - running.begin());
    throw Error("within join(), " + rank_names(running) + " came to a synchronised batch norm while " +
                rank_names(reducing) + " reduced gradients; ranks that have inputs must run the same layers: " +
                rank_names(running) + " " + (std::count(running.begin(), running.end(), true) == 1 ? "is" : "are") +
                " in " + place_of(row_of(all, runner)));
  }
  return {all.narrow(1, 0, row.numel()).contiguous(), any(reducing), any(reducing) || any(running)};
}

void StatisticsExchange::announce_reduction() {
  if (!joining_) return;
  exchange_within_join(Kind::kReduction, "", "a reduction of gradients", at::zeros({kHeader}, at::kDouble));
}

void StatisticsExchange::serve() {
  while (true) {
    const Table table =
        exchange_within_join(Kind::kShadow, "", "join(), without inputs", at::zeros({kHeader}, at::kDouble));
    if (table.reduction || !table.inputs) return;
  }
}

}  // namespace lockstep
