#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/format/pickle_globals.h"
#include "checkpoint/format/pickle_tree.h"

namespace lockstep {

/// Makes the data that a pickle asks for by allowed globals; nothing is executed. Every failure throws Error.
class PickleCalls {
 public:
  explicit PickleCalls(PickleTree& tree) : tree_(tree) {}

  NodeId make(NodeKind kind);
  const Node& at(NodeId id) const { return tree_.nodes[id]; }
  /// Throws unless `id` is of `kind`. `what` names the expected kind in the message.
  const Node& expect(NodeId id, NodeKind kind, const char* what) const;
  Global global_at(NodeId id) const;

  NodeId call(Global global, const std::vector<NodeId>& arguments);
  /// The storage that a persistent id, the tuple `address`, refers to.
  NodeId storage(NodeId address);

 private:
  [[noreturn]] static void refuse(const std::string& what);
  void expect_arguments(const std::vector<NodeId>& arguments, size_t least, size_t most, const char* of) const;
  std::string_view own(std::string text);

  NodeId set_of(const std::vector<NodeId>& arguments);
  NodeId rebuilt_from_type(const std::vector<NodeId>& arguments);
  NodeId tensor(const std::vector<NodeId>& arguments, Global version);
  void check_bounds(const PickledTensor& tensor) const;
  void read_metadata(NodeId metadata, PickledTensor& tensor) const;
  NodeId with_gradient(NodeId tensor, NodeId requires_grad);
  NodeId encoded(const std::vector<NodeId>& arguments);
  NodeId numpy_scalar(const std::vector<NodeId>& arguments);

  PickleTree& tree_;
  std::unordered_map<std::string, uint32_t> storages_;  ///< by key
  std::unordered_map<NodeId, const Dtype*> typed_;      ///< dtypes of storage nodes; null for untyped ones
  uint64_t owned_bytes_ = 0;
};

}  // namespace lockstep
