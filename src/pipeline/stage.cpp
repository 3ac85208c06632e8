#include "pipeline/stage.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/clock.h"
#include "collectives/sample.h"
#include "data_parallel/divergence.h"
#include "data_parallel/replica_state.h"
#include "pipeline/schedule.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kHearing{2000};  ///< time for neighbours to read the trouble
constexpr std::chrono::milliseconds kPause{2};

// Flags of Stage::answers().
constexpr int64_t kStepped = 1, kNotStepped = 2, kCleared = 4, kNotCleared = 8, kTrains = 16, kEvaluates = 32;

int64_t flags_of(const StepWatch::Answer& answer, int64_t yes, int64_t no) {
  return (answer.yes ? yes : 0) | (answer.no ? no : 0);
}

/// `hash` of a tensor's values, with its dtype and shape.
int64_t with_layout(uint64_t hash, const at::Tensor& tensor) {
  hash = Hash::mixed(hash, static_cast<uint64_t>(tensor.scalar_type()));
  for (const int64_t size : tensor.sizes()) hash = Hash::mixed(hash, static_cast<uint64_t>(size));
  return static_cast<int64_t>(hash);
}

/// Of some of its values.
int64_t sample_of_batch(const at::Tensor& tensor) { return with_layout(sample_of(tensor.cpu()), tensor); }

}  // namespace

Stage::Stage(const Group& ranks, Model& model, const PipelineOptions& options, std::string me)
    : ranks_(ranks),
      model_(model),
      micro_batches_(options.micro_batches),
      in_flight_(options.in_flight),
      me_(std::move(me)),
      device_(model.module()->parameters().front().device()),
      steps_(*model.module()) {
  if (ranks.rank() > 0) before_.emplace(ranks, ranks.rank() - 1, device_);
  if (ranks.rank() + 1 < ranks.world_size()) after_.emplace(ranks, ranks.rank() + 1, device_);
  if (in_flight_ > 0) return;
  const auto places = ranks.all_gather_bytes(!after_ || after_->shares_memory() ? "here" : "elsewhere");
  in_flight_ = std::find(places.begin(), places.end(), "elsewhere") == places.end() ? 1 : 2;
}

void Stage::check_usable() const {
  TORCH_CHECK(!failed_,
              "Pipeline: an earlier pass failed, and the stages stopped at different places; end the program");
}

int64_t Stage::answers() const {
  const StepWatch::Done done = steps_.since_mark();
  // A sharded optimizer takes sums into .grad as it steps, and detects changes itself.
  TORCH_CHECK(done.regraded.empty() || state_of(model_).is_deferred(), "Pipeline: the gradient of ", done.regraded,
              " was changed after forward_backward(), as LibTorch's clip_grad_norm_ does, which sees one stage's "
              "gradients alone; call pipeline.clip_grad_norm() on every rank");
  return flags_of(done.stepped, kStepped, kNotStepped) | flags_of(done.cleared, kCleared, kNotCleared) |
         (model_.module()->is_training() ? kTrains : kEvaluates);
}

int64_t Stage::with_answers_of(int64_t earlier, int64_t own) {
  const auto differ = [&](int64_t yes, int64_t no) {
    return ((own & yes) != 0 && (earlier & no) != 0) || ((own & no) != 0 && (earlier & yes) != 0);
  };
  TORCH_CHECK(!differ(kStepped, kNotStepped), "Pipeline: since the last forward_backward() ",
              (own & kStepped) != 0 ? "this stage's parameters have changed, and those of an earlier stage have not"
                                    : "this stage's parameters have not changed, and those of an earlier stage have",
              "; call optimizer.step() on every rank, or on none");
  TORCH_CHECK(!differ(kCleared, kNotCleared), "Pipeline: since the last forward_backward() ",
              (own & kCleared) != 0 ? "this stage's gradients were cleared, and those of an earlier stage were not"
                                    : "this stage's gradients were not cleared, and those of an earlier stage were",
              "; call optimizer.zero_grad() on every rank, or on none");
  TORCH_CHECK(!differ(kTrains, kEvaluates), "Pipeline: this stage ",
              (own & kTrains) != 0 ? "trains, and an earlier one evaluates" : "evaluates, and an earlier one trains",
              "; call pipeline.layers()->train() or eval() on every rank");
  return own | earlier;
}

std::string Stage::done() const {
  const int64_t all = answers();
  if ((all & (kStepped | kNotStepped)) == 0) return "did nothing";
  return std::string((all & kStepped) != 0 ? "stepped" : "did not step") +
         ((all & kNotCleared) != 0 ? ", and kept gradients"
          : (all & kCleared) != 0  ? ", and cleared gradients"
                                   : "");
}

void Stage::tell(const std::string& trouble) noexcept {
  if (before_ && &*before_ != told_by_) before_->tell(trouble);
  if (after_ && &*after_ != told_by_) after_->tell(trouble);
  // Sent data is lost if this rank ends before it has arrived.
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
  } catch (const Error& error) {  // of the group, or of the user's calls
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
              "Pipeline: the first stage needs an input: a tensor whose first dimension is the samples, at least one");
}

void Stage::check_given(const at::Tensor& input, int64_t first_stages) const {
  TORCH_CHECK(!input.defined() || sample_of_batch(input) == first_stages,
              "Pipeline: the input differs from that of the first stage, so the ranks of a pipeline have different "
              "batches; let all of them read the same batch: DataLoader(dataset, pipeline.shard(), ...)");
}

Stage::Batch Stage::batch_of(const at::Tensor& input, const at::Tensor& target) const {
  check_input(input);
  TORCH_CHECK(
      target.defined() && target.dim() > 0,
      "Pipeline: forward_backward() needs the targets on every stage: a tensor whose first dimension is the samples");
  const int64_t rows = target.size(0);
  TORCH_CHECK(rows >= micro_batches_, "Pipeline: a batch of ", rows, " samples cannot be cut into ", micro_batches_,
              " micro-batches; take larger batches (drop_last leaves out a smaller last one), or fewer micro-batches");
  TORCH_CHECK(!is_first() || input.size(0) == rows, "Pipeline: the input has ", input.size(0),
              " samples, and the targets ", rows);
  Batch batch{.rows = rows_of_micro_batches(rows, micro_batches_),
              .inputs = {},
              .targets = {},
              .passes = std::vector<Pass>(static_cast<size_t>(micro_batches_)),
              .words = {.mark = with_layout(hash_of(target), target),
                        .given = is_first() ? sample_of_batch(input) : 0,
                        .answers = answers(),
                        .count = micro_batches_},
              .loss = {}};
  if (is_first()) batch.inputs = input.split_with_sizes(batch.rows);
  if (is_last()) batch.targets = target.split_with_sizes(batch.rows);
  return batch;
}

void Stage::run_forward(Batch& batch, size_t micro_batch, const at::Tensor& input, const Pipeline::Loss& loss) {
  Pass& pass = batch.passes[micro_batch];
  if (is_first()) {
    pass.input = batch.inputs[micro_batch];
  } else {
    const Neighbour::Received received = receive(*before_, /*more=*/micro_batch + 1 < batch.passes.size());
    TORCH_CHECK(received.words.mark == batch.words.mark,
                "Pipeline: the targets differ from those of the first stage, so the ranks of a pipeline have different "
                "batches; let all of them read the same batch: DataLoader(dataset, pipeline.shard(), ...)");
    if (micro_batch == 0) {
      check_given(input, received.words.given);
      batch.words.given = received.words.given;
      batch.words.answers = with_answers_of(received.words.answers, batch.words.answers);
    }
    pass.input = received.tensor;
    if (at::isFloatingType(pass.input.scalar_type())) pass.input.requires_grad_();
  }
  pass.output = model_(pass.input);
  TORCH_CHECK(pass.output.defined(), "Pipeline: the last layer of a stage returned no tensor");
  if (!is_last()) {
    TORCH_CHECK(pass.output.dim() > 0 && pass.output.size(0) == batch.rows[micro_batch],
                "Pipeline: the last layer of a "
                "stage returned a tensor of ",
                pass.output.sizes(), " for ", batch.rows[micro_batch],
                " samples; the first dimension of the tensor for the next stage must be the samples");
    return after_->send(pass.output, batch.words);
  }
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
                "Pipeline: the next stage has no gradient for the output of this stage's last layer; layers must pass "
                "on floating-point tensors and use them");
    pass.output.backward(received.tensor);
    batch.words.loss = received.words.loss;
  }
  if (is_last() && !more) batch.words.loss = batch.loss.item<double>();
  if (before_) before_->send(pass.input.grad(), batch.words);
}

void Stage::finish_backward() {
  if (before_) before_->wait_until_done();
  if (after_) after_->send_done();
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
    steps_.release();
    if (before_) before_->expect();
    if (after_) after_->expect();
    for (const auto& [kind, micro_batch] :
         one_forward_one_backward(ranks_.rank(), ranks_.world_size(), micro_batches_, in_flight_)) {
      const auto number = static_cast<size_t>(micro_batch);
      if (kind == PipelineAction::Kind::kForward)
        run_forward(batch, number, input, loss);
      else
        run_backward(batch, number);
    }
    finish_backward();
    finish();
    result = batch.words.loss;
    mark();
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
    Neighbour::Words words{.answers = answers(), .count = 1};
    const int64_t& parts = words.count;
    if (is_first()) {
      words.count = std::min<int64_t>(micro_batches_, input.size(0));
      words.given = sample_of_batch(input);
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
        check_given(input, received.words.given);
        const int64_t own = words.answers;
        words = received.words;
        words.answers = i == 0 ? with_answers_of(received.words.answers, own) : own;
      }
      outputs.push_back(model_(part));
      if (after_) after_->send(outputs.back(), words), outputs.clear();
    }
    result = is_last() ? at::cat(outputs) : receive(*after_, /*more=*/false).tensor;
    if (before_) before_->send(result, words);
    finish();
  });
  return result;
}

}  // namespace lockstep
