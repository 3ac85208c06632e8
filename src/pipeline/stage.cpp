#include "pipeline/stage.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/clock.h"
#include "data_parallel/divergence.h"
#include "pipeline/schedule.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kHearing{2000};  ///< for neighbours to read what is wrong
constexpr std::chrono::milliseconds kPause{2};

}  // namespace

Stage::Stage(const Group& ranks, Model& model, const PipelineOptions& options, std::string me)
    : ranks_(ranks),
      model_(model),
      micro_batches_(options.micro_batches),
      in_flight_(options.in_flight),
      me_(std::move(me)),
      device_(model.module()->parameters().front().device()) {
  if (ranks.rank() > 0) before_.emplace(ranks, ranks.rank() - 1, device_);
  if (ranks.rank() + 1 < ranks.world_size()) after_.emplace(ranks, ranks.rank() + 1, device_);
  if (in_flight_ > 0) return;
  const auto places = ranks.all_gather_bytes(!after_ || after_->shares_memory() ? "here" : "elsewhere");
  in_flight_ = std::find(places.begin(), places.end(), "elsewhere") == places.end() ? 1 : 2;
}

void Stage::check_usable() const {
  TORCH_CHECK(!failed_,
              "Pipeline: an earlier pass has failed, and stages stopped at different places; end the program");
}

void Stage::tell(const std::string& trouble) noexcept {
  if (before_ && &*before_ != told_by_) before_->tell(trouble);
  if (after_ && &*after_ != told_by_) after_->tell(trouble);
  // What was sent is lost where this rank ends before it has arrived.
  const Deadline deadline(kHearing);
  while ((before_ && !before_->has_read_trouble()) || (after_ && !after_->has_read_trouble())) {
    if (deadline.passed()) return;
    std::this_thread::sleep_for(kPause);
  }
}

void Stage::telling(const std::function<void()>& pass) {
  check_usable();
  failed_ = true;
  try {
    pass();
    failed_ = false;
  } catch (const ToldTrouble& trouble) {
    own_page().fail(RankFailure::kPeer, -1, trouble.what());
    tell(trouble.what());
    throw Error(trouble.what());
  } catch (const c10::Error& error) {
    own_page().fail(RankFailure::kOwn, -1, error.what_without_backtrace());
    tell(me_ + ": " + error.what_without_backtrace());
    throw;
  } catch (const Error& error) {  // of the group, or of what the user calls
    tell(me_ + ": " + error.what());
    throw;
  } catch (const std::exception& error) {
    own_page().fail(RankFailure::kOwn, -1, error.what());
    tell(me_ + ": " + error.what());
    throw;
  }
}

Neighbour::Received Stage::receive(Neighbour& from, bool more) {
  try {
    Neighbour::Received received = from.receive();
    if (more) from.expect();
    return received;
  } catch (const ToldTrouble&) {
    told_by_ = &from;
    throw;
  }
}

void Stage::check_input(const at::Tensor& input) const {
  TORCH_CHECK(!is_first() || (input.defined() && input.dim() > 0 && input.size(0) > 0),
              "Pipeline: the first stage needs an input, a tensor whose first dimension are samples");
}

Stage::Batch Stage::batch_of(const at::Tensor& input, const at::Tensor& target) const {
  check_input(input);
  TORCH_CHECK(
      target.defined() && target.dim() > 0,
      "Pipeline: forward_backward() needs the targets on every stage, a tensor whose first dimension are samples");
  const int64_t rows = target.size(0);
  TORCH_CHECK(rows >= micro_batches_, "Pipeline: a batch of ", rows, " samples cannot be cut into ", micro_batches_,
              " micro-batches; take larger batches (drop_last leaves out a smaller last one), or fewer micro-batches");
  TORCH_CHECK(!is_first() || input.size(0) == rows, "Pipeline: the input has ", input.size(0),
              " samples, and the targets ", rows);
  Batch batch{.rows = rows_of_micro_batches(rows, micro_batches_),
              .inputs = {},
              .targets = {},
              .passes = std::vector<Pass>(static_cast<size_t>(micro_batches_)),
              .mark = static_cast<int64_t>(hash_of(target) ^ static_cast<uint64_t>(rows)),
              .loss = {}};
  if (is_first()) batch.inputs = input.split_with_sizes(batch.rows);
  if (is_last()) batch.targets = target.split_with_sizes(batch.rows);
  return batch;
}

void Stage::run_forward(Batch& batch, size_t micro_batch, const Pipeline::Loss& loss) {
  Pass& pass = batch.passes[micro_batch];
  if (is_first()) {
    pass.input = batch.inputs[micro_batch];
  } else {
    const Neighbour::Received received = receive(*before_, /*more=*/micro_batch + 1 < batch.passes.size());
    TORCH_CHECK(received.word == batch.mark,
                "Pipeline: the targets are not those of the first stage, so the ranks of a pipeline have different "
                "batches; let all of them read the same one: DataLoader(dataset, pipeline.shard(), ...)");
    pass.input = received.tensor;
    if (at::isFloatingType(pass.input.scalar_type())) pass.input.requires_grad_();
  }
  pass.output = model_(pass.input);
  TORCH_CHECK(pass.output.defined(), "Pipeline: the last layer of a stage returned no tensor");
  if (!is_last()) return after_->send(pass.output, batch.mark);
  const at::Tensor mean = loss(pass.output, batch.targets[micro_batch]);
  TORCH_CHECK(mean.defined() && mean.numel() == 1,
              "Pipeline: the loss must be a tensor with one element, the mean of its samples' losses");
  int64_t rows = 0;
  for (const int64_t one : batch.rows) rows += one;
  pass.output = mean * (static_cast<double>(batch.rows[micro_batch]) / static_cast<double>(rows));
  const at::Tensor share = pass.output.detach().reshape({}).to(at::kDouble);
  batch.loss = batch.loss.defined() ? batch.loss + share : share;
}

void Stage::run_backward(Batch& batch, size_t micro_batch) {
  const Pass pass = std::exchange(batch.passes[micro_batch], {});
  const bool more = micro_batch + 1 < batch.passes.size();
  std::optional<NoSyncGuard> local;  // the last backward averages the gradients
  if (more) local.emplace(model_.no_sync());
  if (is_last()) {
    pass.output.backward();
  } else {
    const Neighbour::Received received = receive(*after_, more);
    TORCH_CHECK(received.tensor.defined(),
                "Pipeline: the next stage has no gradient for what this stage's last layer returns; layers must pass "
                "on floating-point tensors, and use them");
    pass.output.backward(received.tensor);
  }
  if (before_) before_->send(pass.input.grad(), batch.mark);
}

double Stage::shared_loss(const Batch& batch) const {
  const at::Tensor loss =
      is_last() ? batch.loss.reshape({1}).to(device_) : at::empty({1}, at::dtype(at::kDouble).device(device_));
  ranks_.broadcast(loss, ranks_.world_size() - 1);
  return loss.item<double>();
}

void Stage::finish() {
  if (before_) before_->finish();
  if (after_) after_->finish();
}

double Stage::forward_backward(const at::Tensor& input, const at::Tensor& target, const Pipeline::Loss& loss) {
  const OperationLabel label("Pipeline::forward_backward()");
  double result = 0;
  telling([&] {
    Batch batch = batch_of(input, target);
    if (before_) before_->expect();
    if (after_) after_->expect();
    for (const auto& [kind, micro_batch] :
         one_forward_one_backward(ranks_.rank(), ranks_.world_size(), micro_batches_, in_flight_)) {
      const auto number = static_cast<size_t>(micro_batch);
      if (kind == PipelineAction::Kind::kForward)
        run_forward(batch, number, loss);
      else
        run_backward(batch, number);
    }
    finish();
    result = shared_loss(batch);
  });
  return result;
}

at::Tensor Stage::forward(const at::Tensor& input) {
  const OperationLabel label("Pipeline::forward()");
  const at::NoGradGuard no_grad;
  at::Tensor result;
  telling([&] {
    check_input(input);
    std::vector<at::Tensor> inputs, outputs;
    int64_t parts = 1;
    if (is_first()) {
      parts = std::min<int64_t>(micro_batches_, input.size(0));
      inputs = input.split_with_sizes(rows_of_micro_batches(input.size(0), static_cast<int>(parts)));
    }
    if (after_) after_->expect();
    for (int64_t i = 0; i < parts; ++i) {
      at::Tensor part;
      if (is_first()) {
        part = inputs[static_cast<size_t>(i)];
      } else {
        const Neighbour::Received received = receive(*before_, /*more=*/false);
        part = received.tensor;
        parts = received.word;
      }
      outputs.push_back(model_(part));
      if (after_) after_->send(outputs.back(), parts), outputs.clear();
    }
    result = is_last() ? at::cat(outputs) : receive(*after_, /*more=*/false).tensor;
    if (before_) before_->send(result, parts);
    finish();
  });
  return result;
}

}  // namespace lockstep
