#pragma once

#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/format/pickle_calls.h"
#include "checkpoint/format/pickle_tree.h"

namespace lockstep {

/// The stack and memory of the pickle machine. Every failure throws Error; the reader adds the position.
class PickleMachine {
 public:
  explicit PickleMachine(PickleTree& tree) : tree_(tree), calls_(tree) {}

  // The parts of opcodes.
  void push(NodeId id) { stack_.push_back(id); }
  NodeId push_new(NodeKind kind);
  void push_int(int64_t value) { tree_.nodes[push_new(NodeKind::kInt)].integer = value; }
  void push_text(NodeKind kind, std::string_view text) { tree_.nodes[push_new(kind)].text = text; }
  NodeId pop();
  NodeId top() const;
  /// Pops the last mark and returns everything pushed since.
  std::vector<NodeId> pop_to_mark();
  void push_tuple(std::vector<NodeId> items);
  void remember(uint64_t place);
  void remember_next() { remember(memory_.size()); }
  void recall(uint64_t place);

  // The opcodes that need more than one line.
  void global(std::string_view module, std::string_view name);
  void add_to_list(const std::vector<NodeId>& items);
  void add_to_set(const std::vector<NodeId>& items);
  void add_to_dict(const std::vector<NodeId>& items);
  void load_storage();
  void reduce();
  void build();
  NodeId finish();

 private:
  PickleTree& tree_;
  PickleCalls calls_;
  std::vector<NodeId> stack_;
  std::unordered_map<uint64_t, NodeId> memory_;
};

}  // namespace lockstep
