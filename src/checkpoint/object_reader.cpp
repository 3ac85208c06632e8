#include "checkpoint/object_reader.h"

#include <sys/mman.h>

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include <algorithm>

#include "base/error.h"
#include "checkpoint/scalar_type.h"

namespace lockstep {
namespace {

constexpr size_t kMaxWordBytes = 200;  // of a key, in messages
constexpr uint64_t kAlignment = 64;    // of PyTorch's own memory; operators may rely on it

std::string inside(const std::string& place, const std::string& key) {
  const std::string word = key.substr(0, kMaxWordBytes);
  return place.empty() ? word : place + '.' + word;
}

std::shared_ptr<char> map(const FileSource& source) {
  const uint64_t bytes = source.size();
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, source.descriptor(), 0);
  if (memory == MAP_FAILED) throw_errno<RefusedInput>("cannot map " + source.name());
  return {static_cast<char*>(memory), [bytes](char* start) { ::munmap(start, bytes); }};
}

}  // namespace

ObjectReader::ObjectReader(const ByteSource& source, const FileSource* mapped)
    : source_(source),
      file_(source),
      storages_(file_.tree().storages.size()),
      truth_checked_(storages_.size()),
      containers_(file_.tree().nodes.size()),
      state_(file_.tree().nodes.size()) {
  if (mapped != nullptr) mapping_ = map(*mapped);
}

void ObjectReader::refuse(const std::string& place, const std::string& what) const {
  source_.refuse((place.empty() ? "it" : "`" + place + "`") + " " + what);
}

at::Tensor ObjectReader::read_storage(uint32_t index) const {
  const auto bytes = static_cast<int64_t>(file_.storage_bytes(index));
  const uint64_t offset = file_.storage_offset(index);
  if (mapping_ != nullptr && offset % kAlignment == 0 && bytes > 0)
    return at::from_blob(
        mapping_.get() + offset, {bytes}, [keep = mapping_](void*) {}, at::kByte);
  at::Tensor memory = at::empty({bytes}, at::kByte);
  file_.read_storage(index, memory.mutable_data_ptr());
  return memory;
}

at::Tensor ObjectReader::storage(uint32_t index, const std::string& place) {
  if (!storages_[index].defined()) {
    try {
      storages_[index] = read_storage(index);
    } catch (const Error& error) {
      throw RefusedInput(std::string(error.what()) + " (needed for `" + place + "`)");
    }
  }
  return storages_[index];
}

at::Tensor ObjectReader::tensor(const PickledTensor& pickled, const std::string& place) {
  const at::Tensor memory = storage(pickled.storage, place);
  if (pickled.dtype == dtype_of_name("bool") && truth_checked_[pickled.storage] == 0) {
    const char* bytes = static_cast<const char*>(memory.const_data_ptr());
    if (std::any_of(bytes, bytes + memory.nbytes(), [](char byte) { return (byte & ~1) != 0; }))
      refuse(place, "is bool, but holds bytes other than 0 and 1");
    truth_checked_[pickled.storage] = 1;
  }
  at::Tensor tensor = at::empty({0}, at::TensorOptions(scalar_type_of(*pickled.dtype)));
  tensor.set_(memory.storage(), pickled.offset, file_.tree().numbers(pickled.sizes),
              file_.tree().numbers(pickled.strides));
  if (pickled.conj) tensor = tensor.conj();
  if (pickled.neg) tensor = at::_neg_view(tensor);
  if (pickled.requires_grad && (tensor.is_floating_point() || tensor.is_complex())) tensor.set_requires_grad(true);
  return tensor;
}

c10::IValue ObjectReader::object() { return object(file_.tree().root, "", 0); }

c10::IValue ObjectReader::object(NodeId id, const std::string& place, int depth) {
  if (depth > kMaxDepth) refuse(place, "is nested deeper than " + std::to_string(kMaxDepth));
  if (state_[id] == 1) refuse(place, "contains itself");
  if (state_[id] == 2) return containers_[id];
  const Node& node = file_.tree()[id];
  state_[id] = 1;
  c10::IValue value;
  switch (node.kind) {
    case NodeKind::kNone:
      break;
    case NodeKind::kBool:
      value = node.integer != 0;
      break;
    case NodeKind::kInt:
      value = node.integer;
      break;
    case NodeKind::kReal:
      value = node.real;
      break;
    case NodeKind::kComplex:
      value = c10::complex<double>(file_.tree()[node.items[0]].real, file_.tree()[node.items[1]].real);
      break;
    case NodeKind::kText:
    case NodeKind::kBytes:
      value = std::string(node.text);
      break;
    case NodeKind::kDtype:
      value = "torch." + std::string(node.text);
      break;
    case NodeKind::kTensor:
      value = tensor(file_.tree().tensors[static_cast<size_t>(node.integer)], place);
      break;
    case NodeKind::kTuple: {
      std::vector<c10::IValue> items;
      for (size_t i = 0; i < node.items.size(); ++i)
        items.push_back(object(node.items[i], inside(place, std::to_string(i)), depth + 1));
      value = c10::ivalue::Tuple::create(std::move(items));
      break;
    }
    case NodeKind::kList:
    case NodeKind::kSet: {
      c10::impl::GenericList list(c10::AnyType::get());
      for (size_t i = 0; i < node.items.size(); ++i)
        list.push_back(object(node.items[i], inside(place, std::to_string(i)), depth + 1));
      value = list;
      break;
    }
    case NodeKind::kDict:
      value = dict(id, place, depth);
      break;
    default:
      refuse(place, "is not data");
  }
  containers_[id] = value;
  state_[id] = 2;
  return value;
}

c10::IValue ObjectReader::key(NodeId id, const std::string& place) const {
  const Node& node = file_.tree()[id];
  switch (node.kind) {
    case NodeKind::kText:
      return std::string(node.text);
    case NodeKind::kInt:
      return node.integer;
    case NodeKind::kBool:
      return node.integer != 0;
    case NodeKind::kReal:
      return node.real;
    default:
      refuse(place, "has a key that is neither a string nor a number");
  }
}

c10::IValue ObjectReader::dict(NodeId id, const std::string& place, int depth) {
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  const std::vector<NodeId>& items = file_.tree()[id].items;
  for (size_t i = 0; i + 1 < items.size(); i += 2) {
    const c10::IValue name = key(items[i], place);
    const std::string text = name.isString() ? name.toStringRef() : name.isInt() ? std::to_string(name.toInt()) : "?";
    dict.insert_or_assign(name, object(items[i + 1], inside(place, text), depth + 1));
  }
  return dict;
}

}  // namespace lockstep
