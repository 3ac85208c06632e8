#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/format/pickle_globals.h"
#include "checkpoint/format/pickle_tree.h"

namespace lockstep {

/// The stack and memory of the pickle machine, and the evaluation of allowed globals. Every failure throws Error; the
/// reader adds the position.
class PickleMachine {
 public:
  explicit PickleMachine(PickleTree& tree) : tree_(tree) {}

  // The parts of opcodes.
  NodeId make(NodeKind kind);
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
  const Node& at(NodeId id) const { return tree_.nodes[id]; }
  /// Throws unless `id` is of `kind`. `what` names the expected kind in the message.
  const Node& expect(NodeId id, NodeKind kind, const char* what) const;
  void expect_arguments(const std::vector<NodeId>& arguments, size_t least, size_t most, const char* of) const;
  Global global_at(NodeId id) const;
  std::string_view own(std::string text);

  NodeId call(Global global, const std::vector<NodeId>& arguments);
  NodeId set_of(const std::vector<NodeId>& arguments);
  NodeId rebuilt_from_type(const std::vector<NodeId>& arguments);
  NodeId tensor(const std::vector<NodeId>& arguments, Global version);
  void check_bounds(const PickledTensor& tensor) const;
  void read_metadata(NodeId metadata, PickledTensor& tensor) const;
  NodeId with_gradient(NodeId tensor, NodeId requires_grad);
  NodeId encoded(const std::vector<NodeId>& arguments);
  NodeId numpy_scalar(const std::vector<NodeId>& arguments);

  PickleTree& tree_;
  std::vector<NodeId> stack_;
  std::unordered_map<uint64_t, NodeId> memory_;
  std::unordered_map<std::string, uint32_t> storages_;  ///< by key
  std::unordered_map<NodeId, const Dtype*> typed_;      ///< dtypes of storage nodes; null for untyped ones
  uint64_t owned_bytes_ = 0;
};

}  // namespace lockstep
