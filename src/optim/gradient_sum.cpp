#include "optim/gradient_sum.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include "collectives/core_types.h"
#include "collectives/intra_op.h"
#include "rank_page/operation_label.h"

namespace lockstep::detail {
namespace {

/// The least number of blocks per thread.
constexpr int64_t kBlocksOfAThread = 32;
constexpr size_t kLargestElement = 8;

/// Rounds as LibTorch's mul_(Scalar) does: the number is rounded to the tensor's type first.
double rounded(double factor, at::ScalarType dtype) {
  if (dtype == at::kHalf) return at::Half(static_cast<float>(factor));
  if (dtype == at::kBFloat16) return at::BFloat16(static_cast<float>(factor));
  return factor;
}

}  // namespace

void GradientSum::bind() {
  if (std::exchange(attachment_, model_.attachments) == model_.attachments) return;
  const OperationLabel label("where the gradients of all ranks lie");
  indices_.clear();
  places_.assign(model_.attached.trained().size(), {});
  buckets_.clear();
  const auto& plan = model_.reducer->plan();
  for (size_t b = 0; b < plan.size(); ++b) {
    const at::Tensor& gradients = model_.reducer->buckets()[b].gradients();
    buckets_.emplace_back(static_cast<size_t>(model_.group.world_size()));
    if (share_memory() && gradients.numel() > 0) buckets_.back() = areas_.memory()->address_everywhere(gradients);
    for (size_t slot = 0; slot < plan[b].size(); ++slot) {
      Place& place = places_[plan[b][slot]];
      place = {.bucket = b, .offset = model_.reducer->buckets()[b].offset_of(slot), .first_block = 0};
      if (!share_memory())
        place.mine = gradients.narrow(0, place.offset, model_.attached.trained()[plan[b][slot]].second.numel());
    }
  }
  blocks_ = 0;
  for (size_t i = 0; i < places_.size(); ++i) {
    const at::Tensor& parameter = model_.attached.trained()[i].second;
    indices_.emplace(parameter.unsafeGetTensorImpl(), i);
    places_[i].first_block = blocks_;
    blocks_ += GradientNorm::blocks_of(parameter.numel());
  }
}

const Reducer::Settlement& GradientSum::settle(Share share) {
  if (model_.reducer->is_settled()) return settlement_;
  settlement_ = model_.reducer->settle(share);
  collected_ = gathered_ = false;
  factors_.clear();
  if (settlement_.factor != 1) factors_.push_back(settlement_.factor);
  bind();
  return settlement_;
}

void GradientSum::conclude() { model_.reducer->end_step(settlement_, /*others_read=*/share_memory()); }

void GradientSum::collect() {
  if (share_memory() || std::exchange(collected_, true)) return;
  const OperationLabel label("the sums of gradients");
  sums_.bring(
      [this](const Areas::Parameter& parameter) -> const at::Tensor* {
        const auto trained = index_of(parameter.tensor);
        return trained && is_used(*trained) ? &places_[*trained].mine : nullptr;
      },
      settlement_.divisor == 1 ? ReduceOp::kSum : ReduceOp::kMean);
}

std::optional<size_t> GradientSum::index_of(const at::Tensor& parameter) const {
  const auto found = indices_.find(parameter.unsafeGetTensorImpl());
  return found == indices_.end() ? std::nullopt : std::optional(found->second);
}

std::byte* GradientSum::place_of(size_t trained, int rank) const {
  const Place& place = places_[trained];
  const size_t element = model_.attached.trained()[trained].second.itemsize();
  return buckets_[place.bucket][static_cast<size_t>(rank)] + static_cast<size_t>(place.offset) * element;
}

std::byte* GradientSum::place_of_sums(size_t trained) const {
  if (share_memory()) return place_of(trained, model_.group.rank());
  return sums_.place_of(areas_.parameter_of(model_.attached.trained()[trained].second));
}

optim::GradientSource GradientSum::source(size_t trained) const {
  const at::ScalarType dtype = model_.attached.trained()[trained].second.scalar_type();
  const shm::DataType type = *to_core(dtype);
  const int ranks = model_.group.world_size();
  optim::GradientSource source{.parts = {}};
  for (const double factor : factors_) source.factors.push_back(rounded(factor, dtype));
  source.scale = shm::find_reduce(type, shm::ReduceOp::kPremulSum, 1);
  if (gathered_ || !share_memory()) {
    source.parts = {place_of_sums(trained)};
    return source;
  }
  source.sum = shm::find_reduce(type, settlement_.divisor == 1 ? shm::ReduceOp::kSum : shm::ReduceOp::kMean, ranks);
  for (int rank = 0; rank < ranks; ++rank) source.parts.push_back(place_of(trained, rank));
  return source;
}

double GradientSum::contribution(const optim::GradientSource& source, size_t trained, int64_t begin, int64_t end,
                                 const GradientNorm& norm) const {
  const at::Tensor& parameter = model_.attached.trained()[trained].second;
  const size_t at = static_cast<size_t>(begin) * parameter.itemsize();
  const auto count = static_cast<size_t>(end - begin);
  std::byte* const place = place_of_sums(trained) + at;
  alignas(64) std::array<std::byte, static_cast<size_t>(GradientNorm::kBlock) * kLargestElement> scratch;
  const void* elements = place;
  if (!source.is_plain()) {
    source.load(gathered_ ? scratch.data() : place, at, count);
    elements = gathered_ ? scratch.data() : place;
  }
  return norm.of_block(parameter.scalar_type(), elements, end - begin);
}

void GradientSum::apply_factors() {
  for (const double factor : std::exchange(factors_, {})) sums_.multiply(factor);
}

at::Tensor GradientSum::slice_of(size_t trained) {
  apply_factors();
  return sums_.mine(areas_.parameter_of(model_.attached.trained()[trained].second));
}

double GradientSum::norm_on_device(double type) {
  apply_factors();
  std::vector<at::Tensor> norms;  // read together: each read of a device's memory waits for the device
  for (const Areas::Parameter& mine : areas_.parameters()) {
    const auto trained = index_of(mine.tensor);
    if (!trained || !is_used(*trained) || mine.begin >= mine.end) continue;
    const at::ScalarType computed = at::toOpMathType(mine.tensor.scalar_type());
    norms.push_back(at::linalg_vector_norm(sums_.mine(mine), type, std::nullopt, false, computed).to(at::kDouble));
  }
  for (const auto& [name, parameter] : model_.attached.trained()) parameter.mutable_grad().reset();
  const at::Tensor contributions = at::zeros({static_cast<int64_t>(areas_.parameters().size())}, at::kDouble);
  if (!norms.empty()) contributions.narrow(0, 0, static_cast<int64_t>(norms.size())).copy_(at::stack(norms));
  const OperationLabel label("the norm of the gradients");
  const at::Tensor all = model_.group.all_gather(contributions).view(-1);
  GradientNorm norm(type);
  for (int64_t i = 0; i < all.numel(); ++i) {
    const double one = all.const_data_ptr<double>()[i];
    norm.add(std::isinf(type) ? one : std::pow(one, type));
  }
  return norm.norm();
}

double GradientSum::norm(double type) {
  if (areas_.on_device()) return norm_on_device(type);
  struct Block {
    const optim::GradientSource* source;
    size_t trained;
    int64_t begin, end;
  };
  std::vector<Block> blocks;
  std::vector<optim::GradientSource> sources;
  sources.reserve(areas_.parameters().size());
  for (const Areas::Parameter& mine : areas_.parameters()) {
    const auto trained = index_of(mine.tensor);
    if (!trained || !is_used(*trained) || mine.begin >= mine.end) continue;
    sources.push_back(source(*trained));
    for (int64_t at = mine.begin; at < mine.end; at += GradientNorm::kBlock)
      blocks.push_back({&sources.back(), *trained, at, std::min(mine.end, at + GradientNorm::kBlock)});
    const auto bytes = (mine.end - mine.begin) * static_cast<int64_t>(mine.tensor.itemsize());
    bytes_moved_ += bytes * static_cast<int64_t>(sources.back().parts.size() + (gathered_ ? 0 : 1));
  }
  GradientNorm norm(type);
  const at::Tensor sums = at::zeros({blocks_}, at::kDouble);
  auto* sum = sums.mutable_data_ptr<double>();
  intra_op_for(static_cast<int64_t>(blocks.size()), kBlocksOfAThread, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const auto& [source, trained, begin, end] = blocks[static_cast<size_t>(i)];
      sum[places_[trained].first_block + begin / GradientNorm::kBlock] =
          contribution(*source, trained, begin, end, norm);
    }
  });
  if (!std::exchange(gathered_, true)) {
    factors_.clear();
    for (const auto& [name, parameter] : model_.attached.trained()) parameter.mutable_grad().reset();
  }
  const OperationLabel label("the norm of the gradients");
  model_.group.all_reduce(sums);  // each block comes from one rank, so adding changes nothing
  for (int64_t i = 0; i < blocks_; ++i) norm.add(sum[i]);
  return norm.norm();
}

}  // namespace lockstep::detail
