#include "nn/statistics_exchange.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include <ATen/ATen.h>

#include "base/rank_names.h"
#include "collectives/group_state.h"
#include "rank_page/operation_label.h"

namespace lockstep {
namespace {

constexpr const char* kLabel = "the statistics of a batch norm";
constexpr int64_t kHeader = 2;  ///< within join() a row begins with its kind and its length

std::vector<int> all_ranks(const Group& group) {
  std::vector<int> ranks(static_cast<size_t>(group.world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

std::shared_ptr<StatisticsExchange> StatisticsExchange::of(const Group& group) {
  if (const auto& ranks = state_of(group).virtual_ranks; ranks && !ranks->one_each())
    throw Error("a synchronised batch norm needs the batches of all " + std::to_string(ranks->count()) +
                " virtual ranks at once, but " + std::to_string(group.world_size()) +
                " ranks work for them one after the other; start as many ranks as there are virtual ranks, or leave "
                "the batch norms as they are");
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
    : group(of.world_size() == 1 ? of : of.subgroup(all_ranks(of)).value()) {}

void StatisticsExchange::expect(int64_t channels) { most_channels_ = std::max(most_channels_, channels); }

StatisticsExchange::Table StatisticsExchange::exchange(Kind kind, const at::Tensor& row) {
  const int64_t capacity = 2 * most_channels_ + 1;
  TORCH_CHECK(row.numel() <= capacity, "a synchronised batch norm of ", row.numel() / 2,
              " channels, but the widest has ", most_channels_);
  // On the CPU: every rank reads the header anyway, and one without inputs does not know the others' device.
  at::Tensor message = at::zeros({kHeader + capacity}, at::kDouble);
  message[0] = static_cast<double>(kind);
  message[1] = static_cast<double>(row.numel());
  message.narrow(0, kHeader, row.numel()).copy_(row);
  const at::Tensor all = group.all_gather(message);
  const at::Tensor heads = all.narrow(1, 0, kHeader);
  std::vector<bool> reducing, running;
  int64_t length = row.numel();
  for (int rank = 0; rank < group.world_size(); ++rank) {
    const auto of = static_cast<Kind>(static_cast<int>(heads[rank][0].item<double>()));
    reducing.push_back(of == Kind::kReduction);
    running.push_back(of == Kind::kStatistics);
    if (of != Kind::kStatistics) continue;
    const auto n = static_cast<int64_t>(heads[rank][1].item<double>());
    if (kind == Kind::kStatistics && n != length)
      throw Error("within join(), the ranks are at different batch norms or passes: rank " + std::to_string(rank) +
                  " sent " + std::to_string(n) + " numbers, rank " + std::to_string(group.rank()) + " sent " +
                  std::to_string(length) + "; ranks that have inputs must run the same layers");
  }
  const auto any = [](const std::vector<bool>& ranks) {
    return std::find(ranks.begin(), ranks.end(), true) != ranks.end();
  };
  if (any(reducing) && any(running))
    throw Error("within join(), " + rank_names(running) + " came to a synchronised batch norm while " +
                rank_names(reducing) + " reduced gradients; ranks that have inputs must run the same layers");
  return {all.narrow(1, kHeader, length).to(row.device()), any(reducing), any(reducing) || any(running)};
}

at::Tensor StatisticsExchange::gather(const at::Tensor& row) {
  const OperationLabel label(kLabel);
  return joining_ ? exchange(Kind::kStatistics, row).rows : group.all_gather(row);
}

at::Tensor StatisticsExchange::sum(const at::Tensor& row) {
  const OperationLabel label(kLabel);
  if (!joining_) {
    group.all_reduce(row);
    return row;
  }
  const at::Tensor rows = exchange(Kind::kStatistics, row).rows;
  at::Tensor total = rows[0].clone();
  for (int64_t rank = 1; rank < rows.size(0); ++rank) total += rows[rank];
  return total;
}

void StatisticsExchange::announce_reduction() {
  if (joining_) exchange(Kind::kReduction, at::empty({0}, at::kDouble));
}

void StatisticsExchange::serve() {
  const at::Tensor nothing = at::empty({0}, at::kDouble);
  while (true) {
    const Table table = exchange(Kind::kShadow, nothing);
    if (table.reduction || !table.inputs) return;
  }
}

}  // namespace lockstep
