#include "diloco/exchange.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include <ATen/ATen.h>

#include "diloco/wire_format.h"
#include "rank_page/operation_label.h"

namespace lockstep::diloco {
namespace {

/// Before the numbers of each message.
struct Head {
  int64_t step, fragment;
  Standing standing;
};

constexpr const char* kLabel = "a round of DiLoCo";

uint8_t* bytes_of(const at::Tensor& tensor) { return tensor.data_ptr<uint8_t>(); }

Head head_of(const at::Tensor& messages, int row) {
  Head head{};
  std::memcpy(&head, bytes_of(messages) + row * messages.size(1), sizeof head);
  return head;
}

bool has_parts(const Machines& machines) { return machines.count() > 2; }

/// Describes why a round failed, from the machines' statements; empty: it succeeded.
std::string error_of(const Machines& machines, const std::vector<Head>& heads, const std::vector<std::string>& names) {
  for (int machine = 0; machine < machines.count(); ++machine) {
    const Head& head = heads[static_cast<size_t>(machine)];
    const auto [condition, detail, outer] = head.standing;
    if (condition == Condition::kRefreshed)
      return "DiLoCo: the model of " + machines.name_of(machine) +
             " was changed by refresh() after the DiLoCo was made; make a new DiLoCo on every rank after an edit";
    if (condition == Condition::kFrozen)
      return "DiLoCo: parameter " + names.at(static_cast<size_t>(detail)) + " of " + machines.name_of(machine) +
             " was frozen after the DiLoCo was made, but other machines or the outer momentum would continue to move "
             "it; freeze it on every rank, and make a new DiLoCo";
    if (condition == Condition::kDiverged)
      return "DiLoCo: the replicas of " + machines.name_of(machine) + " differ: rank " + std::to_string(detail) +
             " has other parameters than rank " + std::to_string(machines.first_rank(machine)) +
             "; reduce gradients in each step, and change parameters on all ranks of a machine alike "
             "(check_divergence_every() finds the step)";
    if (condition == Condition::kOutOfStep)
      return "DiLoCo: the ranks of " + machines.name_of(machine) +
             " have called step() different numbers of times; call it after each step of the optimizer, on every rank";
    if (head.step != heads.front().step || head.fragment != heads.front().fragment)
      return "DiLoCo: " + machines.name_of(0) + " is at step " + std::to_string(heads.front().step) + " and " +
             machines.name_of(machine) + " at step " + std::to_string(head.step) +
             "; all machines must call step() equally often, and finish() at the same step";
    if (outer != heads.front().standing.outer)
      return "DiLoCo: " + machines.name_of(machine) + " has another outer copy than " + machines.name_of(0) +
             " before the round of step " + std::to_string(head.step) +
             "; load states that were saved together, on all machines, or make a new DiLoCo";
  }
  return "";
}

}  // namespace

int64_t padded_slice(int64_t elements, int machines) {
  if (machines <= 2) return elements;
  const int64_t part = (elements + machines - 1) / machines;
  return (part + kBlock - 1) / kBlock * kBlock * machines;
}

Exchange::Exchange(const Machines& machines, Wire wire, Place place, Standing standing, const at::Tensor& values,
                   const at::Tensor& rest)
    : wire_(wire), place_(place) {
  const int64_t parts = has_parts(machines) ? machines.count() : 1;
  part_ = values.numel() / parts;
  mean_ = at::empty_like(values);
  const auto message = static_cast<int64_t>(sizeof(Head)) + encoded_bytes(wire, part_);
  sent_ = at::zeros({parts, message}, at::kByte);
  const Head head{place.step, place.fragment, standing};
  const bool takes_part = standing.condition == Condition::kTakesPart;
  // One machine alone rounds nothing.
  if (machines.count() == 1 && takes_part) mean_.copy_(values);
  for (int64_t part = 0; part < parts; ++part) {
    // The part of machine `part` goes to its place in the rail.
    const int64_t row = parts == 1 ? 0 : machines.in_rail(static_cast<int>(part));
    uint8_t* const to = bytes_of(sent_) + row * message;
    std::memcpy(to, &head, sizeof head);
    if (!takes_part || machines.count() == 1) continue;
    const float* const from = values.const_data_ptr<float>() + part * part_;
    if (rest.defined())
      encode_with_rest(wire, from, part_, to + sizeof head, rest.data_ptr<float>() + part * part_);
    else
      encode(wire, from, part_, to + sizeof head);
  }
  received_ = at::empty({machines.count(), message}, at::kByte);
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

void Exchange::take_outcome(const Machines& machines) {
  work_->wait();
  std::vector<Head> heads;
  for (int machine = 0; machine < machines.count(); ++machine)
    heads.push_back(head_of(received_, machines.in_rail(machine)));
  outcome_ = Outcome{{}, error_of(machines, heads, *place_.names)};
  for (const Head& head : heads) outcome_->took_part.push_back(head.standing.condition == Condition::kTakesPart);
}

void Exchange::add_up(const Machines& machines, float* values) const {
  std::vector<double> sums(static_cast<size_t>(part_));
  std::vector<float> decoded(sums.size());
  for (int machine = 0; machine < machines.count(); ++machine) {
    if (!outcome_->took_part[static_cast<size_t>(machine)]) continue;
    const uint8_t* const message = bytes_of(received_) + machines.in_rail(machine) * received_.size(1);
    decode(wire_, message + sizeof(Head), part_, decoded.data());
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += decoded[i];
  }
  const auto count = static_cast<double>(std::count(outcome_->took_part.begin(), outcome_->took_part.end(), true));
  for (size_t i = 0; i < sums.size(); ++i) values[i] = static_cast<float>(sums[i] / count);
}

void Exchange::send_means(const Machines& machines, const at::Tensor& rest) {
  if (stage_ != Stage::kSlices) return;
  take_outcome(machines);
  stage_ = Stage::kDone;
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
