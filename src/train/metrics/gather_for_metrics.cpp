#include <lockstep/gather_for_metrics.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <sstream>

#include <lockstep/error.h>

#include "rank_page/operation_label.h"

namespace lockstep {
namespace {

/// The properties that must be equal on all ranks, all but the number of rows; or this rank's error.
std::string description(const at::Tensor& rows, int64_t expected_rows) {
  std::ostringstream text;
  if (!rows.defined() || rows.dim() == 0)
    text << "no rows: give a tensor of at least one dimension";
  else if (expected_rows >= 0 && rows.size(0) != expected_rows)
    text << rows.size(0) << " rows for a batch of " << expected_rows << " samples";
  else
    text << "rows of " << rows.sizes().slice(1) << ' ' << c10::toString(rows.scalar_type());
  return text.str();
}

/// The rows of each rank. `expected_rows` below 0: any number. Throws the same Error on all ranks.
std::vector<at::Tensor> rows_of_ranks(const Group& group, const at::Tensor& rows, int64_t expected_rows) {
  const OperationLabel label("gather_for_metrics()");
  const std::string mine = description(rows, expected_rows);
  const bool fits = mine.starts_with("rows");
  const auto all = group.all_gather_bytes((fits ? std::to_string(rows.size(0)) + ' ' : "- ") + mine);
  std::vector<int64_t> counts;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const size_t space = all[rank].find(' ');
    const std::string text = all[rank].substr(space + 1), first = all[0].substr(all[0].find(' ') + 1);
    if (all[rank].starts_with("- ")) throw Error("gather_for_metrics: rank " + std::to_string(rank) + " has " + text);
    if (text != first)
      throw Error("gather_for_metrics: rank 0 has " + first + ", rank " + std::to_string(rank) + " has " + text +
                  "; only the number of rows may differ, so pad the other dimensions");
    counts.push_back(std::stoll(all[rank]));
  }
  const int64_t most = *std::max_element(counts.begin(), counts.end());
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes[0] = most;
  at::Tensor padded = rows.detach().contiguous();
  if (rows.size(0) < most) {
    padded = at::zeros(sizes, rows.options().requires_grad(false));
    padded.narrow(0, 0, rows.size(0)).copy_(rows);
  }
  const at::Tensor together = group.all_gather(padded);
  std::vector<at::Tensor> parts;
  for (size_t rank = 0; rank < counts.size(); ++rank)
    parts.push_back(together[static_cast<int64_t>(rank)].narrow(0, 0, counts[rank]));
  return parts;
}

}  // namespace

at::Tensor gather_for_metrics(const Group& group, const at::Tensor& rows) {
  const at::NoGradGuard no_grad;
  return at::cat(rows_of_ranks(group, rows, -1));
}

at::Tensor gather_for_metrics(const Group& group, const LoaderBase& loader, const at::Tensor& rows) {
  TORCH_CHECK(loader.world_size() == group.world_size() && loader.rank() == group.rank(),
              "gather_for_metrics: the loader is rank ", loader.rank(), " of ", loader.world_size(),
              ", the group's is ", group.rank(), " of ", group.world_size());
  TORCH_CHECK(!loader.serves_several_virtual_ranks(),
              "gather_for_metrics: ranks work for several virtual ranks one after the other, so there is no common "
              "batch; use Metrics (metrics.h), or gather without the loader");
  const LoaderBase::BatchShare share = loader.batch_share();
  TORCH_CHECK(
      share.on_all_ranks,
      "gather_for_metrics: with exactly_once the ranks have different numbers of batches here, so some would wait "
      "forever; make the loader without it, because gather_for_metrics() leaves out repeated samples anyway");
  const at::NoGradGuard no_grad;
  const auto parts = rows_of_ranks(group, rows, share.here);
  // The epoch's order was dealt out like cards, so it is restored row by row; repeated samples are at its end.
  std::vector<int64_t> begins, places;
  for (int64_t begin = 0; const at::Tensor& part : parts) begins.push_back(begin), begin += part.size(0);
  for (int64_t row = 0; row < parts.front().size(0); ++row)
    for (size_t rank = 0; rank < parts.size(); ++rank)
      if (row < parts[rank].size(0)) places.push_back(begins[rank] + row);
  places.resize(static_cast<size_t>(share.in_all));
  return at::cat(parts).index_select(0, at::tensor(places, at::kLong).to(rows.device()));
}

}  // namespace lockstep
