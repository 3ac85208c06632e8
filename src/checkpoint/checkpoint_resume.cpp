#include "checkpoint/checkpoint_resume.h"

#include <ATen/core/List.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "base/error.h"
#include "base/text.h"
#include "base/weights_set.h"
#include "checkpoint/checkpoint_message.h"
#include "checkpoint/packed_object.h"
#include "checkpoint/random_states.h"
#include "collectives/group_state.h"

namespace lockstep {
namespace {

using Dict = c10::impl::GenericDict;
using List = c10::impl::GenericList;
using Scope = Checkpointer::Scope;

/// Some of those in a DiLoCo's state.
constexpr const char* kKeysOfDiLoCo[] = {"fragment_of", "place", "rounds_under_way"};

/// Called on rank 0: the newest intact checkpoint; none if there is no checkpoint at all.
std::optional<CheckpointManifest> newest_intact(const CheckpointFolder& folder) {
  std::string problems;
  for (const CheckpointManifest& manifest : folder.list()) {
    const std::string problem = failure_of([&] { folder.check(manifest); });
    if (problem.empty()) {
      if (!problems.empty()) {
        TORCH_WARN("resuming from an older checkpoint, ", manifest.file, ":", problems);
      }
      return manifest;
    }
    problems += "\n  " + problem;
  }
  if (!problems.empty()) throw RefusedInput("no checkpoint is intact:" + problems);
  return {};
}

std::string kind_of_value(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined())
    return c10::str("a tensor (", value.toTensor().scalar_type(), " ", value.toTensor().sizes(), ")");
  if (value.isList()) return "a list of " + std::to_string(value.toListRef().size());
  if (!value.isGenericDict()) return "a " + value.tagKind();
  std::string keys;
  for (const auto& item : value.toGenericDict()) {
    if (keys.size() > 60) return "a dictionary with" + keys + " and more";
    keys += item.key().isString() ? " `" + item.key().toStringRef() + "`" : " " + std::to_string(item.key().toInt());
  }
  return keys.empty() ? "an empty dictionary" : "a dictionary with" + keys;
}

/// Runs `load`, which may be the program's own and throw anything for an unexpected value, which LibTorch reports as
/// its own bug. Throws Error that describes the checkpoint's value.
void load_value(const c10::IValue& value, const std::function<void()>& load) {
  std::string problem;
  try {
    return load();
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& error) {
    problem = error.what_without_backtrace();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  if (problem.empty() || problem.find("INTERNAL ASSERT") != std::string::npos) problem = "it expects another type";
  throw Error("the checkpoint has " + kind_of_value(value) +
              " here, which the part's load() does not take: " + problem);
}

/// Whether it is a key of the file's own.
bool is_reserved(const std::string& name) {
  for (const char* key : {kStepKey, kRanksKey, kRandom, kRandomCuda, kRandomVirtual, kVirtualRanksKey, kThreadsKey,
                          kAccumulationKey, kRankZeroKey})
    if (name == key) return true;
  return false;
}

/// Whether a part is a DiLoCo's state.
bool is_of_diloco(const c10::IValue& value) {
  if (!value.isGenericDict()) return false;
  const Dict state = value.toGenericDict();
  return std::all_of(std::begin(kKeysOfDiLoCo), std::end(kKeysOfDiLoCo),
                     [&](const char* key) { return state.contains(key); });
}

/// Loads one rank's parts, and collects those that do not fit.
class PartLoader {
 public:
  PartLoader(const std::vector<CheckpointPart>& parts, const Group& group) : parts_(parts), group_(group) {}

  void load(const std::function<CheckpointImage()>& open);
  /// The step of the checkpoint.
  int64_t step() const { return step_; }
  const AccumulationCheck& accumulation() const { return accumulation_; }
  /// A line for each part that does not fit; "" if all do.
  const std::string& problems() const { return problems_; }
  /// After all ranks have loaded: warns of parts that only the checkpoint has.
  void tell_left_out() const;

 private:
  void check_virtual_ranks(const Dict& whole) const;
  void load_scope(const Dict& from, bool of_each_rank);
  void load_own(const CheckpointImage& image);
  /// Whether the ranks are where those were that saved, as far as parts can tell from this rank's state.
  bool fits_ranks(const Dict& own) const;
  void load_from_other_ranks(const CheckpointImage& image);
  void restore_virtual_states(const CheckpointImage& image) const;
  void load_from_ranks(const CheckpointPart& part, const std::vector<Dict>& ranks);
  /// Notes the parts that only the checkpoint has.
  void find_left_out(const Dict& all);
  /// Adds lines for the parts that the checkpoint lacks and, as they may explain it, for those that only it has.
  void tell_missing(const CheckpointImage& image);
  /// Records the error under the part's name if `body` throws.
  void try_part(const CheckpointPart& part, const std::function<void()>& body) {
    const std::string problem = failure_of(body);
    if (!problem.empty()) problems_ += "\n  `" + part.name + "`: " + problem;
  }
  static const c10::IValue& find(const CheckpointPart& part, const Dict& state) {
    const auto found = state.find(part.name);
    if (found == state.end()) throw Error("not in the checkpoint");
    return found->value();
  }

  const std::vector<CheckpointPart>& parts_;
  const Group& group_;
  const std::shared_ptr<VirtualRanks> virtual_ranks_ = state_of(group_).virtual_ranks;  ///< null: none
  int64_t step_ = 0;
  AccumulationCheck accumulation_;
  std::vector<const CheckpointPart*> missing_;
  std::set<std::string> left_out_;
  std::string problems_;
};

void PartLoader::load(const std::function<CheckpointImage()>& open) {
  problems_ += failure_of([&] {
    const CheckpointImage image = open();
    check_virtual_ranks(image.whole);
    load_scope(image.whole, /*of_each_rank=*/false);
    step_ = image.whole.at(kStepKey).toInt();
    accumulation_.note_resumed(image.whole, step_, parts_, group_);
    find_left_out(image.whole);
    load_own(image);
    tell_missing(image);
  });
}

/// What each rank has for itself.
void PartLoader::load_own(const CheckpointImage& image) {
  if (static_cast<int>(image.ranks) != group_.world_size()) return load_from_other_ranks(image);
  const Dict own = image.state_of_rank(static_cast<size_t>(group_.rank()));
  if (!fits_ranks(own)) {
    if (group_.rank() == 0)
      TORCH_WARN("the ranks are spread over the machines in another way than those that saved the checkpoint");
    return load_from_other_ranks(image);
  }
  find_left_out(own);
  load_scope(own, /*of_each_rank=*/true);
  virtual_ranks_ ? restore_virtual_states(image) : restore_random_states(own);
}

void PartLoader::tell_missing(const CheckpointImage& image) {
  if (missing_.empty()) return;
  Dict own = new_dict();
  if (image.ranks > 0)
    own = image.state_of_rank(std::min(static_cast<size_t>(group_.rank()), static_cast<size_t>(image.ranks) - 1));
  for (const CheckpointPart* part : missing_) {
    const bool of_each_rank = part->scope == Scope::kEachRank;
    std::string problem = "not in the checkpoint";
    if ((of_each_rank ? image.whole : own).contains(part->name))
      problem += of_each_rank ? " for each rank, but once for all ranks" : " once for all ranks, but for each rank";
    problems_ += "\n  `" + part->name + "`: " + problem;
  }
  find_left_out(own);
  for (const std::string& name : left_out_)
    problems_ += "\n  `" + name + "`: in the checkpoint, but not a part of this run";
}

void PartLoader::find_left_out(const Dict& all) {
  for (const auto& item : all) {
    const std::string& name = item.key().toStringRef();
    if (is_reserved(name) ||
        std::any_of(parts_.begin(), parts_.end(), [&](const auto& part) { return part.name == name; }))
      continue;
    if (left_out_.insert(name).second && is_of_diloco(item.value()))
      note_outer_copy_left_out(name);  // before other parts load
  }
}

void PartLoader::tell_left_out() const {
  std::string names;
  for (const std::string& name : left_out_) names += (names.empty() ? "`" : ", `") + name + "`";
  if (names.empty() || group_.rank() != 0) return;
  TORCH_WARN("the checkpoint has parts that this run does not resume: ", names,
             ". If the run needs them, add them to the Checkpointer under these names before resume()");
}

/// Called before anything is loaded: the bits of a run depend on both.
void PartLoader::check_virtual_ranks(const Dict& whole) const {
  const auto saved = [&](const char* key) { return whole.contains(key) ? whole.at(key).toInt() : 0; };
  const int64_t mine = virtual_ranks_ ? virtual_ranks_->count() : 0, theirs = saved(kVirtualRanksKey);
  const auto describe = [](int64_t count) {
    return count == 0 ? std::string("no virtual ranks") : std::to_string(count) + " virtual ranks";
  };
  if (mine != theirs)
    throw Error("the checkpoint was saved by a run with " + describe(theirs) + ", but this run has " + describe(mine) +
                "; set ContextOptions::virtual_ranks, or LOCKSTEP_VIRTUAL_RANKS, as in that run");
  if (mine != 0 && saved(kThreadsKey) != virtual_ranks_->threads())
    throw Error(
        "the checkpoint was saved by ranks with " + std::to_string(saved(kThreadsKey)) +
        " threads each, but these ranks have " + std::to_string(virtual_ranks_->threads()) +
        ", so the results would differ in their bits; set ContextOptions::threads, or OMP_NUM_THREADS, as in that run");
}

void PartLoader::restore_virtual_states(const CheckpointImage& image) const {
  std::vector<Dict> all;
  for (size_t rank = 0; rank < image.ranks; ++rank) all.push_back(image.state_of_rank(rank));
  restore_random_states(all, *virtual_ranks_);
}

void PartLoader::load_scope(const Dict& from, bool of_each_rank) {
  for (const CheckpointPart& part : parts_) {
    if ((part.scope == Scope::kEachRank) != of_each_rank) continue;
    if (!from.contains(part.name))
      missing_.push_back(&part);
    else
      try_part(part, [&] {
        const c10::IValue value = from.at(part.name);
        load_value(value, [&] { part.part.load(value); });
      });
  }
}

bool PartLoader::fits_ranks(const Dict& own) const {
  return std::all_of(parts_.begin(), parts_.end(), [&](const CheckpointPart& part) {
    if (part.scope != Scope::kEachRank || !part.part.fits_ranks || !own.contains(part.name)) return true;
    bool fits = true;  // also for a state that cannot be read: its part says why when it loads it
    (void)failure_of([&] { fits = part.part.fits_ranks(own.at(part.name)); });
    return fits;
  });
}

/// For a checkpoint of different ranks: only parts that can redistribute their states are resumed.
void PartLoader::load_from_other_ranks(const CheckpointImage& image) {
  std::string left_out = virtual_ranks_ ? "" : "random states", went_on;
  if (virtual_ranks_) restore_virtual_states(image);
  std::vector<Dict> own;
  if (image.ranks > 0) find_left_out(own.emplace_back(image.state_of_rank(0)));
  for (const CheckpointPart& part : parts_) {
    if (part.scope != Scope::kEachRank) continue;
    std::string& names = part.part.load_from_ranks ? went_on : left_out;
    names += (names.empty() ? "`" : ", `") + part.name + "`";
    if (!part.part.load_from_ranks) continue;
    try_part(part, [&] {
      while (own.size() < image.ranks) own.push_back(image.state_of_rank(own.size()));
      load_from_ranks(part, own);
    });
  }
  if (group_.rank() != 0 || left_out.empty()) return;
  TORCH_WARN("the checkpoint was saved by ", counted(static_cast<int64_t>(image.ranks), "rank", "ranks"),
             " and is resumed on ", group_.world_size(), ". Not resumed is each rank's own state of: ", left_out,
             went_on.empty() ? "" : ". Resumed from the states of all ranks that saved: " + went_on,
             went_on.empty() ? "" : "; a DiLoCo among them sets its model's parameters, too");
}

void PartLoader::load_from_ranks(const CheckpointPart& part, const std::vector<Dict>& ranks) {
  std::vector<c10::IValue> states;
  for (const Dict& rank : ranks) states.push_back(find(part, rank));
  if (!states.empty()) load_value(states.front(), [&] { part.part.load_from_ranks(states); });
}

CheckpointImage image_of_file(const std::string& path) {
  CheckpointImage image;
  image.whole = load_object(path, {.mmap = true}).toGenericDict();
  const List ranks = image.whole.at(kRanksKey).toList();
  image.ranks = ranks.size();
  image.state_of_rank = [ranks, path](size_t rank) {
    return unpacked(ranks.get(rank).toTensor(), path).toGenericDict();
  };
  return image;
}

/// Rank 0's choice.
struct Choice {
  std::string file;          ///< in the folder; empty: none
  uint64_t sequence = 0;     ///< of the checkpoint in memory, which has precedence; 0: none
  int64_t step_on_disk = 0;  ///< of the newest in the folder

  CheckpointMessage message() const {
    return {.steps = static_cast<int64_t>(sequence), .step_on_disk = step_on_disk, .text = file};
  }
  static Choice of(const CheckpointMessage& message) {
    return {
        .file = message.text, .sequence = static_cast<uint64_t>(message.steps), .step_on_disk = message.step_on_disk};
  }
};

/// On rank 0: chooses memory, unless the folder has a newer intact checkpoint.
Choice choose(const CheckpointFolder& folder, const std::optional<WholeSlot>& in_memory) {
  Choice choice;
  for (const CheckpointManifest& manifest : folder.list())
    choice.step_on_disk = std::max(choice.step_on_disk, manifest.step);
  if (in_memory) choice.sequence = in_memory->sequence;
  if (in_memory && choice.step_on_disk <= in_memory->header.step) return choice;
  std::optional<CheckpointManifest> on_disk;
  const std::string problem = failure_of([&] { on_disk = newest_intact(folder); });
  if (!problem.empty() && !in_memory) throw RefusedInput(problem);
  if (on_disk && (!in_memory || on_disk->step > in_memory->header.step)) {
    choice.sequence = 0;
    choice.file = on_disk->file;
  }
  return choice;
}

/// Returns the choice, equal on all ranks.
Choice agree(const CheckpointFolder& folder, const MemoryTier* memory, const Group& group) {
  // A rank may still be writing its part of the last save, which counts only when all ranks have.
  if (memory != nullptr) group.barrier();
  const auto in_memory = memory != nullptr ? memory->newest_intact() : std::nullopt;
  CheckpointMessage chosen;
  if (group.rank() == 0)
    chosen = attempt([&](CheckpointMessage& message) { message = choose(folder, in_memory).message(); });
  chosen = CheckpointMessage::decode(group.broadcast_bytes(chosen.encode()), 0);
  if (chosen.outcome == CheckpointMessage::Outcome::kFailed) throw RefusedInput("cannot resume: " + chosen.text);
  return Choice::of(chosen);
}

}  // namespace

std::optional<ResumedCheckpoint> resume_parts(const std::vector<CheckpointPart>& parts, const CheckpointFolder& folder,
                                              const MemoryTier* memory, const Group& group) {
  const Choice choice = agree(folder, memory, group);
  if (choice.file.empty() && choice.sequence == 0) return {};
  CheckpointManifest manifest;
  manifest.file = choice.file;
  const bool from_memory = choice.sequence != 0;
  ResumedCheckpoint resumed{.path = from_memory ? "" : folder.path_of(manifest)};
  PartLoader loader(parts, group);
  CheckpointImage in_memory;
  if (from_memory) in_memory = memory->image(choice.sequence, parts);
  loader.load([&] { return from_memory ? std::move(in_memory) : image_of_file(resumed.path); });
  resumed.step = loader.step();
  resumed.accumulation = loader.accumulation();
  resumed.step_on_disk = from_memory ? choice.step_on_disk : resumed.step;
  const auto problems = group.all_gather_bytes(loader.problems());  // no rank reads memory after this
  std::string text;
  for (size_t rank = 0; rank < problems.size(); ++rank) {
    if (problems[rank].empty()) continue;
    const bool same = rank > 0 && problems[rank] == problems[0];
    text += "\n rank " + std::to_string(rank) + ": " + (same ? "the same as on rank 0" : problems[rank]);
  }
  const std::string name = from_memory ? "the checkpoint in memory" : resumed.path;
  if (!text.empty()) throw RefusedInput("cannot resume from " + name + ":" + text);
  loader.tell_left_out();
  return resumed;
}

}  // namespace lockstep
