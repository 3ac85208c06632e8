#include "checkpoint/format/contents.h"

#include <algorithm>
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
      throw RefusedInput("it contains something other than data");
  }
}

namespace {

/// Numbers later leaves whose name has occurred before.
void number_names(std::vector<Leaf>& leaves) {
  std::map<std::string, int> seen;
  for (const Leaf& leaf : leaves) ++seen[leaf.name];
  std::map<std::string, int> used;
  for (Leaf& leaf : leaves) {
    if (seen[leaf.name] == 1) continue;
    int& number = used[leaf.name];
    if (++number == 1) continue;
    std::string name;
    do name = leaf.name + " (" + std::to_string(number) + ")";
    while (seen.contains(name) && ++number > 0);
    seen[name] = 1;
    leaf.name = name;
  }
}

/// The values of a tensor that PyTorch stores as its conjugate or negative: the signs of some components are reversed.
class TurnedSigns {
 public:
  explicit TurnedSigns(const PickledTensor& tensor) {
    const std::string name = tensor.dtype->name;
    const bool complex = name.starts_with("complex");
    component_ = complex ? tensor.dtype->bytes / 2 : tensor.dtype->bytes;
    const bool conj = tensor.conj && complex;  // a real number is its own conjugate
    first_ = tensor.neg;
    second_ = complex ? conj != tensor.neg : tensor.neg;
    const bool known = complex || name == "float16" || name == "bfloat16" || name == "float32" || name == "float64";
    possible_ = known || !tensor.neg;
  }
  bool any() const { return first_ || second_; }
  /// False: reversing signs of this dtype is undefined.
  bool possible() const { return possible_; }
  /// REQUIRES: `bytes` holds whole elements.
  std::string turned(const char* bytes, uint64_t size) const {
    std::string values(bytes, size);
    for (uint64_t at = 0, place = 0; at + component_ <= size; at += component_, ++place)
      if (char& top = values[at + component_ - 1]; place % 2 == 0 ? first_ : second_)
        top = static_cast<char>(top ^ 0x80);
    return values;
  }

 private:
  uint64_t component_ = 1;
  bool first_ = false, second_ = false, possible_ = false;  ///< of each two components
};

}  // namespace

Contents::Contents(const std::string& path, Repeated repeated) : source_(path) {
  if (is_pt_file(source_))
    list_pt(repeated);
  else
    list_safetensors();
}

void Contents::list_pt(Repeated repeated) {
  pt_ = std::make_unique<PtFile>(source_);
  const PickleTree& tree = pt_->tree();
  try {
    std::vector<Leaf> leaves = leaves_of(tree);
    if (const std::string* name = name_given_twice(leaves)) {
      if (repeated == Repeated::kRefused)
        throw RefusedInput("two of its entries are called `" + *name + "` when keys are joined by dots");
      number_names(leaves);
    }
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
  const TurnedSigns signs(pickled);
  if (!signs.possible())
    source_.refuse("`" + entry.name + "` is stored negated, and its values are " + pickled.dtype->name +
                   "; resolve it in Python first (tensor.resolve_neg())");
  if (!signs.any()) return for_each_run(pt_->tree(), pickled, memory_.data(), take);
  for_each_run(pt_->tree(), pickled, memory_.data(), [&](const char* bytes, uint64_t size) {
    constexpr uint64_t kPiece = 64 << 10;  // a multiple of every element's size
    for (uint64_t at = 0; at < size; at += kPiece) {
      const std::string values = signs.turned(bytes + at, std::min(kPiece, size - at));
      take(values.data(), values.size());
    }
  });
}

}  // namespace lockstep
