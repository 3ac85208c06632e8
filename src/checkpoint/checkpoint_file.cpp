#include <algorithm>

#include <ATen/ATen.h>

#include <lockstep/checkpoint.h>
#include <lockstep/error.h>

#include "base/atomic_file.h"
#include "base/shared_weights.h"
#include "checkpoint/format/contents.h"
#include "checkpoint/object_reader.h"
#include "checkpoint/object_writer.h"
#include "checkpoint/scalar_type.h"
#include "collectives/storages.h"

// save() and load(): choose between the two formats, and convert a Checkpoint to and from them.

namespace lockstep {
namespace {

bool is_pt(const std::string& path) { return path.ends_with(".pt") || path.ends_with(".pth"); }

void save_safetensors(const Checkpoint& checkpoint, const std::string& path) {
  std::vector<TensorEntry> entries;
  std::vector<at::Tensor> tensors;
  for (const auto& item : checkpoint.tensors) {
    if (!item.value().defined())
      throw Error("cannot save " + path + ": tensor `" + item.key() + "` is an undefined tensor");
    if (const std::string trouble = trouble_of(shared_weights_in(storages_of({item.value()}))); !trouble.empty())
      throw Error("cannot save " + path + ": " + trouble);
    tensors.push_back(item.value().detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous());
    const Dtype* dtype = dtype_of(item.value().scalar_type());
    if (dtype == nullptr)
      throw Error("cannot save " + path + ": tensor `" + item.key() + "` is " +
                  c10::toString(item.value().scalar_type()) + ", which a .safetensors file cannot hold");
    entries.push_back({.name = item.key(), .dtype = dtype, .shape = item.value().sizes().vec(), .begin = 0, .end = 0});
  }
  const std::string header = safetensors_header(entries, checkpoint.metadata, path);
  AtomicFile file(path);
  file.write(header.data(), header.size());
  for (const auto& tensor : tensors) file.write(tensor.const_data_ptr(), tensor.nbytes());
  file.commit();
}

Checkpoint load_safetensors(const FileSource& source) {
  const SafetensorsFile file(source);  // checks everything before memory is allocated for the first tensor
  Checkpoint checkpoint;
  checkpoint.metadata = file.metadata();
  for (const TensorEntry& entry : file.entries()) {
    at::Tensor tensor = at::empty(entry.shape, scalar_type_of(*entry.dtype));
    file.read(entry, tensor.mutable_data_ptr());
    checkpoint.tensors.insert(entry.name, tensor);
  }
  return checkpoint;
}

Checkpoint load_pt(const FileSource& source) {
  ObjectReader reader(source);
  const PickleTree& tree = reader.file().tree();
  Checkpoint checkpoint;
  std::vector<Leaf> leaves;
  try {
    leaves = leaves_of(tree);
    for (const Leaf& leaf : leaves)
      if (tree[leaf.node].kind != NodeKind::kTensor &&
          !checkpoint.metadata.emplace(leaf.name, text_of(tree, tree[leaf.node])).second)
        throw Error("`" + leaf.name + "` occurs twice when keys are joined by dots; use load_object");
  } catch (const Error& error) {
    source.refuse(error.what());
  }
  for (const Leaf& leaf : leaves) {
    const Node& node = tree[leaf.node];
    if (node.kind != NodeKind::kTensor) continue;
    if (checkpoint.tensors.contains(leaf.name) || checkpoint.metadata.contains(leaf.name))
      source.refuse("`" + leaf.name + "` occurs twice when keys are joined by dots; use load_object");
    checkpoint.tensors.insert(leaf.name, reader.tensor(tree.tensors[static_cast<size_t>(node.integer)], leaf.name));
  }
  return checkpoint;
}

void add_tensors(const c10::IValue& object, const std::string& name, std::vector<const void*>& around,
                 StateDict& state) {
  if (object.isTensor()) {
    state.insert(name, object.toTensor());
    return;
  }
  if (!object.isGenericDict())
    throw Error("`" + name + "` is a " + object.tagKind() + "; expected a tensor or a dictionary of tensors");
  if (std::find(around.begin(), around.end(), object.internalToPointer()) != around.end())
    throw Error("`" + name + "` contains itself");
  around.push_back(object.internalToPointer());
  for (const auto& item : object.toGenericDict()) {
    const std::string key = item.key().isString() ? item.key().toStringRef() : std::to_string(item.key().toInt());
    add_tensors(item.value(), name.empty() ? key : name + '.' + key, around, state);
  }
  around.pop_back();
}

}  // namespace

void save(const Checkpoint& checkpoint, const std::string& path) {
  if (path.ends_with(".safetensors")) return save_safetensors(checkpoint, path);
  if (!is_pt(path))
    throw Error("cannot save " + path + ": the name must end in .safetensors, or in .pt for Python's torch.load");
  c10::IValue object = to_object(checkpoint.tensors);
  for (const auto& [key, text] : checkpoint.metadata) {
    if (checkpoint.tensors.contains(key))
      throw Error("cannot save " + path + ": `" + key + "` is a tensor and a string");
    object.toGenericDict().insert(key, text);
  }
  save_object(object, path);
}

void save(const StateDict& state, const std::string& path) { save(Checkpoint{.tensors = state, .metadata = {}}, path); }

Checkpoint load(const std::string& path) {
  const FileSource source(path);
  return is_pt_file(source) ? load_pt(source) : load_safetensors(source);
}

c10::IValue load_object(const std::string& path, LoadObjectOptions options) {
  const FileSource source(path);
  return ObjectReader(source, options.mmap ? &source : nullptr).object();
}

void save_object(const c10::IValue& object, const std::string& path) {
  if (!is_pt(path)) throw Error("cannot save " + path + ": the name must end in .pt or .pth");
  const ObjectWriter writer(object);
  AtomicFile file(path);
  writer.write(file, archive_name(path));
  file.commit();
}

c10::IValue to_object(const StateDict& state) {
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& item : state) dict.insert(item.key(), item.value());
  return dict;
}

StateDict to_state_dict(const c10::IValue& object) {
  StateDict state;
  if (!object.isGenericDict())
    throw Error(std::string("expected a dictionary of tensors, found a ") + object.tagKind().c_str());
  std::vector<const void*> around;  // the dictionaries being read
  add_tensors(object, "", around, state);
  return state;
}

}  // namespace lockstep
