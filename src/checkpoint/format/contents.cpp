#include "checkpoint/format/contents.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "checkpoint/format/names.h"

namespace lockstep {

bool is_pt_file(const FileSource& source) {
  char start[2] = {};
  if (source.size() >= sizeof start) source.read(0, start, sizeof start);
  return (start[0] == 'P' && start[1] == 'K') || source.name().ends_with(".pt") || source.name().ends_with(".pth");
}

std::string text_of(const PickleTree& tree, const Node& node) {
  const auto number = [](double value) { return nlohmann::json(value).dump(); };
  switch (node.kind) {
    case NodeKind::kNone:
      return "null";
    case NodeKind::kBool:
      return node.integer != 0 ? "true" : "false";
    case NodeKind::kInt:
      return std::to_string(node.integer);
    case NodeKind::kReal:
      return number(node.real);
    case NodeKind::kComplex:
      return '[' + number(tree[node.items[0]].real) + ',' + number(tree[node.items[1]].real) + ']';
    case NodeKind::kDtype:
      return "torch." + std::string(node.text);
    case NodeKind::kText:
    case NodeKind::kBytes:
      return std::string(node.text);
    default:
      throw RefusedInput("something in it is not data");
  }
}

Contents::Contents(const std::string& path) : source_(path) {
  if (is_pt_file(source_))
    list_pt();
  else
    list_safetensors();
}

void Contents::list_pt() {
  pt_ = std::make_unique<PtFile>(source_);
  const PickleTree& tree = pt_->tree();
  try {
    std::vector<Leaf> leaves = leaves_of(tree);
    if (const std::string* name = name_given_twice(leaves))
      throw RefusedInput("two things in it are called `" + *name + "` when keys are joined by dots");
    for (Leaf& leaf : leaves) {
      const Node& node = tree[leaf.node];
      if (node.kind != NodeKind::kTensor) {
        texts_.emplace(std::move(leaf.name), text_of(tree, node));
        continue;
      }
      const PickledTensor& tensor = tree.tensors[static_cast<size_t>(node.integer)];
      tensors_.push_back({.name = std::move(leaf.name),
                          .dtype = tensor.dtype,
                          .shape = tree.numbers(tensor.sizes),
                          .begin = 0,
                          .end = bytes_of(tree, tensor),
                          .storage = tensor.storage});
      pickled_.push_back(&tensor);
    }
  } catch (const Error& error) {
    source_.refuse(error.what());
  }
}

void Contents::list_safetensors() {
  safetensors_ = std::make_unique<SafetensorsFile>(source_);
  tensors_ = std::move(safetensors_->header().entries);
  texts_ = std::move(safetensors_->header().metadata);
}

Contents::Storages Contents::storages() const {
  Storages sum;
  std::vector<bool> seen(is_pt() ? pt_->tree().storages.size() : tensors_.size());
  for (const TensorEntry& tensor : tensors_) {
    if (seen[tensor.storage]) continue;
    seen[tensor.storage] = true;
    ++sum.count;
    sum.bytes += is_pt() ? pt_->storage_bytes(tensor.storage) : tensor.bytes();
  }
  return sum;
}

void Contents::read(size_t tensor, const std::function<void(const char*, uint64_t)>& take) const {
  const TensorEntry& entry = tensors_[tensor];
  if (in_memory_ != entry.storage) {
    in_memory_ = static_cast<size_t>(-1);
    memory_.resize(is_pt() ? pt_->storage_bytes(entry.storage) : entry.bytes());
    if (is_pt())
      pt_->read_storage(entry.storage, memory_.data());
    else
      safetensors_->read(entry, memory_.data());
    in_memory_ = entry.storage;
  }
  if (!is_pt()) return take(memory_.data(), memory_.size());
  const PickledTensor& pickled = *pickled_[tensor];
  if (pickled.conj || pickled.neg)
    source_.refuse("`" + entry.name + "` is kept as the conjugate or negative of its values; resolve it in Python " +
                   "first (tensor.resolve_conj().resolve_neg())");
  for_each_run(pt_->tree(), pickled, memory_.data(), take);
}

}  // namespace lockstep
