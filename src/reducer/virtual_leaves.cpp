#include <algorithm>
#include <functional>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "collectives/group_state.h"
#include "reducer/reducer.h"

// A step of several virtual ranks. Each backward (or each `accumulate` of them) is a leaf of the summation tree:
//
//   before the first gradient   VirtualStep::begin remembers .grad
//   a gradient is ready         take_leaf moves it out of .grad into the partial sums; with the last leaf, fill_sum
//                               puts the parameter's sum into its bucket, and full buckets are launched
//   the backward ends           end_leaf notes the leaf's facts, one row of the table; after the last one, reduce_all
//
// Where a bucket can be summed as it lies (VirtualStep::sums_in_place) it travels like any other. Otherwise its pieces
// travel (PieceExchange).

namespace lockstep {

void Reducer::make_virtual_step() {
  const auto& ranks = state_of(fixed_.group).virtual_ranks;
  if (!ranks) return;
  std::unique_ptr<VirtualStep> step;
  if (fixed_.virtual_ranks)
    step = std::make_unique<VirtualStep>(
        ranks, fixed_.tensors,
        VirtualStep::Settings{.mean = fixed_.settings.reduction == GradientReduction::kMean,
                              .first_adds_it = fixed_.settings.reduction == GradientReduction::kSum});
  {
    const MutexLock lock(mutex_);
    virtual_ = std::move(step);
    backward_.virtual_rank = ranks->current();
  }
  leaf_watch_ = ranks->listen([this](std::optional<int> from, std::optional<int> to) {
    const MutexLock lock(mutex_);
    if (to) backward_.virtual_rank = to;
    // The data ended in the middle of an accumulation.
    if (virtual_ && virtual_->passes > 0 && !virtual_->at_last_leaf() && from == virtual_->virtual_rank())
      end_leaf(Share::kGradients);
  });
}

void Reducer::check_virtual(const CommHook* hook, bool defers) const {
  const bool any = state_of(fixed_.group).virtual_ranks != nullptr;
  TORCH_CHECK(!any || hook == nullptr || hook->travels_as(at::kFloat),
              "this communication hook cannot be used with virtual ranks, because what it keeps or sends belongs to a "
              "process; use fp16_compress_hook(), bf16_compress_hook() or none, or leave out virtual_ranks");
  TORCH_CHECK(!defers || !virtual_,
              "a rank works for several virtual ranks, whose gradients are added in backward; an optimizer cannot sum "
              "them in its step");
}

void Reducer::look_at_virtual_rank() {
  if (backward_.virtual_rank || !state_of(fixed_.group).virtual_ranks || !message_.trouble.empty()) return;
  const int first = state_of(fixed_.group).virtual_ranks->block().first;
  message_.trouble =
      "a backward ran before this rank had entered a virtual rank, so its random numbers would not be those of virtual "
      "rank " +
      std::to_string(first) +
      "; call context.enter_virtual_rank(v) before each virtual rank's micro-batch, or take batches from a DataLoader "
      "made from the Context, which calls it";
}

std::optional<at::ScalarType> Reducer::travels_as(at::ScalarType type) const {
  return equipment_.hook ? equipment_.hook->travels_as(type) : std::nullopt;
}

VirtualStep::Leaf Reducer::leaf_of(size_t parameter) const {
  const bool weighted = fixed_.settings.reduction == GradientReduction::kWeightedMean;
  return {.weight = weighted ? message_.facts.weight : 1,
          .travels_as = travels_as(fixed_.tensors[parameter].scalar_type())};
}

void Reducer::begin_leaf_backward() {
  VirtualStep& step = *virtual_;
  // A generator's loss reaches the critic, too, within no_sync() and up to zero_grad(): a whole round that counts for
  // nothing. Buffers that it has changed would count.
  if (!fixed_.settings.buffers && step.local_only && step.passes > 0 && step.at_last_leaf() && gradients_are_gone()) {
    step.reset();
    backward_.used.assign(backward_.used.size(), false);
  }
  step.completes = passes_.reduce_every() > 0 && step.passes + 1 >= passes_.reduce_every();
  backward_.reduces = step.completes && step.at_last_leaf();
  step.in_place = true;
  for (size_t b = 0; b < buckets_.size() && backward_.reduces; ++b)
    step.in_place = step.in_place && exchange_of(b) == nullptr;
  const auto current = step.ranks().current();
  if (current && *current != step.virtual_rank() && message_.trouble.empty())
    message_.trouble = "a backward came from the micro-batch of virtual rank " + std::to_string(*current) +
                       ", but the step waits for that of virtual rank " + std::to_string(step.virtual_rank()) +
                       "; each virtual rank runs one backward a step, or as many as accumulate() says, which must then "
                       "be DataLoaderOptions::accumulate as well";
  if (step.any_taken() && message_.trouble.empty())
    message_.trouble = "an exception ended the backward of virtual rank " + std::to_string(step.virtual_rank()) +
                       " after some of its gradients had been added, and the program went on; a program that catches "
                       "an exception from forward or backward must call skip_step()";
}

void Reducer::on_leaf_gradient(size_t parameter) {
  if (!virtual_->completes) return;
  if (current_backward() != backward_.number) backward_.launching = Launching::kAtEnd;
  if (backward_.launching == Launching::kAtEnd || virtual_->taken(parameter)) return;
  take_leaf(parameter);
  if (!virtual_->at_last_leaf() || fixed_.plan.empty()) return;
  fill_sum(parameter);
  if (virtual_->in_place) launch_buckets(/*at_end=*/false);
}

void Reducer::take_leaf(size_t parameter) {
  const at::Tensor& tensor = fixed_.tensors[parameter];
  bool used = backward_.used[parameter];
  if (const char* why = used ? gradient_problem(tensor, tensor.numel(), tensor.device()) : nullptr) {
    note_trouble(parameter, why);
    tensor.mutable_grad().reset();
    used = false;
  }
  if (equipment_.watch && used) equipment_.watch->look(parameter, tensor.grad());
  virtual_->take(parameter, used, leaf_of(parameter));
}

void Reducer::fill_sum(size_t parameter) {
  const auto [bucket, slot] = fixed_.places[parameter];
  const auto& pieces = virtual_->pieces(parameter);
  if (PieceExchange* const exchange = exchange_of(bucket)) {
    for (size_t p = 0; p < pieces.size(); ++p) {
      const at::Tensor place = buckets_[bucket].place_in(exchange->piece(p), slot);
      pieces[p].defined() ? place.copy_(pieces[p]) : place.zero_();
    }
    buckets_[bucket].fill_sum(slot, nullptr, virtual_->used(parameter));
  } else {
    buckets_[bucket].fill_sum(slot, &pieces.front(), virtual_->used(parameter));
  }
  if (equipment_.timeline && buckets_[bucket].full()) equipment_.timeline->ready(bucket);
}

PieceExchange* Reducer::exchange_of(size_t bucket) {
  const at::Tensor& gradients = buckets_[bucket].gradients();
  const at::ScalarType type = gradients.scalar_type();
  const auto travelling = travels_as(type);
  if (virtual_->sums_in_place(type, travelling)) return nullptr;
  exchanges_.resize(buckets_.size());
  auto& exchange = exchanges_[bucket];
  if (!exchange)
    exchange = std::make_unique<PieceExchange>(virtual_->plan(), fixed_.group, gradients,
                                               [step = virtual_.get(), type, travelling](const at::Tensor& sum) {
                                                 return step->concluded(sum, type, travelling);
                                               });
  return exchange.get();
}

void Reducer::end_leaf(Share share) {
  at::NoGradGuard no_grad;
  virtual_->begin();
  const bool contributes = share == Share::kGradients;
  Facts facts = message_.facts;
  facts.active = share != Share::kOutOfInputs;
  facts.skipped = share == Share::kSkipped;
  facts.spoiled = facts.skipped && virtual_->any_taken();
  facts.passes = facts_of_passes(virtual_->passes);
  if (!contributes) virtual_->drop_leaf();
  for (size_t i = 0; i < fixed_.tensors.size(); ++i) {
    if (!contributes) {
      virtual_->take_nothing(i);
    } else if (!virtual_->taken(i)) {
      take_leaf(i);
    } else if (virtual_->is_late(i) && !lies_in_bucket(i)) {
      virtual_->take_late(i, leaf_of(i));
      if (!fixed_.plan.empty() && virtual_->at_last_leaf()) fill_sum(i);
    }
  }
  virtual_->end_leaf(facts);
  virtual_->trouble = message_.trouble;
  backward_.used.assign(backward_.used.size(), false);
  if (fixed_.events.virtual_rank_done) fixed_.events.virtual_rank_done(contributes, virtual_->complete());
}

bool Reducer::lies_in_bucket(size_t parameter) const {
  if (fixed_.plan.empty()) return false;
  const auto [bucket, slot] = fixed_.places[parameter];
  return buckets_[bucket].launched() || buckets_[bucket].current(slot);
}

bool Reducer::gradients_are_gone() const {
  const at::NoGradGuard no_grad;
  return std::all_of(fixed_.tensors.begin(), fixed_.tensors.end(), [](const at::Tensor& tensor) {
    const at::Tensor& gradient = tensor.grad();
    return !gradient.defined() || (gradient.layout() == at::kStrided && gradient.count_nonzero().item<int64_t>() == 0);
  });
}

void Reducer::finish_leaf_backward() {
  ++virtual_->passes;
  virtual_->local_only = virtual_->local_only && passes_.reduce_every() == 0;
  if (!virtual_->completes) return;
  end_leaf(Share::kGradients);
  if (virtual_->complete()) reduce_all(Share::kGradients);
}

void Reducer::skip_leaf() {
  if (!backward_.interrupted()) begin_reduction();
  backward_.phase = Phase::kIdle;
  message_.trouble = virtual_->trouble;
  end_leaf(Share::kSkipped);
  if (virtual_->complete())
    reduce_all(Share::kSkipped);
  else
    ++passes_.since_reduction;  // the step is not complete
}

std::vector<Facts> Reducer::exchange_leaves(Share share) {
  while (!virtual_->complete()) end_leaf(share);
  prepare_message(share, /*passes=*/0);
  Facts& mine = message_.facts;
  for (size_t i = 0; i < fixed_.places.size() && !buckets_.empty(); ++i)
    if (!buckets_[fixed_.places[i].bucket].filled(fixed_.places[i].slot)) fill_sum(i);
  for (Bucket& bucket : buckets_)
    if (bucket.launched()) mine.late |= bucket.take_late();
  std::vector<Facts> own = virtual_->facts();
  const auto say = [&] {
    for (Facts& facts : own) {
      facts.late = mine.late;
      facts.data = mine.data;
      facts.odd_shard = mine.odd_shard;
      facts.trouble = !message_.trouble.empty();
    }
    if (!buckets_.empty()) write_facts(buckets_.back().notes(), virtual_->ranks().block().first, own);
  };
  say();
  if (buckets_.empty()) return own;
  launch_buckets(/*at_end=*/true);
  wait(say);
  return read_facts(buckets_.back().notes(), /*averaged=*/false);
}

void Reducer::conclude_sums(double scale) {
  at::NoGradGuard no_grad;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const at::Tensor& gradients = buckets_[b].gradients();
    if (exchange_of(b) == nullptr) virtual_->concluded(gradients, gradients.scalar_type(), std::nullopt);
    if (scale != 1) gradients.mul_(scale);
  }
  for (size_t i = 0; i < fixed_.tensors.size() && buckets_.empty(); ++i) {
    if (!virtual_->used(i)) continue;
    const at::ScalarType type = fixed_.tensors[i].scalar_type();
    at::Tensor gradient = virtual_->concluded(virtual_->pieces(i).front(), type, travels_as(type));
    fixed_.tensors[i].mutable_grad() = scale != 1 ? gradient.mul_(scale) : gradient;
  }
}

}  // namespace lockstep
