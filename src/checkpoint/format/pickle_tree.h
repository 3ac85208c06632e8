#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/dtype.h"

namespace lockstep {

/// An index into PickleTree::nodes.
using NodeId = uint32_t;

enum class NodeKind : uint8_t {
  kNone,
  kBool,     ///< `integer`
  kInt,      ///< `integer`
  kReal,     ///< `real`
  kComplex,  ///< `items`: real and imaginary part
  kText,
  kBytes,
  kTuple,
  kList,
  kSet,
  kDict,     ///< `items`: key, value, key, value ...
  kDtype,    ///< a torch.dtype; `text`: its name
  kStorage,  ///< `integer`: its index in `storages`
  kTensor,   ///< `integer`: its index in `tensors`
  // Only while a tensor or a number is being made:
  kGlobal,      ///< `integer`: the allowed global
  kNumpyDtype,  ///< `text`: such as "f8"
  kMark,
};

struct Node {
  NodeKind kind = NodeKind::kNone;
  union {
    int64_t integer = 0;
    double real;
  };
  std::string_view text;  ///< into the pickle, which the tree keeps
  std::vector<NodeId> items;
};

/// The bytes that tensors occupy; several tensors may share them.
struct PickledStorage {
  std::string key;  ///< the entry data/<key> of the archive
  uint64_t bytes;
};

/// A strided view of a storage, checked to be within its bounds.
struct PickledTensor {
  uint32_t storage;  ///< its index in `storages`
  const Dtype* dtype;
  int64_t offset;         ///< in elements
  NodeId sizes, strides;  ///< tuples of non-negative integers, of equal length
  bool requires_grad = false;
  bool conj = false;  ///< the stored values are the conjugates of the tensor's
  bool neg = false;   ///< the stored values are the negatives of the tensor's
};

/// The content of a pickle as data: nothing in it is ever executed. Nodes refer to each other by index, so for any
/// file, freeing a tree needs no recursion and cycles leak nothing. A node may be reachable by several paths.
struct PickleTree {
  explicit PickleTree(std::string pickle_) : pickle(std::move(pickle_)) {}
  PickleTree(const PickleTree&) = delete;  // nodes point into `pickle`
  PickleTree& operator=(const PickleTree&) = delete;

  const Node& operator[](NodeId id) const { return nodes[id]; }
  std::vector<int64_t> numbers(NodeId tuple) const {
    std::vector<int64_t> result;
    for (NodeId item : nodes[tuple].items) result.push_back(nodes[item].integer);
    return result;
  }

  const std::string pickle;
  std::vector<Node> nodes;
  std::vector<PickledStorage> storages;
  std::vector<PickledTensor> tensors;
  std::deque<std::string> owned;  ///< strings that do not occur verbatim in the pickle
  NodeId root = 0;
};

/// Limits of a pickle's bytes and of the nodes made from it: some 300,000 tensors.
constexpr uint64_t kMaxPickleBytes = 64 << 20;
constexpr size_t kMaxPickleNodes = 8 << 20;

/// Reads the output of torch.save, in Python's pickle protocols 2 to 5. Only listed opcodes and globals are allowed:
/// tensors, storages, dtypes, containers, numbers, strings, and NumPy's scalars. Everything else is refused by name,
/// and nothing is ever called. Fills `tree` from its pickle. Throws Error with the byte's position, without a file
/// name.
void read_pickle(PickleTree& tree);

}  // namespace lockstep
