#include "data_parallel/divergence.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <ATen/ATen.h>

#include "base/rank_names.h"
#include "base/shared_weights.h"
#include "collectives/operand.h"
#include "collectives/storages.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9fb21c651e98df25;
  return hash ^ hash >> 29;
}

/// Four independent chains, because a single one would wait for each multiplication.
uint64_t hash_bytes(const char* bytes, size_t count) {
  std::array<uint64_t, 4> chains{1, 2, 3, 4};
  uint64_t word = 0;
  size_t i = 0;
  for (; i + 32 <= count; i += 32)
    for (size_t c = 0; c < 4; ++c) {
      std::memcpy(&word, bytes + i + 8 * c, 8);
      chains[c] = mix(chains[c], word);
    }
  for (; i < count; ++i) chains[0] = mix(chains[0], static_cast<unsigned char>(bytes[i]));
  uint64_t hash = count;
  for (uint64_t chain : chains) hash = mix(hash, chain);
  return hash;
}

std::vector<int64_t> column(const at::Tensor& rows, int64_t index) {
  const at::Tensor values = rows.select(1, index).contiguous();
  return {values.const_data_ptr<int64_t>(), values.const_data_ptr<int64_t>() + values.numel()};
}

std::string difference(const std::string& name, const std::vector<int64_t>& hashes) {
  const auto votes = [&](int64_t hash) { return std::count(hashes.begin(), hashes.end(), hash); };
  int64_t usual = hashes.front();
  for (int64_t hash : hashes)
    if (votes(hash) > votes(usual)) usual = hash;
  std::vector<bool> odd;
  for (int64_t hash : hashes) odd.push_back(hash != usual);
  return name + " on " + rank_names(odd) + " differs from that on " + ranks_with(hashes, usual);
}

}  // namespace

uint64_t hash_of(const at::Tensor& tensor) {
  const at::Tensor bytes = as_bytes(Operand(tensor).dense).cpu();
  return hash_bytes(reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>()), static_cast<size_t>(bytes.numel()));
}

std::string difference_of_ranks(const Group& group, const NamedTensors& tensors) {
  if (group.world_size() == 1) return "";
  std::vector<int64_t> hashes;
  uint64_t all = 0;
  for (const auto& [name, tensor] : tensors) {
    hashes.push_back(static_cast<int64_t>(hash_of(tensor)));
    all = mix(all, static_cast<uint64_t>(hashes.back()));
  }
  std::vector<at::Tensor> compared;
  for (const auto& [name, tensor] : tensors) compared.push_back(tensor);
  const std::string trouble = trouble_of(shared_weights_in(storages_of(compared)));
  if (!trouble.empty()) all = mix(all, static_cast<uint64_t>(group.rank()) + 1);  // unlike all others
  const at::Tensor together = group.all_gather(at::tensor({static_cast<int64_t>(all)}, at::kLong));
  if (together.eq(together[0]).all().item<bool>()) return "";
  const auto troubles = group.all_gather_bytes(trouble);
  for (const std::string& first : troubles)
    if (!first.empty()) throw Error(ranks_with(troubles, first) + ": " + first);
  const at::Tensor each = group.all_gather(at::tensor(hashes, at::kLong));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto values = column(each, static_cast<int64_t>(i));
    if (std::count(values.begin(), values.end(), values.front()) != static_cast<int64_t>(values.size()))
      return difference(tensors[i].first, values);
  }
  return "";
}

void check_equal_on_all_ranks(const Group& group, const NamedTensors& tensors) {
  const OperationLabel label("the divergence check");
  const std::string difference = difference_of_ranks(group, tensors);
  if (difference.empty()) return;
  const std::string found = "the replicas have diverged: " + difference;
  own_page().fail(RankFailure::kDiverged, -1, found);
  throw Error(found +
              ". Every rank must change the model in the same way. To make the replicas equal again, call "
              "broadcast_parameters(), which sets all of them to one rank's, or average_parameters(), which sets them "
              "to the mean.");
}

}  // namespace lockstep
