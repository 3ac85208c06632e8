#include "checkpoint/checkpoint_resume.h"

#include <ATen/core/List.h>

#include "base/error.h"
#include "checkpoint/checkpoint_message.h"
#include "checkpoint/packed_object.h"
#include "checkpoint/random_states.h"

namespace lockstep {
namespace {

using Dict = c10::impl::GenericDict;
using List = c10::impl::GenericList;
using Scope = Checkpointer::Scope;

/// Rank 0: the newest intact one; none where there is no checkpoint at all.
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

/// Loads one rank's parts, and collects what does not fit.
class PartLoader {
 public:
  PartLoader(const std::vector<CheckpointPart>& parts, std::string path, const Group& group)
      : parts_(parts), path_(std::move(path)), group_(group) {}

  /// The step of the checkpoint.
  int64_t load();
  /// A line for each part that does not fit; "" if all do.
  const std::string& problems() const { return problems_; }

 private:
  void load_scope(const Dict& from, bool of_each_rank);
  void load_from_other_ranks(const List& ranks);
  void load_from_ranks(const CheckpointPart& part, const std::vector<Dict>& ranks);
  Dict state_of_rank(const List& ranks, size_t rank) const {
    return unpacked(ranks.get(rank).toTensor(), path_).toGenericDict();
  }
  /// Notes it under the part's name if `body` throws.
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
  const std::string path_;
  const Group& group_;
  std::string problems_;
};

int64_t PartLoader::load() {
  int64_t step = 0;
  problems_ += failure_of([&] {
    const Dict whole = load_object(path_, {.mmap = true}).toGenericDict();
    load_scope(whole, /*of_each_rank=*/false);
    step = whole.at(kStepKey).toInt();
    const List ranks = whole.at(kRanksKey).toList();
    if (static_cast<int>(ranks.size()) != group_.world_size()) return load_from_other_ranks(ranks);
    const Dict own = state_of_rank(ranks, static_cast<size_t>(group_.rank()));
    load_scope(own, /*of_each_rank=*/true);
    restore_random_states(own);
  });
  return step;
}

void PartLoader::load_scope(const Dict& from, bool of_each_rank) {
  for (const CheckpointPart& part : parts_)
    if ((part.scope == Scope::kEachRank) == of_each_rank) try_part(part, [&] { part.part.load(find(part, from)); });
}

/// The checkpoint is of another number of ranks: only parts that know how to share out their states are resumed.
void PartLoader::load_from_other_ranks(const List& ranks) {
  std::string left_out = "random states";
  std::vector<Dict> own;
  for (const CheckpointPart& part : parts_) {
    if (part.scope != Scope::kEachRank) continue;
    if (!part.part.load_from_ranks) {
      left_out += ", `" + part.name + "`";
      continue;
    }
    try_part(part, [&] {
      while (own.size() < ranks.size()) own.push_back(state_of_rank(ranks, own.size()));
      load_from_ranks(part, own);
    });
  }
  if (group_.rank() != 0) return;
  TORCH_WARN("the checkpoint was saved by ", ranks.size(), " ranks and is resumed on ", group_.world_size(),
             ": what each rank had of its own is left out: ", left_out,
             own.empty() ? "" : "; what communication hooks had not sent yet is shared out among the ranks");
}

void PartLoader::load_from_ranks(const CheckpointPart& part, const std::vector<Dict>& ranks) {
  std::vector<c10::IValue> states;
  for (const Dict& rank : ranks) states.push_back(find(part, rank));
  part.part.load_from_ranks(states);
}

/// The file of the newest intact checkpoint, the same on all ranks; "" where there is no checkpoint.
std::string agree_on_file(const CheckpointFolder& folder, const Group& group) {
  CheckpointMessage chosen;
  if (group.rank() == 0)
    chosen = attempt([&](CheckpointMessage& message) {
      if (const auto manifest = newest_intact(folder))
        message.text = manifest->file;
      else
        message.outcome = CheckpointMessage::Outcome::kNothing;
    });
  chosen = CheckpointMessage::decode(group.broadcast_bytes(chosen.encode()), 0);
  if (chosen.outcome == CheckpointMessage::Outcome::kFailed) throw RefusedInput("cannot resume: " + chosen.text);
  return chosen.text;
}

}  // namespace

std::optional<ResumedCheckpoint> resume_parts(const std::vector<CheckpointPart>& parts, const CheckpointFolder& folder,
                                              const Group& group) {
  CheckpointManifest manifest;
  manifest.file = agree_on_file(folder, group);
  if (manifest.file.empty()) return {};
  ResumedCheckpoint resumed{.path = folder.path_of(manifest)};
  PartLoader loader(parts, resumed.path, group);
  resumed.step = loader.load();
  const auto problems = group.all_gather_bytes(loader.problems());
  std::string text;
  for (size_t rank = 0; rank < problems.size(); ++rank) {
    if (problems[rank].empty()) continue;
    const bool same = rank > 0 && problems[rank] == problems[0];
    text += "\n rank " + std::to_string(rank) + ": " + (same ? "the same as on rank 0" : problems[rank]);
  }
  if (!text.empty()) throw RefusedInput("cannot resume from " + resumed.path + ":" + text);
  return resumed;
}

}  // namespace lockstep
