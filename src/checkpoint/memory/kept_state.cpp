#include "checkpoint/memory/kept_state.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/state_memory.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/pickle_writer.h"
#include "checkpoint/format/pt_file.h"
#include "checkpoint/memory/memory_slots.h"
#include "checkpoint/memory/slot_source.h"

// A state in memory is several .pt files: the state common to all ranks, and each rank's own (memory_tier.h). A
// checkpoint on disk is one .pt file. This file converts the former to the latter without torch: pickles are read as
// trees and rewritten, and the bytes of tensors are copied unchanged.

namespace lockstep {
namespace {

constexpr uint64_t kPiece = 16 << 20;  // copied at a time
constexpr int kDeepest = 200;

/// The launcher's own memory, when no other process uses it.
class LeftMemory final : public SlotMemory {
 public:
  explicit LeftMemory(int fd) : fd_(fd) {}
  uint64_t load(uint64_t offset) const override {
    uint64_t word = 0;
    read(offset, &word, sizeof word);
    return word;
  }
  void read(uint64_t offset, void* to, uint64_t bytes) const override {
    for (auto* place = static_cast<char*>(to); bytes > 0;) {
      const ssize_t done = ::pread(fd_, place, bytes, static_cast<off_t>(offset));
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) throw_errno("reading a state in memory");
      place += done;
      offset += static_cast<uint64_t>(done);
      bytes -= static_cast<uint64_t>(done);
    }
  }
  void store(uint64_t, uint64_t) override { throw Error("the memory of a run that has ended is read-only"); }
  void write(uint64_t, const void*, uint64_t) override { store(0, 0); }

 private:
  const int fd_;
};

/// An open .pt file in memory.
struct OpenImage {
  OpenImage(const std::string& name, const SlotMemory& memory, uint64_t offset, uint64_t bytes)
      : source(name, memory, offset, bytes), file(source) {}
  const PickleTree& tree() const { return file.tree(); }
  const Node& root() const { return tree()[tree().root]; }

  const SlotSource source;
  const PtFile file;
};

bool has_name(const PickleTree& tree, NodeId key, std::string_view name) {
  return tree[key].kind == NodeKind::kText && tree[key].text == name;
}

/// Null if the dictionary has no such key.
const Node* find(const PickleTree& tree, const Node& dict, std::string_view name) {
  if (dict.kind != NodeKind::kDict) return nullptr;
  for (size_t i = 0; i + 1 < dict.items.size(); i += 2)
    if (has_name(tree, dict.items[i], name)) return &tree[dict.items[i + 1]];
  return nullptr;
}

const Node& entry(const PickleTree& tree, const Node& dict, std::string_view name) {
  const Node* found = find(tree, dict, name);
  if (found == nullptr) throw Error("a state in memory has no `" + std::string(name) + "`");
  return *found;
}

/// A new .pt file of values that lie in other files.
/// REQUIRES: the other files outlive it.
class Collector {
 public:
  PickleWriter& pickle() { return pickle_; }
  void add(const OpenImage& from, const Node& node, int depth = 0);
  /// A uint8 tensor of these bytes.
  void add_bytes(std::string bytes);
  void write(ByteSink& sink, const std::string& name);

 private:
  struct Storage {
    const OpenImage* from;  ///< null: the bytes are in `bytes`
    size_t number;
    std::string bytes;
    uint64_t size() const { return from != nullptr ? from->file.storage_bytes(number) : bytes.size(); }
  };
  void add_tensor(const OpenImage& from, const PickledTensor& tensor);

  PickleWriter pickle_;
  std::deque<Storage> storages_;
  std::map<std::pair<const OpenImage*, size_t>, size_t> places_;
};

void Collector::add(const OpenImage& from, const Node& node, int depth) {
  if (depth > kDeepest) throw Error("a state in memory is nested too deeply");
  const PickleTree& tree = from.tree();
  const auto add_items = [&] {
    for (const NodeId item : node.items) add(from, tree[item], depth + 1);
  };
  switch (node.kind) {
    case NodeKind::kNone:
      return pickle_.none();
    case NodeKind::kBool:
      return pickle_.boolean(node.integer != 0);
    case NodeKind::kInt:
      return pickle_.integer(node.integer);
    case NodeKind::kReal:
      return pickle_.real(node.real);
    case NodeKind::kText:
      return pickle_.text(node.text);
    case NodeKind::kTuple:
      pickle_.begin_tuple();
      add_items();
      return pickle_.end_tuple();
    case NodeKind::kList:
      pickle_.begin_list();
      add_items();
      return pickle_.end_list();
    case NodeKind::kDict:
      pickle_.begin_dict();
      add_items();
      return pickle_.end_dict();
    case NodeKind::kTensor:
      return add_tensor(from, tree.tensors[static_cast<size_t>(node.integer)]);
    default:
      throw Error("a state in memory contains an object that no Checkpointer writes");
  }
}

void Collector::add_tensor(const OpenImage& from, const PickledTensor& tensor) {
  const auto [place, is_new] = places_.emplace(std::pair(&from, size_t{tensor.storage}), storages_.size());
  if (is_new) storages_.push_back({&from, tensor.storage, {}});
  pickle_.tensor({.dtype = tensor.dtype,
                  .storage = std::to_string(place->second),
                  .storage_bytes = storages_[place->second].size(),
                  .offset = tensor.offset,
                  .sizes = from.tree().numbers(tensor.sizes),
                  .strides = from.tree().numbers(tensor.strides),
                  .requires_grad = tensor.requires_grad});
}

void Collector::add_bytes(std::string bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  pickle_.tensor({.dtype = dtype_of_name("uint8"),
                  .storage = std::to_string(storages_.size()),
                  .storage_bytes = bytes.size(),
                  .offset = 0,
                  .sizes = {size},
                  .strides = {1}});
  storages_.push_back({nullptr, 0, std::move(bytes)});
}

void Collector::write(ByteSink& sink, const std::string& name) {
  PtWriter writer(sink, name, pickle_.finish());
  std::string piece;
  for (size_t i = 0; i < storages_.size(); ++i) {
    const Storage& storage = storages_[i];
    writer.begin_storage(std::to_string(i), storage.size());
    if (storage.from == nullptr) writer.append(storage.bytes.data(), storage.bytes.size());
    for (uint64_t done = 0; storage.from != nullptr && done < storage.size(); done += piece.size()) {
      piece.resize(std::min(kPiece, storage.size() - done));
      storage.from->source.read(storage.from->file.storage_offset(storage.number) + done, piece.data(), piece.size());
      writer.append(piece.data(), piece.size());
    }
    writer.end_storage();
  }
  writer.finish();
}

struct MemorySink : ByteSink {
  void write(const void* data, size_t size) override { bytes.append(static_cast<const char*>(data), size); }
  std::string bytes;
};

/// A rank's own state in the form of a checkpoint file.
std::string own_state(const OpenImage& own) {
  Collector collector;
  collector.add(own, entry(own.tree(), own.root(), kRanksKey));
  MemorySink sink;
  collector.write(sink, "rank");
  return std::move(sink.bytes);
}

/// Adds the keys and values of `dict` whose keys `known` lacks.
void add_items(Collector& collector, const OpenImage& from, const Node& dict, const OpenImage* other = nullptr,
               const Node* known = nullptr) {
  const PickleTree& tree = from.tree();
  for (size_t i = 0; i + 1 < dict.items.size(); i += 2) {
    const Node& key = tree[dict.items[i]];
    if (known != nullptr && key.kind == NodeKind::kText && find(other->tree(), *known, key.text) != nullptr) continue;
    collector.add(from, key);
    collector.add(from, tree[dict.items[i + 1]]);
  }
}

/// Adds the parts with one state; parts of which rank 0 has more than the ranks' common state follow.
void add_parts(Collector& collector, const OpenImage& common, const OpenImage& of_rank_zero) {
  const PickleTree& tree = common.tree();
  const Node &parts = common.root(), &rest = entry(of_rank_zero.tree(), of_rank_zero.root(), kRankZeroKey);
  for (size_t i = 0; i + 1 < parts.items.size(); i += 2) {
    const Node &key = tree[parts.items[i]], &value = tree[parts.items[i + 1]];
    const Node* more = key.kind == NodeKind::kText ? find(of_rank_zero.tree(), rest, key.text) : nullptr;
    collector.add(common, key);
    if (more == nullptr || value.kind != NodeKind::kDict || more->kind != NodeKind::kDict) {
      collector.add(common, value);
      continue;
    }
    collector.pickle().begin_dict();
    add_items(collector, common, value);
    add_items(collector, of_rank_zero, *more, &common, &value);
    collector.pickle().end_dict();
  }
  add_items(collector, of_rank_zero, rest, &common, &parts);
}

class State {
 public:
  State(const SlotMemory& memory, const WholeSlot& slot) : step_(slot.header.step) {
    const auto open = [&](const std::string& what, uint64_t offset, uint64_t bytes) {
      images_.emplace_back("the state in memory of step " + std::to_string(step_) + ", " + what, memory, offset, bytes);
    };
    open("the part that ranks share", StateMemory::common_at(slot.slot), slot.header.common_bytes);
    for (int rank = 0; rank < slot.world_size(); ++rank)
      open("the part of rank " + std::to_string(rank), StateMemory::own_at(slot.slot, rank),
           slot.own_bytes[static_cast<size_t>(rank)]);
  }

  CheckpointManifest write_to(CheckpointFolder& folder) const {
    return folder.add(step_, {}, static_cast<int>(images_.size()) - 1, [&](ByteSink& sink) {
      Collector whole;
      whole.pickle().begin_dict();
      add_parts(whole, images_[0], images_[1]);
      whole.pickle().text(kRanksKey);
      whole.pickle().begin_list();
      for (size_t rank = 1; rank < images_.size(); ++rank) whole.add_bytes(own_state(images_[rank]));
      whole.pickle().end_list();
      whole.pickle().end_dict();
      whole.write(sink, "checkpoint");
    });
  }

 private:
  const int64_t step_;
  std::deque<OpenImage> images_;
};

/// A machine of several has all slices of a state only if it has both copies of what lies in slices.
void check_slices(const WholeSlot& slot) {
  if (slot.has_all_slices()) return;
  std::string ranks;
  for (size_t rank = 0; rank < slot.sliced.size(); ++rank)
    if (slot.sliced[rank]) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  throw Error(
      "this machine holds the slices of " + (ranks.empty() ? "no rank" : "ranks " + ranks + " alone") + ", of " +
      std::to_string(slot.world_size()) +
      ", and one machine writes a checkpoint. The next run resumes the newest checkpoint on disk, so save there as "
      "well (every_minutes)");
}

/// Empty: it cannot be read, and `problem` says why.
std::optional<State> open_state(const SlotMemory& memory, const WholeSlot& slot, std::string& problem) {
  try {
    check_slices(slot);
    return std::optional<State>(std::in_place, memory, slot);
  } catch (const std::exception& error) {
    problem = error.what();
    return {};
  }
}

/// Agents of machines that share a file system and have lost their coordinator arrive at once; one writes.
constexpr std::chrono::seconds kOthersSave(20);

/// Whether the folder has a checkpoint that is as new.
bool is_kept_in(const CheckpointFolder& folder, KeptState& kept) {
  const auto there = folder.list();
  if (there.empty() || there.front().step < kept.step) return false;
  kept.path = folder.path_of(there.front());
  kept.path_step = there.front().step;
  return true;
}

/// Returns false if it fails; `problem` then says why.
bool keep_in(const std::string& path, const State& state, KeptState& kept) {
  try {
    CheckpointFolder folder(path);
    if (is_kept_in(folder, kept)) return true;
    folder.hold(kOthersSave);
    if (is_kept_in(folder, kept)) return true;
    kept.path = folder.path_of(state.write_to(folder));
    kept.path_step = kept.step;
    kept.written = true;
    return true;
  } catch (const std::exception& error) {
    kept.problem += (kept.problem.empty() ? "" : "; ") + std::string(error.what());
    return false;
  }
}

}  // namespace

int64_t newest_step_in_memory(int memory) {
  try {
    if (!StateMemory::is(memory)) return -1;
    const auto slots = whole_slots(LeftMemory(memory));
    return slots.empty() ? -1 : slots.front().header.step;
  } catch (const std::exception&) {
    return -1;
  }
}

KeptState keep_state(int memory, const std::string& other_folder, bool is_sound) {
  KeptState kept;
  try {
    if (!StateMemory::is(memory)) return kept;
    const LeftMemory left(memory);
    for (const WholeSlot& slot : whole_slots(left)) {
      kept.step = std::max(kept.step, slot.header.step);
      const auto state = open_state(left, slot, kept.problem);
      if (!state) continue;
      kept.step = slot.header.step;
      const std::string folder = place_of(left, slot.header.owner);
      if (folder.empty()) kept.problem = "its Checkpointer has not named a folder yet";
      if (!is_sound)
        kept.problem =
            "the replicas had diverged or a value was not finite, so inspect the state before you resume from it";
      if (is_sound && !folder.empty() && keep_in(folder, *state, kept)) return kept;
      if (!other_folder.empty()) keep_in(other_folder, *state, kept);
      return kept;
    }
  } catch (const std::exception& error) {
    kept.problem = error.what();
  }
  return kept;
}

}  // namespace lockstep
