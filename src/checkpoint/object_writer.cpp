#include "checkpoint/object_writer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>

#include "checkpoint/format/pt_file.h"
#include "checkpoint/object_reader.h"
#include "checkpoint/scalar_type.h"

namespace lockstep {
namespace {
std::string key_path(const std::string& place, const std::string& key) {
  return place.empty() ? key : place + '.' + key;
}

std::string name_of(const std::string& place) { return place.empty() ? "the object" : "`" + place + "`"; }

}  // namespace

ObjectWriter::ObjectWriter(const c10::IValue& object) {
  at::NoGradGuard no_grad;
  add(object, "", 0);
  pickle_ = pickle_writer_.finish();
}

void ObjectWriter::add(const c10::IValue& value, const std::string& place, int depth) {
  TORCH_CHECK(depth < ObjectReader::kMaxDepth, "cannot save ", name_of(place), ": it is nested deeper than ",
              ObjectReader::kMaxDepth, ", or contains itself");
  const auto add_all = [&](const auto& items) {
    for (size_t i = 0; i < items.size(); ++i) add(c10::IValue(items[i]), key_path(place, std::to_string(i)), depth + 1);
  };
  if (value.isNone()) {
    pickle_writer_.none();
  } else if (value.isBool()) {
    pickle_writer_.boolean(value.toBool());
  } else if (value.isInt()) {
    pickle_writer_.integer(value.toInt());
  } else if (value.isDouble()) {
    pickle_writer_.real(value.toDouble());
  } else if (value.isString()) {
    pickle_writer_.text(value.toStringRef());
  } else if (value.isTensor()) {
    add_tensor(value.toTensor(), place);
  } else if (value.isTuple()) {
    pickle_writer_.begin_tuple();
    add_all(value.toTupleRef().elements().vec());
    pickle_writer_.end_tuple();
  } else if (value.isList()) {
    pickle_writer_.begin_list();
    add_all(value.toList().vec());
    pickle_writer_.end_list();
  } else if (value.isGenericDict()) {
    add_dict(value, place, depth);
  } else {
    TORCH_CHECK(false, "cannot save ", name_of(place), ": it is a ", value.tagKind(),
                "; tensors, numbers, texts, None, lists, tuples and dictionaries of them can be saved");
  }
}

void ObjectWriter::add_dict(const c10::IValue& value, const std::string& place, int depth) {
  pickle_writer_.begin_dict();
  for (const auto& item : value.toGenericDict()) {
    const c10::IValue& key = item.key();
    TORCH_CHECK(key.isString() || key.isInt(), "cannot save ", name_of(place), ": a key of it is a ", key.tagKind(),
                "; texts and whole numbers can be keys");
    add(key, place, depth + 1);
    add(item.value(), key_path(place, key.isString() ? key.toStringRef() : std::to_string(key.toInt())), depth + 1);
  }
  pickle_writer_.end_dict();
}

void ObjectWriter::add_tensor(const at::Tensor& given, const std::string& place) {
  TORCH_CHECK(given.defined(), "cannot save ", name_of(place), ": it is an undefined tensor");
  const Dtype* dtype = dtype_of(given.scalar_type());
  TORCH_CHECK(given.layout() == at::kStrided && dtype != nullptr && !given.is_meta(), "cannot save ", name_of(place),
              ": it is a ", given.toString(), " of layout ", given.layout(),
              "; plain tensors can be saved, so convert it first");
  at::Tensor tensor = given.detach();
  if (tensor.is_conj() || tensor.is_neg()) tensor = tensor.resolve_conj().resolve_neg();
  const size_t storage = storage_of(tensor);
  pickle_writer_.tensor({.dtype = dtype,
                         .storage = std::to_string(storage),
                         .storage_bytes = storages_[storage].nbytes(),
                         .offset = tensor.storage_offset(),
                         .sizes = tensor.sizes().vec(),
                         .strides = tensor.strides().vec(),
                         .requires_grad = given.requires_grad() && given.is_leaf()});
}

size_t ObjectWriter::storage_of(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  const auto [found, is_new] = places_.emplace(storage.unsafeGetStorageImpl(), storages_.size());
  if (is_new) {
    kept_.push_back(storage);
    const auto bytes = static_cast<int64_t>(storage.nbytes());
    at::Tensor all = at::empty({0}, tensor.options().dtype(at::kByte).requires_grad(false));
    all.set_(storage, 0, {bytes}, {1});
    storages_.push_back(all.to(at::kCPU));
  }
  return found->second;
}

void ObjectWriter::detach_from_tensors(ObjectWriter* old) {
  for (size_t i = 0; i < storages_.size(); ++i) {
    at::Tensor& bytes = storages_[i];
    // What came from another device is already a copy.
    if (bytes.storage().unsafeGetStorageImpl() != kept_[i].unsafeGetStorageImpl()) continue;
    at::Tensor copy;
    if (old != nullptr && i < old->storages_.size() && old->storages_[i].sizes() == bytes.sizes())
      copy = std::move(old->storages_[i]);  // memory that was touched before costs no page faults
    else
      copy = at::empty_like(bytes);
    copy.copy_(bytes);
    bytes = std::move(copy);
  }
  kept_.clear();
  places_.clear();
}

void ObjectWriter::write(ByteSink& sink, const std::string& name) const {
  PtWriter writer(sink, name, pickle_);
  for (size_t i = 0; i < storages_.size(); ++i) {
    writer.begin_storage(std::to_string(i), storages_[i].nbytes());
    writer.append(storages_[i].const_data_ptr(), storages_[i].nbytes());
    writer.end_storage();
  }
  writer.finish();
}

uint64_t ObjectWriter::bytes() const {
  uint64_t sum = 0;
  for (const at::Tensor& storage : storages_) sum += storage.nbytes();
  return sum;
}

}  // namespace lockstep
