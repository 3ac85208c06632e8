#include <lockstep/checkpointer.h>

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "base/mutex.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/packed_object.h"
#include "checkpoint/random_states.h"
#include "checkpoint/state_comparison.h"

// One save, on all ranks: each packs what is its own and sends it to rank 0, with a hash of each tensor that should be
// the same everywhere; rank 0 compares these, looks at all tensors, copies them, and tells the others whether that went
// well; they go on training, while a thread of rank 0 writes the copy.

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using Dict = c10::impl::GenericDict;

constexpr const char* kStep = "step";
constexpr const char* kRanks = "ranks";  // list of what each rank has of its own, each a .pt file in a uint8 tensor
constexpr double kMaxSecondsBetweenQuestions = 1;

Dict new_dict() { return Dict(c10::AnyType::get(), c10::AnyType::get()); }

/// What `body` throws, as a text; "" for nothing. An empty text of an exception becomes a word.
std::string failure_of(const std::function<void()>& body) {
  try {
    body();
    return "";
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return *error.what() != '\0' ? error.what() : "an unknown failure";
  }
}

}  // namespace

struct Checkpointer::State {
  struct NamedPart {
    std::string name;
    Part part;
    Scope scope;
  };

  State(std::string folder_path, Group group_, CheckpointerOptions options_)
      : group(std::move(group_)), options(options_), folder(std::move(folder_path)) {}
  ~State() {
    if (writer.joinable()) writer.join();
  }

  bool is_main() const { return group.rank() == 0; }

  /// Now rather than at the first save, hours later.
  void make_folder() {
    std::string problem;
    if (is_main()) problem = failure_of([&] { folder.make(options.every_steps || options.every_minutes); });
    problem = group.broadcast_bytes(problem);
    if (!problem.empty()) throw StorageError("checkpoints cannot be written: " + problem);
  }

  // ---- saving ----

  c10::IValue own_state() const {
    Dict own = new_dict();
    save_random_states(own);
    for (const NamedPart& part : parts)
      if (part.scope == Scope::kEachRank) own.insert(part.name, part.part.save());
    return own;
  }

  /// What this rank holds of the parts that one state stands for; rank 0's goes into the file.
  Dict common_state() const {
    Dict common = new_dict();
    for (const NamedPart& part : parts)
      if (part.scope == Scope::kAllRanks || (part.scope == Scope::kRankZero && is_main()))
        common.insert(part.name, part.part.save());
    return common;
  }

  std::string lines_to_compare(const Dict& common) const {
    Dict compared = new_dict();
    for (const NamedPart& part : parts)
      if (part.scope == Scope::kAllRanks && group.world_size() > 1) compared.insert(part.name, common.at(part.name));
    return lines_of_state(compared);
  }

  static Dict whole_state(const Dict& common, int64_t step, const std::vector<std::string>& own_states) {
    Dict whole = common.copy();
    whole.insert(kStep, step);
    c10::impl::GenericList ranks(c10::AnyType::get());
    for (const std::string& own : own_states) {
      at::Tensor bytes = at::empty({static_cast<int64_t>(own.size())}, at::kByte);
      std::memcpy(bytes.mutable_data_ptr(), own.data(), own.size());
      ranks.push_back(bytes);
    }
    whole.insert(kRanks, ranks);
    return whole;
  }

  void wait() {
    if (writer.joinable()) writer.join();
  }

  /// Rank 0: makes `object` ready and starts to write it. Failures of the disk are not among what it throws.
  void start_write(const c10::IValue& object, int64_t step, std::optional<double> score) {
    auto next = std::make_unique<ObjectWriter>(object);
    wait();  // one at a time: the copy is taken into the memory of the one before
    if (!options.asynchronous) {
      write(*next, step, score);
      return;
    }
    next->detach_from_tensors(snapshot.get());
    snapshot = std::move(next);
    writer = std::thread([this, step, score] { write(*snapshot, step, score); });
  }

  void write(const ObjectWriter& object, int64_t step, std::optional<double> score) {
    const std::string problem = failure_of([&] {
      const CheckpointManifest added =
          folder.add(step, score, group.world_size(), [&](ByteSink& sink) { object.write(sink, "checkpoint"); });
      own_page().note_checkpoint(folder.path_of(added), step, Clock::now());
      folder.prune(options.keep_last, options.keep_best, options.higher_is_better);
    });
    if (!problem.empty()) {
      TORCH_WARN("the checkpoint of step ", step, " was not saved: ", problem,
                 ". Training goes on; earlier checkpoints are as they were");
    }
    const MutexLock lock(mutex);
    last_problem = problem;
  }

  void save(int64_t step, std::optional<double> score) {
    for (const auto& check : checks) check();
    const OperationLabel label("a checkpoint");
    Dict common = new_dict();
    std::string own, lines;
    // The first byte says whether what follows is a state or a failure.
    const std::string own_problem = failure_of([&] {
      own = packed(own_state());
      common = common_state();
      lines = lines_to_compare(common);
    });
    std::vector<std::string> states = group.gather_bytes(own_problem.empty() ? '+' + own : '-' + own_problem);
    const auto all_lines = group.gather_bytes(lines);
    std::string problem, difference;
    if (is_main()) {
      for (size_t rank = 0; rank < states.size(); ++rank) {
        if (states[rank][0] == '-') problem += "\n  rank " + std::to_string(rank) + ": " + states[rank].substr(1);
        states[rank].erase(0, 1);
      }
      if (problem.empty()) difference = difference_of_lines(all_lines);
      if (problem.empty() && difference.empty())
        problem = failure_of([&] { start_write(whole_state(common, step, states), step, score); });
    }
    difference = group.broadcast_bytes(difference);
    problem = group.broadcast_bytes(problem);
    last_step = step;
    last_save = Clock::now();
    const std::string cannot = "the state of step " + std::to_string(step) + " cannot be saved: ";
    if (!problem.empty()) throw Error(cannot + problem);
    if (difference.empty()) return;
    own_page().fail(RankFailure::kDiverged, -1, cannot + difference);
    throw Error(cannot + difference +
                ". One state stands for all ranks, so it must be the same on all of them: what is set or drawn on each "
                "rank must be broadcast first. If ranks may differ there, add the part with Scope::kEachRank, which "
                "saves each rank's, or Scope::kRankZero, which saves rank 0's unseen");
  }

  double between_questions() const { return std::min(kMaxSecondsBetweenQuestions, *options.every_minutes * 60 / 10); }

  bool is_due(int64_t step) {
    if (options.every_steps && step - last_step >= *options.every_steps) return true;
    if (!options.every_minutes || step < next_question) return false;
    // Clocks differ: rank 0's counts, and it is asked so seldom that asking costs nothing.
    char due = 0;
    int64_t pause = 1;
    if (is_main()) {
      const auto now = Clock::now();
      due = std::chrono::duration<double>(now - last_save).count() >= *options.every_minutes * 60 ? 1 : 0;
      const double seconds = std::chrono::duration<double>(now - last_question).count();
      const auto steps = static_cast<double>(std::max<int64_t>(step - last_asked, 1));
      if (last_asked > 0 && seconds > 0)
        pause = std::clamp<int64_t>(static_cast<int64_t>(between_questions() * steps / seconds), 1, 1000);
      last_question = now;
      last_asked = step;
    }
    std::string answer(1, due);
    answer += std::to_string(pause);
    answer = group.broadcast_bytes(answer);
    next_question = step + std::stoll(answer.substr(1));
    return answer[0] != 0;
  }

  // ---- resuming ----

  /// Rank 0: the newest that is whole; none where there is no checkpoint at all.
  std::optional<CheckpointManifest> newest_whole() const {
    const auto all = folder.list();
    std::string problems;
    for (const CheckpointManifest& manifest : all) {
      const std::string problem = failure_of([&] { folder.check(manifest); });
      if (problem.empty()) {
        if (!problems.empty()) {
          TORCH_WARN("resuming from an older checkpoint, ", manifest.file, ":", problems);
        }
        return manifest;
      }
      problems += "\n  " + problem;
    }
    if (!problems.empty()) throw RefusedInput("no checkpoint is whole:" + problems);
    return {};
  }

  /// All parts from the file; returns what does not fit, or "".
  std::string load(const std::string& path) {
    std::string problems;
    const auto load_part = [&](const NamedPart& part, const Dict& from) {
      const auto found = from.find(part.name);
      const std::string problem =
          failure_of([&] { found == from.end() ? throw Error("is not in it") : part.part.load(found->value()); });
      if (!problem.empty()) problems += "\n  `" + part.name + "`: " + problem;
    };
    problems += failure_of([&] {
      const Dict whole = load_object(path, {.mmap = true}).toGenericDict();
      for (const NamedPart& part : parts)
        if (part.scope != Scope::kEachRank) load_part(part, whole);
      resumed_step = whole.at(kStep).toInt();
      const auto ranks = whole.at(kRanks).toList();
      if (static_cast<int>(ranks.size()) == group.world_size()) {
        const Dict own = unpacked(ranks.get(static_cast<size_t>(group.rank())).toTensor(), path).toGenericDict();
        for (const NamedPart& part : parts)
          if (part.scope == Scope::kEachRank) load_part(part, own);
        restore_random_states(own);
      } else {
        problems += load_from_other_ranks(ranks, path);
      }
    });
    return problems;
  }

  /// What each of another number of ranks had of its own; returns what does not fit, or "".
  std::string load_from_other_ranks(const c10::impl::GenericList& ranks, const std::string& path) {
    std::string problems, left_out = "random states";
    std::vector<Dict> own;
    for (const NamedPart& part : parts) {
      if (part.scope != Scope::kEachRank) continue;
      if (!part.part.load_from_ranks) {
        left_out += ", `" + part.name + "`";
        continue;
      }
      const std::string problem = failure_of([&] {
        for (size_t rank = own.size(); rank < ranks.size(); ++rank)
          own.push_back(unpacked(ranks.get(rank).toTensor(), path).toGenericDict());
        std::vector<c10::IValue> states;
        for (const Dict& rank : own) {
          const auto found = rank.find(part.name);
          if (found == rank.end()) throw Error("is not in it");
          states.push_back(found->value());
        }
        part.part.load_from_ranks(states);
      });
      if (!problem.empty()) problems += "\n  `" + part.name + "`: " + problem;
    }
    if (is_main()) {
      TORCH_WARN("the checkpoint was saved by ", ranks.size(), " ranks: what each of them had of its own is not ",
                 "resumed on ", group.world_size(), ": ", left_out,
                 own.empty() ? "" : "; what communication hooks had not sent yet is shared out among the ranks");
    }
    return problems;
  }

  bool resume() {
    const OperationLabel label("resuming");
    std::string answer;  // the file's name; or "-" and what is wrong; or "" for nothing to resume
    if (is_main()) {
      const std::string problem = failure_of([&] {
        if (const auto manifest = newest_whole()) answer = manifest->file;
      });
      if (!problem.empty()) answer = "-" + problem;
    }
    answer = group.broadcast_bytes(answer);
    if (answer.empty()) return false;
    if (answer[0] == '-') throw RefusedInput("cannot resume: " + answer.substr(1));
    CheckpointManifest manifest;
    manifest.file = answer;
    const std::string path = folder.path_of(manifest);
    const auto problems = group.all_gather_bytes(load(path));
    std::string text;
    for (size_t rank = 0; rank < problems.size(); ++rank) {
      if (problems[rank].empty()) continue;
      const bool same = rank > 0 && problems[rank] == problems[0];
      text += "\n rank " + std::to_string(rank) + ": " + (same ? "the same as on rank 0" : problems[rank]);
    }
    if (!text.empty()) throw RefusedInput("cannot resume from " + path + ":" + text);
    last_step = resumed_step;
    last_save = Clock::now();
    if (is_main()) own_page().note_checkpoint(path, resumed_step, last_save);
    return true;
  }

  const Group group;
  const CheckpointerOptions options;
  std::vector<NamedPart> parts;
  std::vector<std::function<void()>> checks;  ///< before each save
  int64_t resumed_step = 0;
  int64_t last_step = 0;  ///< of the last save
  Clock::time_point last_save = Clock::now();
  int64_t next_question = 0;  ///< step at which rank 0 is asked for the time
  int64_t last_asked = 0;     ///< rank 0: step of the last question
  Clock::time_point last_question = Clock::now();

  // Rank 0's thread has these while it runs.
  CheckpointFolder folder;
  std::unique_ptr<ObjectWriter> snapshot;

  Mutex mutex;
  std::string last_problem LOCKSTEP_GUARDED_BY(mutex);  ///< of the last save

  std::thread writer;
};

Checkpointer::Checkpointer(std::string folder, Group group, CheckpointerOptions options) {
  TORCH_CHECK(!options.every_steps || *options.every_steps > 0, "Checkpointer: every_steps is ", *options.every_steps,
              "; it must be at least 1");
  TORCH_CHECK(!options.every_minutes || *options.every_minutes > 0, "Checkpointer: every_minutes is ",
              *options.every_minutes, "; it must be above 0");
  TORCH_CHECK(options.keep_last > 0 && options.keep_best >= 0,
              "Checkpointer: keep_last must be at least 1, keep_best 0");
  state_ = std::make_unique<State>(std::move(folder), std::move(group), options);
  state_->make_folder();
}

Checkpointer::~Checkpointer() = default;

Checkpointer& Checkpointer::add(const std::string& name, Part part, Scope scope) {
  TORCH_CHECK(name != kStep && name != kRanks && name != kRandom && name != kRandomCuda && !name.empty(),
              "Checkpointer: a part cannot be called `", name, "`");
  for (const auto& known : state_->parts)
    TORCH_CHECK(known.name != name, "Checkpointer: there is a part called `", name, "` already");
  state_->parts.push_back({name, std::move(part), scope});
  return *this;
}

Checkpointer& Checkpointer::add(const std::string& name, torch::nn::Module& module, Scope scope) {
  return add(name,
             Part{.save = [&module] { return to_object(state_dict(module)); },
                  .load = [&module](const c10::IValue& state) { load_state_dict(module, to_state_dict(state)); }},
             scope);
}

Checkpointer& Checkpointer::add(const std::string& name, torch::optim::Optimizer& optimizer, Scope scope) {
  return add(name,
             Part{.save = [&optimizer] { return optimizer_state_dict(optimizer); },
                  .load = [&optimizer](const c10::IValue& state) { load_optimizer_state_dict(optimizer, state); }},
             scope);
}

Checkpointer& Checkpointer::check_before_saves(std::function<void()> check) {
  state_->checks.push_back(std::move(check));
  return *this;
}

bool Checkpointer::resume() { return state_->resume(); }

int64_t Checkpointer::resumed_step() const { return state_->resumed_step; }

bool Checkpointer::step(int64_t step) {
  if (!state_->is_due(step)) return false;
  state_->save(step, {});
  return true;
}

void Checkpointer::save(int64_t step, std::optional<double> score) { state_->save(step, score); }

void Checkpointer::finish() {
  State& state = *state_;
  std::string problem;
  if (state.is_main()) {
    state.wait();
    const MutexLock lock(state.mutex);
    problem = state.last_problem;
  }
  problem = state.group.broadcast_bytes(problem);
  if (!problem.empty()) throw StorageError("the last checkpoint was not saved: " + problem);
}

}  // namespace lockstep
