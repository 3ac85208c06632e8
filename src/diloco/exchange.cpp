#include "diloco/exchange.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include <ATen/ATen.h>

#include "diloco/wire_format.h"
#include "rank_page/operation_label.h"

namespace lockstep::diloco {
namespace {

constexpr const char* kLabel = "a round of DiLoCo";

uint8_t* bytes_of(const at::Tensor& tensor) { return tensor.data_ptr<uint8_t>(); }

bool has_parts(const Machines& machines) { return machines.count() > 2; }

}  // namespace

int64_t padded_slice(int64_t elements, int machines) {
  if (machines <= 2) return elements;
  const int64_t part = (elements + machines - 1) / machines;
  return (part + kBlock - 1) / kBlock * kBlock * machines;
}

Exchange::Exchange(const Machines& machines, Wire wire, Place place, Standing standing, const at::Tensor& values,
                   const at::Tensor& rest)
    : statements_(std::in_place, machines, place, standing), wire_(wire) {
  const int64_t parts = has_parts(machines) ? machines.count() : 1;
  part_ = values.numel() / parts;
  mean_ = at::empty_like(values);
  const int64_t message = encoded_bytes(wire, part_);
  sent_ = at::zeros({parts, message}, at::kByte);
  const bool takes_part = standing.condition == Condition::kTakesPart;
  // One machine alone rounds nothing.
  if (machines.count() == 1 && takes_part) mean_.copy_(values);
  for (int64_t part = 0; part < parts; ++part) {
    // The part of machine `part` goes to its place in the rail.
    const int64_t row = parts == 1 ? 0 : machines.in_rail(static_cast<int>(part));
    uint8_t* const to = bytes_of(sent_) + row * message;
    if (!takes_part || machines.count() == 1) continue;
    const float* const from = values.const_data_ptr<float>() + part * part_;
    if (rest.defined())
      encode_with_rest(wire, from, part_, to, rest.data_ptr<float>() + part * part_);
    else
      encode(wire, from, part_, to);
  }
  received_ = at::empty({machines.count(), message}, at::kByte);
  bytes_sent_ = Statements::bytes_sent(machines);
  const OperationLabel label(kLabel);
  if (parts == 1) {
    work_ = machines.rail().all_gather_async(received_, sent_[0]);
    bytes_sent_ += message * (machines.count() - 1);
  } else {
    work_ = machines.rail().all_to_all_async(received_, sent_);
    bytes_sent_ += message * (parts - 1);
  }
}

Exchange::Exchange(Outcome outcome, at::Tensor mean)
    : stage_(Stage::kDone), outcome_(std::move(outcome)), mean_(std::move(mean)) {}

void Exchange::add_up(const Machines& machines, float* values) const {
  std::vector<double> sums(static_cast<size_t>(part_));
  std::vector<float> decoded(sums.size());
  for (int machine = 0; machine < machines.count(); ++machine) {
    if (!outcome_->took_part[static_cast<size_t>(machine)]) continue;
    const uint8_t* const message = bytes_of(received_) + machines.in_rail(machine) * received_.size(1);
    decode(wire_, message, part_, decoded.data());
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += decoded[i];
  }
  const auto count = static_cast<double>(std::count(outcome_->took_part.begin(), outcome_->took_part.end(), true));
  for (size_t i = 0; i < sums.size(); ++i) values[i] = static_cast<float>(sums[i] / count);
}

void Exchange::send_means(const Machines& machines, const at::Tensor& rest) {
  if (stage_ != Stage::kSlices) return;
  outcome_ = statements_->outcome(machines);
  stage_ = Stage::kDone;
  // After an error another machine may have sent none.
  if (outcome_->error.empty()) work_->wait();
  const auto& took_part = outcome_->took_part;
  if (!outcome_->error.empty() || std::find(took_part.begin(), took_part.end(), true) == took_part.end()) {
    mean_ = at::Tensor();
    return;
  }
  if (machines.count() == 1) return;
  if (!has_parts(machines)) return add_up(machines, mean_.data_ptr<float>());
  std::vector<float> means(static_cast<size_t>(part_));
  add_up(machines, means.data());
  const int64_t message = encoded_bytes(wire_, part_);
  sent_ = at::empty({message}, at::kByte);
  if (rest.defined()) {
    float* const kept = rest.data_ptr<float>() + machines.own() * part_;
    constexpr float kLargest = std::numeric_limits<float>::max();
    for (size_t i = 0; i < means.size(); ++i) means[i] = std::clamp(means[i] + kept[i], -kLargest, kLargest);
    encode_with_rest(wire_, means.data(), part_, bytes_of(sent_), kept);
  } else {
    encode(wire_, means.data(), part_, bytes_of(sent_));
  }
  received_ = at::empty({machines.count(), message}, at::kByte);
  const OperationLabel label(kLabel);
  work_ = machines.rail().all_gather_async(received_, sent_);
  bytes_sent_ += message * (machines.count() - 1);
  stage_ = Stage::kMeans;
}

void Exchange::finish(const Machines& machines, const at::Tensor& rest) {
  send_means(machines, rest);
  if (stage_ == Stage::kDone) return;
  work_->wait();
  for (int machine = 0; machine < machines.count(); ++machine)
    decode(wire_, bytes_of(received_) + machines.in_rail(machine) * received_.size(1), part_,
           mean_.data_ptr<float>() + machine * part_);
  stage_ = Stage::kDone;
}

}  // namespace lockstep::diloco
