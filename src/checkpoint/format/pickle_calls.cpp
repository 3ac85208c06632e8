#include "checkpoint/format/pickle_calls.h"

#include <cstring>
#include <limits>

#include "base/error.h"
#include "checkpoint/format/pickle_tree.h"
#include "checkpoint/format/tensor_entry.h"

namespace lockstep {

void PickleCalls::refuse(const std::string& what) { throw RefusedInput(what); }

NodeId PickleCalls::make(NodeKind kind) {
  if (tree_.nodes.size() >= kMaxPickleNodes)
    refuse("it makes more than " + std::to_string(kMaxPickleNodes) + " objects");
  tree_.nodes.emplace_back().kind = kind;
  return static_cast<NodeId>(tree_.nodes.size() - 1);
}

const Node& PickleCalls::expect(NodeId id, NodeKind kind, const char* what) const {
  if (at(id).kind != kind) refuse(std::string("it has another object in place of ") + what);
  return at(id);
}

void PickleCalls::expect_arguments(const std::vector<NodeId>& arguments, size_t least, size_t most,
                                   const char* of) const {
  if (arguments.size() < least || arguments.size() > most)
    refuse(std::string(of) + " is given " + std::to_string(arguments.size()) + " arguments");
}

Global PickleCalls::global_at(NodeId id) const {
  return at(id).kind == NodeKind::kGlobal ? static_cast<Global>(at(id).integer) : Global::kUnknown;
}

std::string_view PickleCalls::own(std::string text) {
  // Otherwise a short file could ask for the same long string over and over.
  owned_bytes_ += text.size();
  if (owned_bytes_ > 2 * tree_.pickle.size()) refuse("its strings are larger than the file");
  return tree_.owned.emplace_back(std::move(text));
}

NodeId PickleCalls::storage(NodeId address) {
  const std::vector<NodeId> words = expect(address, NodeKind::kTuple, "the address of a storage").items;
  expect_arguments(words, 5, 6, "the address of a storage");
  if (expect(words[0], NodeKind::kText, "the word storage").text != "storage")
    refuse("it refers to an outside object that is not a storage");
  const Global type = global_at(words[1]);
  if (type != Global::kTypedStorage && type != Global::kUntypedStorage) refuse("a storage has no known type");
  const Dtype* dtype = type == Global::kTypedStorage ? dtype_of_storage(at(words[1]).text) : nullptr;
  const std::string key(expect(words[2], NodeKind::kText, "the key of a storage").text);
  const int64_t count = expect(words[4], NodeKind::kInt, "the size of a storage").integer;
  uint64_t bytes = dtype != nullptr ? dtype->bytes : 1;
  if (count < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(count), &bytes) ||
      bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    refuse("storage " + key + " has " + std::to_string(count) + " elements");
  const auto [known, is_new] = storages_.emplace(key, static_cast<uint32_t>(tree_.storages.size()));
  if (is_new)
    tree_.storages.push_back({key, bytes});
  else if (tree_.storages[known->second].bytes != bytes)
    refuse("storage " + key + " has two sizes");
  const NodeId id = make(NodeKind::kStorage);
  tree_.nodes[id].integer = known->second;
  typed_[id] = dtype;
  return id;
}

NodeId PickleCalls::call(Global global, const std::vector<NodeId>& arguments) {
  switch (global) {
    case Global::kOrderedDict:
      expect_arguments(arguments, 0, 0, "OrderedDict");
      return make(NodeKind::kDict);
    case Global::kSize:
      expect_arguments(arguments, 1, 1, "torch.Size");
      expect(arguments[0], NodeKind::kTuple, "the numbers of a torch.Size");
      return arguments[0];
    case Global::kDevice: {
      expect_arguments(arguments, 1, 2, "torch.device");
      const NodeId device = make(NodeKind::kText);
      tree_.nodes[device].text = expect(arguments[0], NodeKind::kText, "the name of a device").text;
      return device;
    }
    case Global::kComplex: {
      expect_arguments(arguments, 2, 2, "complex");
      const NodeId number = make(NodeKind::kComplex);
      for (NodeId part : arguments) expect(part, NodeKind::kReal, "a part of a complex number");
      tree_.nodes[number].items = arguments;
      return number;
    }
    case Global::kSet:
      return set_of(arguments);
    case Global::kByteArray:
      expect_arguments(arguments, 1, 2, "bytearray");
      if (at(arguments[0]).kind == NodeKind::kBytes) return arguments[0];
      return encoded(arguments);
    case Global::kEncode:
      return encoded(arguments);
    case Global::kRebuildTensor:
    case Global::kRebuildTensorV2:
    case Global::kRebuildTensorV3:
      return tensor(arguments, global);
    case Global::kRebuildParameter:
      expect_arguments(arguments, 3, 3, "_rebuild_parameter");
      return with_gradient(arguments[0], arguments[1]);
    case Global::kRebuildFromType:
      return rebuilt_from_type(arguments);
    case Global::kNumpyDtype: {
      expect_arguments(arguments, 1, 3, "numpy.dtype");
      const NodeId dtype = make(NodeKind::kNumpyDtype);
      tree_.nodes[dtype].text = expect(arguments[0], NodeKind::kText, "the name of a numpy.dtype").text;
      return dtype;
    }
    case Global::kNumpyScalar:
      return numpy_scalar(arguments);
    default:
      refuse("it calls a class or function that does not make data");
  }
}

NodeId PickleCalls::set_of(const std::vector<NodeId>& arguments) {
  expect_arguments(arguments, 1, 1, "set");
  const NodeId set = make(NodeKind::kSet);
  tree_.nodes[set].items = expect(arguments[0], NodeKind::kList, "the items of a set").items;
  if (tree_.nodes[set].items.size() > tree_.pickle.size()) refuse("a set is larger than the file");
  owned_bytes_ += tree_.nodes[set].items.size() * sizeof(NodeId);
  if (owned_bytes_ > 8 * tree_.pickle.size()) refuse("its sets are larger than the file");
  return set;
}

NodeId PickleCalls::rebuilt_from_type(const std::vector<NodeId>& arguments) {
  // (function, class, its arguments, attributes): a tensor that was given attributes, which are not kept.
  expect_arguments(arguments, 4, 4, "_rebuild_from_type_v2");
  const Global type = global_at(arguments[1]);
  if (type != Global::kTensor && type != Global::kParameter) refuse("a tensor is of a subclass");
  const Global made_by = global_at(arguments[0]);
  if (made_by == Global::kRebuildFromType || made_by == Global::kUnknown)
    refuse("a tensor is made by an unknown function");
  const NodeId made = call(made_by, expect(arguments[2], NodeKind::kTuple, "arguments of a tensor").items);
  expect(made, NodeKind::kTensor, "a tensor");
  return made;
}

NodeId PickleCalls::tensor(const std::vector<NodeId>& arguments, Global version) {
  const bool v3 = version == Global::kRebuildTensorV3;
  if (version == Global::kRebuildTensor)
    expect_arguments(arguments, 4, 4, "_rebuild_tensor");
  else
    expect_arguments(arguments, v3 ? 7 : 6, v3 ? 8 : 7, v3 ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
  PickledTensor made{};
  made.storage = static_cast<uint32_t>(expect(arguments[0], NodeKind::kStorage, "the storage of a tensor").integer);
  made.dtype =
      v3 ? dtype_of_name(expect(arguments[6], NodeKind::kDtype, "the dtype of a tensor").text) : typed_[arguments[0]];
  if (made.dtype == nullptr) refuse("a tensor has no dtype");
  made.offset = expect(arguments[1], NodeKind::kInt, "the offset of a tensor").integer;
  made.sizes = arguments[2];
  made.strides = arguments[3];
  for (NodeId tuple : {made.sizes, made.strides})
    for (NodeId item : expect(tuple, NodeKind::kTuple, "the sizes of a tensor").items)
      if (expect(item, NodeKind::kInt, "a size of a tensor").integer < 0)
        refuse("a tensor has a negative size or stride");
  if (at(made.sizes).items.size() != at(made.strides).items.size() || at(made.sizes).items.size() > kMaxDimensions)
    refuse("a tensor has " + std::to_string(at(made.sizes).items.size()) + " sizes and " +
           std::to_string(at(made.strides).items.size()) + " strides");
  check_bounds(made);
  if (version != Global::kRebuildTensor) {
    made.requires_grad = expect(arguments[4], NodeKind::kBool, "requires_grad of a tensor").integer != 0;
    if (arguments.size() == (v3 ? 8 : 7)) read_metadata(arguments.back(), made);
  }
  const NodeId id = make(NodeKind::kTensor);
  tree_.nodes[id].integer = static_cast<int64_t>(tree_.tensors.size());
  tree_.tensors.push_back(made);
  return id;
}

void PickleCalls::check_bounds(const PickledTensor& tensor) const {
  const PickledStorage& storage = tree_.storages[tensor.storage];
  const std::vector<int64_t> sizes = tree_.numbers(tensor.sizes), strides = tree_.numbers(tensor.strides);
  int64_t last = tensor.offset, count = static_cast<int64_t>(tensor.dtype->bytes);
  bool too_large = tensor.offset < 0, empty = false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    int64_t reach = 0;
    empty |= sizes[i] == 0;
    // The product is bounded even if a 0 makes the tensor empty: other code computes it without checking.
    too_large |= __builtin_mul_overflow(count, sizes[i] > 0 ? sizes[i] : 1, &count);
    too_large |= __builtin_mul_overflow(sizes[i] > 0 ? sizes[i] - 1 : 0, strides[i], &reach) ||
                 __builtin_add_overflow(last, reach, &last);
  }
  const auto elements = static_cast<int64_t>(storage.bytes / tensor.dtype->bytes);
  if (too_large || (empty ? tensor.offset > elements : last >= elements))
    refuse("a tensor reaches beyond its storage " + storage.key + " of " + std::to_string(storage.bytes) + " bytes");
}

void PickleCalls::read_metadata(NodeId metadata, PickledTensor& tensor) const {
  if (at(metadata).kind == NodeKind::kNone) return;
  const auto& items = expect(metadata, NodeKind::kDict, "the metadata of a tensor").items;
  for (size_t i = 0; i + 1 < items.size(); i += 2) {
    const std::string_view key = expect(items[i], NodeKind::kText, "a word of a tensor's metadata").text;
    const bool value = expect(items[i + 1], NodeKind::kBool, "a tensor's metadata").integer != 0;
    if (key == "conj")
      tensor.conj = value;
    else if (key == "neg")
      tensor.neg = value;
    else
      refuse("a tensor has metadata of an unknown kind");
  }
  if (tensor.conj && !std::string_view(tensor.dtype->name).starts_with("complex"))
    refuse("a real tensor is conjugated");
}

NodeId PickleCalls::with_gradient(NodeId tensor, NodeId requires_grad) {
  PickledTensor made = tree_.tensors[static_cast<size_t>(expect(tensor, NodeKind::kTensor, "a tensor").integer)];
  made.requires_grad = expect(requires_grad, NodeKind::kBool, "requires_grad of a parameter").integer != 0;
  const NodeId id = make(NodeKind::kTensor);
  tree_.nodes[id].integer = static_cast<int64_t>(tree_.tensors.size());
  tree_.tensors.push_back(made);
  return id;
}

NodeId PickleCalls::encoded(const std::vector<NodeId>& arguments) {
  expect_arguments(arguments, 2, 2, "_codecs.encode");
  if (expect(arguments[1], NodeKind::kText, "the name of a code").text != "latin1")
    refuse("bytes are encoded in something other than latin1");
  const std::string_view text = expect(arguments[0], NodeKind::kText, "a text to encode").text;
  std::string bytes;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x80) {
      bytes += text[i];
    } else {  // UTF-8 of U+0080 to U+00FF
      const unsigned next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0;
      if ((byte != 0xc2 && byte != 0xc3) || (next & 0xc0) != 0x80)
        refuse("bytes are written as a string that is not latin1");
      bytes += static_cast<char>((byte & 3) << 6 | (next & 0x3f));
      ++i;
    }
  }
  const NodeId id = make(NodeKind::kBytes);
  tree_.nodes[id].text = own(std::move(bytes));
  return id;
}

NodeId PickleCalls::numpy_scalar(const std::vector<NodeId>& arguments) {
  expect_arguments(arguments, 2, 2, "numpy's scalar");
  const std::string_view dtype = expect(arguments[0], NodeKind::kNumpyDtype, "a numpy.dtype").text;
  const std::string_view bytes = expect(arguments[1], NodeKind::kBytes, "the bytes of a numpy scalar").text;
  const auto read = [&]<typename T>(T value) {
    if (bytes.size() != sizeof value) refuse("a numpy scalar has " + std::to_string(bytes.size()) + " bytes");
    std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  };
  const auto integer = [&](NodeKind kind, int64_t value) {
    const NodeId id = make(kind);
    tree_.nodes[id].integer = value;
    return id;
  };
  const auto real = [&](double value) {
    const NodeId id = make(NodeKind::kReal);
    tree_.nodes[id].real = value;
    return id;
  };
  if (dtype == "f8") return real(read(double{}));
  if (dtype == "f4") return real(read(float{}));
  if (dtype == "i8") return integer(NodeKind::kInt, read(int64_t{}));
  if (dtype == "i4") return integer(NodeKind::kInt, read(int32_t{}));
  if (dtype == "i2") return integer(NodeKind::kInt, read(int16_t{}));
  if (dtype == "i1") return integer(NodeKind::kInt, read(int8_t{}));
  if (dtype == "u4") return integer(NodeKind::kInt, read(uint32_t{}));
  if (dtype == "u2") return integer(NodeKind::kInt, read(uint16_t{}));
  if (dtype == "u1") return integer(NodeKind::kInt, read(uint8_t{}));
  if (dtype == "b1") return integer(NodeKind::kBool, read(uint8_t{}) != 0);
  refuse("a numpy scalar is of dtype `" + std::string(dtype.substr(0, 20)) + "`, which is not supported");
}

}  // namespace lockstep
