#include "checkpoint/checkpoint_saver.h"

#include <ATen/ATen.h>
#include <ATen/core/List.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "base/library_thread.h"
#include "base/shared_weights.h"
#include "base/text.h"
#include "base/weights_set.h"
#include "checkpoint/accumulation.h"
#include "checkpoint/packed_object.h"
#include "checkpoint/random_states.h"
#include "checkpoint/state_comparison.h"
#include "collectives/contains_itself.h"
#include "collectives/group_state.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

using Dict = c10::impl::GenericDict;
using Outcome = CheckpointMessage::Outcome;
using Scope = Checkpointer::Scope;

/// This rank's values of the parts with one state in the file. Rank 0's are saved, with the others' slices.
struct CommonState {
  Dict parts = new_dict();
  Dict in_slices = new_dict();  ///< the parts that lie in slices on all ranks
};

CommonState common_state(const std::vector<CheckpointPart>& parts, const Group& group) {
  CommonState common;
  for (const CheckpointPart& part : parts) {
    if (part.scope == Scope::kEachRank) continue;
    const auto in_slices = part.save_in_slices ? part.save_in_slices(group) : std::nullopt;
    if (in_slices) common.in_slices.insert(part.name, *in_slices);
    if (part.scope == Scope::kAllRanks || group.rank() == 0)
      common.parts.insert(part.name, in_slices ? *in_slices : part.part.save());
  }
  insert_accumulation(common.parts, parts, group);
  return common;
}

std::string lines_to_compare(const std::vector<CheckpointPart>& parts, const CommonState& common) {
  Dict compared = new_dict(), in_slices = new_dict();
  for (const CheckpointPart& part : parts)
    if (part.scope == Scope::kAllRanks)
      (common.in_slices.contains(part.name) ? in_slices : compared).insert(part.name, common.parts.at(part.name));
  std::string lines = lines_of_state(compared);
  if (!in_slices.empty()) lines += lines_of_state(in_slices, /*in_slices=*/true);
  // Replicas have compared their values with each other, possibly on other ranks than those that save.
  for (const CheckpointPart& part : parts)
    if (part.replicas != nullptr)
      for (const auto& item : part.replicas->named_parameters())
        if (item.value().defined() && !part.ignored.contains(item.key()))
          lines += part.name + '.' + item.key() + '\t' + c10::str(item.value().toString(), item.value().sizes()) + '\n';
  return lines;
}

void refuse_borrowed(const c10::IValue& value, const std::string& name) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.has_storage() && is_borrowed(tensor.storage().unsafeGetStorageImpl()))
      throw Error("`" + name +
                  "` holds averaged weights now, and a resumed run would continue from them; save after the guard of "
                  "Ema::averaged_weights() has been destroyed. To save the averages alone, call "
                  "lockstep::save(ema.averaged_state(), path)");
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict())
      refuse_borrowed(item.value(), item.key().isString() ? name + '.' + item.key().toStringRef() : name);
  } else if (value.isList() || value.isTuple()) {
    const auto items = value.isList() ? value.toList().vec() : value.toTupleRef().elements().vec();
    for (size_t i = 0; i < items.size(); ++i) refuse_borrowed(items[i], name + '.' + std::to_string(i));
  }
}

std::string text_of_score(std::optional<double> score) { return score ? formatted("%.17g", *score) : "none"; }

Dict whole_state(const Dict& common, int64_t step, const std::vector<std::string>& own_states,
                 const VirtualRanks* virtual_ranks) {
  Dict whole = common.copy();
  insert_step(whole, step, virtual_ranks);
  c10::impl::GenericList ranks(c10::AnyType::get());
  for (const std::string& own : own_states) {
    at::Tensor bytes = at::empty({static_cast<int64_t>(own.size())}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), own.data(), own.size());
    ranks.push_back(bytes);
  }
  whole.insert(kRanksKey, ranks);
  return whole;
}

}  // namespace

Dict state_of_rank(const std::vector<CheckpointPart>& parts, const VirtualRanks* virtual_ranks) {
  Dict own = new_dict();
  save_random_states(own, virtual_ranks);
  for (const CheckpointPart& part : parts)
    if (part.scope == Scope::kEachRank) own.insert(part.name, part.part.save());
  return own;
}

void check_shared_weights() {
  if (const std::string trouble = trouble_of(all_shared_weights()); !trouble.empty()) throw Error(trouble);
}

void check_own_weights(const Dict& state) {
  if (!any_borrowed()) return;
  for (const auto& part : state)  // a value that contains itself is reported where it is compared or written
    if (!contains_itself(part.value())) refuse_borrowed(part.value(), part.key().toStringRef());
}

void insert_step(Dict& whole, int64_t step, const VirtualRanks* virtual_ranks) {
  whole.insert(kStepKey, step);
  if (virtual_ranks == nullptr) return;
  whole.insert(kVirtualRanksKey, static_cast<int64_t>(virtual_ranks->count()));
  whole.insert(kThreadsKey, static_cast<int64_t>(virtual_ranks->threads()));
}

CheckpointSaver::CheckpointSaver(std::string folder, Group group, const CheckpointerOptions& options)
    : group_(std::move(group)), options_(options), folder_(std::move(folder)) {
  const auto made = attempt([&](CheckpointMessage& message) {
    message.steps = -1;
    if (!is_main()) return;
    folder_.make(options_.every_steps || options_.every_minutes);
    for (const CheckpointManifest& manifest : folder_.list()) message.steps = std::max(message.steps, manifest.step);
  });
  const auto told = CheckpointMessage::decode(group_.broadcast_bytes(made.encode()), 0);
  if (told.outcome == Outcome::kFailed) throw StorageError("checkpoints cannot be written: " + told.text);
  step_found_ = told.steps;
}

void CheckpointSaver::clear_folder() {
  const auto cleared = attempt([&](CheckpointMessage&) {
    if (is_main()) folder_.clear();
  });
  const auto told = CheckpointMessage::decode(group_.broadcast_bytes(cleared.encode()), 0);
  if (told.outcome == Outcome::kFailed) throw StorageError("the old run cannot be replaced: " + told.text);
  step_found_ = -1;
}

CheckpointSaver::~CheckpointSaver() { wait(); }

void CheckpointSaver::wait() {
  if (writer_.joinable()) writer_.join();
}

CheckpointMessage CheckpointSaver::save(const std::vector<CheckpointPart>& parts, int64_t step,
                                        std::optional<double> score, const std::string& problem) {
  CommonState common;
  auto own = attempt([&](CheckpointMessage& message) {
    if (!problem.empty()) throw Error(problem);
    check_shared_weights();
    const Dict own_state = state_of_rank(parts, state_of(group_).virtual_ranks.get());
    check_own_weights(own_state);
    message.state = packed(own_state);
    common = common_state(parts, group_);
    check_own_weights(common.parts);
    if (group_.world_size() > 1) message.text = text_of_score(score) + '\n' + lines_to_compare(parts, common);
  });
  own.steps = step;
  auto sent = group_.gather_bytes(own.encode());
  CheckpointMessage result;
  if (is_main()) result = collect(std::move(sent), common.parts, !common.in_slices.empty(), step, score);
  result = CheckpointMessage::decode(group_.broadcast_bytes(result.encode()), 0);
  if (is_main() && score && !std::isfinite(*score) && result.outcome != Outcome::kFailed) {
    TORCH_WARN("the score of the checkpoint of step ", step, " is ", *score,
               ", which cannot be compared; the checkpoint is kept without a score");
  }
  if (result.outcome != Outcome::kInSlices) return result;
  const bool whole = std::none_of(parts.begin(), parts.end(), std::mem_fn(&CheckpointPart::lies_in_slices));
  if (is_main())
    result = attempt([&](CheckpointMessage&) { start_write(std::move(next_), step, score, whole); });
  else
    send_slices(group_, ObjectWriter(common.in_slices).sliced());
  return CheckpointMessage::decode(group_.broadcast_bytes(result.encode()), 0);
}

/// Called on rank 0: starts to write the ranks' states, unless one of them failed or they differ. `in_slices`: only
/// prepares it.
CheckpointMessage CheckpointSaver::collect(std::vector<std::string> sent, const Dict& common, bool in_slices,
                                           int64_t step, std::optional<double> score) {
  return attempt([&](CheckpointMessage& result) {
    std::vector<std::string> states, lines, scores, steps, failures;
    for (size_t rank = 0; rank < sent.size(); ++rank) {
      auto message = CheckpointMessage::decode(std::move(sent[rank]), static_cast<int>(rank));
      if (message.outcome == Outcome::kFailed) {
        result.outcome = Outcome::kFailed;
        result.text += "\n  rank " + std::to_string(rank) + ": " + message.text;
        failures.push_back(message.text);
      }
      states.push_back(std::move(message.state));
      steps.push_back(std::to_string(message.steps));
      const size_t end = std::min(message.text.find('\n'), message.text.size());
      scores.push_back(message.text.substr(0, end));
      lines.push_back(message.text.erase(0, std::min(end + 1, message.text.size())));
    }
    const auto compare = [](const char* what, const std::vector<std::string>& ranks) {
      if (const std::string other = difference_of_calls(what, ranks); !other.empty()) throw Error(other);
    };
    compare("ranks save different steps", steps);
    if (failures.size() == sent.size() && std::count(failures.begin(), failures.end(), failures[0]) == std::ssize(sent))
      result.text = failures[0];
    if (result.outcome == Outcome::kFailed) return;
    compare("ranks save different scores", scores);
    result.text = difference_of_lines(lines);
    if (!result.text.empty()) {
      result.outcome = Outcome::kDiverged;
      return;
    }
    auto next = std::make_unique<ObjectWriter>(whole_state(common, step, states, state_of(group_).virtual_ranks.get()));
    if (!in_slices) return start_write(std::move(next), step, score);
    next->bring_slices_from(group_);
    next_ = std::move(next);
    result.outcome = Outcome::kInSlices;
  });
}

/// Called on rank 0. Exceptions concern the state; a disk failure is not an exception.
void CheckpointSaver::start_write(std::unique_ptr<ObjectWriter> next, int64_t step, std::optional<double> score,
                                  bool may_copy) {
  wait();  // one at a time: the copy reuses the previous one's memory
  if (!options_.asynchronous || !may_copy) return write(*next, step, score);
  next->detach_from_tensors(snapshot_.get());
  snapshot_ = std::move(next);
  writer_ = library_thread([this, step, score] { write(*snapshot_, step, score); });
}

void CheckpointSaver::write(const ObjectWriter& object, int64_t step, std::optional<double> score) {
  last_failure_ = failure_of([&] {
    const CheckpointManifest added =
        folder_.add(step, score, group_.world_size(), [&](ByteSink& sink) { object.write(sink, "checkpoint"); });
    own_page().note_checkpoint(folder_.path_of(added), step, Clock::now());
    folder_.prune(options_.keep_last, options_.keep_best, options_.higher_is_better);
  });
  if (last_failure_.empty()) return;
  TORCH_WARN("the checkpoint of step ", step, " was not saved: ", last_failure_,
             ". Training goes on, and earlier checkpoints are untouched");
}

void CheckpointSaver::finish() {
  CheckpointMessage result;
  if (is_main()) {
    wait();
    if (!last_failure_.empty()) result = {.outcome = Outcome::kFailed, .text = last_failure_};
  }
  result = CheckpointMessage::decode(group_.broadcast_bytes(result.encode()), 0);
  if (result.outcome == Outcome::kFailed) throw StorageError("the last checkpoint was not saved: " + result.text);
}

}  // namespace lockstep
