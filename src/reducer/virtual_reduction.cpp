#include "reducer/virtual_reduction.h"

#include <algorithm>
#include <functional>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace lockstep {

VirtualReduction::VirtualReduction(ReductionParts& parts, std::shared_ptr<VirtualRanks> ranks)
    : parts_(parts),
      step_(std::move(ranks), parts.plan.tensors,
            {.mean = parts.plan.settings.reduction == GradientReduction::kMean,
             .first_adds_it = parts.plan.settings.reduction == GradientReduction::kSum}) {}

void VirtualReduction::begin() {
  if (is_interrupted(parts_)) {
    note_interruption(parts_);
    reduce_all(Share::kGradients);
  }
  if (step_.facts().empty())
    begin_reduction(parts_);
  else  // within a step
    parts_.sender.begin();
}

void VirtualReduction::equipment_changed() {
  exchanges_.clear();
  parts_.sender.send_all_through(nullptr);
}

void VirtualReduction::left(std::optional<int> virtual_rank) {
  if (step_.passes > 0 && !step_.at_last_leaf() && virtual_rank == step_.virtual_rank()) end_leaf(Share::kGradients);
}

std::optional<at::ScalarType> VirtualReduction::travels_as(at::ScalarType type) const {
  return parts_.equipment.hook ? parts_.equipment.hook->travels_as(type) : std::nullopt;
}

VirtualStep::Leaf VirtualReduction::leaf_of(size_t parameter) const {
  const bool weighted = parts_.plan.settings.reduction == GradientReduction::kWeightedMean;
  return {.weight = weighted ? parts_.message.facts().weight : 1,
          .travels_as = travels_as(parts_.plan.tensors[parameter].scalar_type())};
}

void VirtualReduction::backward_begins() {
  // A generator's loss also reaches the critic, within no_sync() and up to zero_grad(): a whole round that counts for
  // nothing. Buffers that it has changed would count.
  if (!parts_.plan.settings.buffers && step_.local_only && step_.passes > 0 && step_.at_last_leaf() &&
      gradients_are_gone(parts_.plan.tensors)) {
    step_.reset();
    parts_.backward.forget_reached();
  }
  step_.completes = parts_.passes.reduce_every() > 0 && step_.counted + 1 >= parts_.passes.reduce_every();
  step_.in_place = true;
  for (size_t b = 0; b < parts_.buckets.size() && step_.completes && step_.at_last_leaf(); ++b)
    step_.in_place = step_.in_place && exchange_of(b) == nullptr;
  const auto current = step_.ranks().current();
  if (current && *current != step_.virtual_rank())
    parts_.message.note_trouble("a backward came from the micro-batch of virtual rank " + std::to_string(*current) +
                                ", but the step waits for that of virtual rank " +
                                std::to_string(step_.virtual_rank()) +
                                "; each virtual rank runs one backward a step, or as many as accumulate() says, which "
                                "must then be DataLoaderOptions::accumulate as well");
  if (step_.any_added())
    parts_.message.note_trouble(
        "an exception ended the backward of virtual rank " + std::to_string(step_.virtual_rank()) +
        " after some of its gradients had been added, and the program continued; a program that "
        "catches an exception from forward or backward must call skip_step()");
}

void VirtualReduction::ready(size_t parameter) {
  if (!step_.completes) return;
  parts_.backward.look_whether_nested();
  if (parts_.backward.is_nested || step_.is_added(parameter)) return;
  add_to_sum(parameter);
  if (!step_.at_last_leaf() || !parts_.plan.has_buckets()) return;
  fill_sum(parameter);
  if (step_.in_place) parts_.sender.send_full(/*at_end=*/false);
}

void VirtualReduction::add_to_sum(size_t parameter) {
  const at::Tensor& tensor = parts_.plan.tensors[parameter];
  bool used = parts_.backward.reached[parameter];
  if (const char* why = used ? gradient_problem(tensor, tensor.numel(), tensor.device()) : nullptr) {
    parts_.message.note_trouble(parameter, why);
    tensor.mutable_grad().reset();
    used = false;
  }
  if (parts_.equipment.watch && used) parts_.equipment.watch->look(parameter, tensor.grad());
  step_.add(parameter, used, leaf_of(parameter));
}

void VirtualReduction::fill_sum(size_t parameter) {
  const auto [bucket, slot] = parts_.plan.places[parameter];
  const auto& pieces = step_.pieces(parameter);
  if (PieceExchange* const exchange = exchange_of(bucket)) {
    for (size_t p = 0; p < pieces.size(); ++p) {
      const at::Tensor place = parts_.buckets[bucket].place_in(exchange->piece(p), slot);
      pieces[p].defined() ? place.copy_(pieces[p]) : place.zero_();
    }
    parts_.buckets[bucket].fill_sum(slot, nullptr, step_.used(parameter));
  } else {
    parts_.buckets[bucket].fill_sum(slot, &pieces.front(), step_.used(parameter));
  }
  parts_.buckets.note_filled(bucket);
}

PieceExchange* VirtualReduction::exchange_of(size_t bucket) {
  const at::Tensor& gradients = parts_.buckets[bucket].gradients();
  const at::ScalarType type = gradients.scalar_type();
  const auto travelling = travels_as(type);
  if (step_.sums_in_place(type, travelling)) return nullptr;
  exchanges_.resize(parts_.buckets.size());
  auto& exchange = exchanges_[bucket];
  if (!exchange) {
    exchange = std::make_unique<PieceExchange>(
        step_.plan(), parts_.plan.group, gradients,
        [this, type, travelling](const at::Tensor& sum) { return step_.finished(sum, type, travelling); });
    parts_.sender.send_through(bucket, exchange.get());
  }
  return exchange.get();
}

void VirtualReduction::end_leaf(Share share) {
  at::NoGradGuard no_grad;
  step_.begin();
  const bool contributes = share == Share::kGradients;
  Facts facts = parts_.message.facts();
  facts.active = share != Share::kOutOfInputs;
  facts.skipped = share == Share::kSkipped;
  facts.spoiled = facts.skipped && step_.any_added();
  // Within join() the inputs of a virtual rank may have ended within an accumulation: 0 is not compared.
  facts.passes = facts.joining && !step_.completes ? 0 : facts_of_passes(step_.passes);
  if (!contributes) step_.drop_leaf();
  for (size_t i = 0; i < parts_.plan.tensors.size(); ++i) {
    if (!contributes) {
      step_.add_nothing(i);
    } else if (!step_.is_added(i)) {
      add_to_sum(i);
    } else if (step_.is_late(i) && !lies_in_bucket(i)) {
      step_.add_late(i, leaf_of(i));
      if (parts_.plan.has_buckets() && step_.at_last_leaf()) fill_sum(i);
    }
  }
  step_.end_leaf(facts);
  step_.trouble = parts_.message.trouble();
  parts_.backward.forget_reached();
  if (parts_.events.virtual_rank_done) parts_.events.virtual_rank_done(contributes, step_.complete());
}

bool VirtualReduction::lies_in_bucket(size_t parameter) const {
  return parts_.plan.has_buckets() &&
         (parts_.sender.is_under_way(parameter) || parts_.buckets.slot_of(parameter).is_current());
}

void VirtualReduction::backward_ended() {
  ++step_.passes;
  if (parts_.passes.reduce_every() > 0) ++step_.counted;
  step_.local_only = step_.local_only && parts_.passes.reduce_every() == 0;
  if (!step_.completes) return;
  end_leaf(Share::kGradients);
  if (step_.complete()) reduce_all(Share::kGradients);
}

void VirtualReduction::reduce() {
  begin();
  reduce_all(Share::kGradients);
}

void VirtualReduction::skip() {
  if (!is_interrupted(parts_)) begin();
  parts_.backward.phase = Backward::Phase::kIdle;
  parts_.message.set_trouble(step_.trouble);
  end_leaf(Share::kSkipped);
  if (step_.complete())
    reduce_all(Share::kSkipped);
  else
    ++parts_.passes.since_reduction;  // the step is not complete
}

std::optional<std::vector<Facts>> VirtualReduction::shadow() {
  begin();
  return reduce_all(Share::kOutOfInputs);
}

void VirtualReduction::fail(const std::string& trouble) {
  begin();
  parts_.message.set_trouble(trouble);
  reduce_all(Share::kGradients);
}

std::vector<Facts> VirtualReduction::add_up_sums(Share share) {
  while (!step_.complete()) end_leaf(share);
  parts_.message.prepare(share, /*passes=*/0, /*spoiled=*/parts_.sender.sent() > 0, parts_.events);
  Facts& mine = parts_.message.facts();
  for (size_t i = 0; i < parts_.plan.places.size() && parts_.plan.has_buckets(); ++i)
    if (!parts_.buckets.slot_of(i).is_filled()) fill_sum(i);
  mine.late = parts_.sender.set_aside_late();
  std::vector<Facts> own = step_.facts();
  const auto write_rows = [&] {
    for (Facts& facts : own) {
      facts.late = mine.late;
      facts.data = mine.data;
      facts.odd_shard = mine.odd_shard;
      facts.settings = mine.settings;
      facts.trouble = !parts_.message.trouble().empty();
    }
    if (parts_.plan.has_buckets()) write_facts(parts_.buckets.last().notes(), step_.ranks().block().first, own);
  };
  write_rows();
  if (!parts_.plan.has_buckets()) return own;
  parts_.sender.send_full(/*at_end=*/true);
  parts_.sender.wait(write_rows);
  return read_facts(parts_.buckets.last().notes(), /*averaged=*/false);
}

void VirtualReduction::turn_sums_into_gradients(double scale) {
  at::NoGradGuard no_grad;
  for (size_t b = 0; b < parts_.buckets.size(); ++b) {
    const at::Tensor& gradients = parts_.buckets[b].gradients();
    if (exchange_of(b) == nullptr) step_.finished(gradients, gradients.scalar_type(), std::nullopt);
    if (scale != 1) gradients.mul_(scale);
  }
  const auto& tensors = parts_.plan.tensors;
  for (size_t i = 0; i < tensors.size() && !parts_.plan.has_buckets(); ++i) {
    if (!step_.used(i)) continue;
    const at::ScalarType type = tensors[i].scalar_type();
    at::Tensor gradient = step_.finished(step_.pieces(i).front(), type, travels_as(type));
    tensors[i].mutable_grad() = scale != 1 ? gradient.mul_(scale) : gradient;
  }
}

std::vector<Facts> VirtualReduction::reduce_all(Share share) {
  parts_.backward.phase = Backward::Phase::kIdle;
  if (share == Share::kGradients && parts_.events.reducing) parts_.events.reducing();
  const VirtualStep::Ending ending(step_);
  const std::vector<Facts> rows = add_up_sums(share);
  parts_.passes.note_reduction();
  parts_.backward.forget_reached();
  parts_.agreement.check(rows);
  parts_.agreement.check_passes(rows);
  if (std::any_of(rows.begin(), rows.end(), std::mem_fn(&Facts::late))) parts_.sender.reduce_late();
  turn_sums_into_gradients(parts_.agreement.factor(rows));
  end_reduction(parts_, rows);
  return rows;
}

}  // namespace lockstep
