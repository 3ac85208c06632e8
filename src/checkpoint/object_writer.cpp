#include "checkpoint/object_writer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>

#include "base/hash.h"
#include "base/shared_weights.h"
#include "checkpoint/format/pickle_tree.h"
#include "checkpoint/format/pt_file.h"
#include "checkpoint/object_reader.h"
#include "checkpoint/scalar_type.h"

namespace lockstep {
namespace {

std::string text_of(const c10::IValue& key) { return key.isString() ? key.toStringRef() : std::to_string(key.toInt()); }

/// What cannot be read again must not be saved. Each object takes a byte at least, so only long pickles are read.
void check_readable(const std::string& pickle) {
  const char* const advice = "; save many numbers or a long text as a tensor";
  TORCH_CHECK(pickle.size() <= kMaxPickleBytes, "cannot save the object: beside its tensors it takes ", pickle.size(),
              " bytes, and ", kMaxPickleBytes, " at most are read again", advice);
  if (pickle.size() <= kMaxPickleNodes) return;
  PickleTree tree(pickle);
  try {
    read_pickle(tree);
  } catch (const Error& error) {
    TORCH_CHECK(false, "cannot save the object, which could not be read again: ", error.what(), advice);
  }
}

at::Tensor as_tensor(const c10::Storage& storage) {
  return at::empty({0}, at::kByte).set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
}

}  // namespace

/// The position of a value in the object. It becomes text only for an error.
struct ObjectWriter::Place {
  const Place* outer = nullptr;  ///< null: the value is the object
  c10::IValue key;
  int depth = 0;
  const void* container = nullptr;  ///< the list, tuple or dictionary that contains it

  Place inner(c10::IValue inner_key, const c10::IValue& in) const {
    return {this, std::move(inner_key), depth + 1, in.internalToPointer()};
  }
  bool is_in(const void* other) const { return outer != nullptr && (container == other || outer->is_in(other)); }
  std::string keys() const {
    if (outer == nullptr) return "";
    const std::string before = outer->keys();
    return (before.empty() ? before : before + '.') + text_of(key);
  }
  std::string name() const { return outer == nullptr ? "the object" : "`" + keys() + "`"; }
};

ObjectWriter::ObjectWriter(const c10::IValue& object) {
  at::NoGradGuard no_grad;
  add(object, {});
  pickle_ = pickle_writer_.finish();
  check_readable(pickle_);
}

void ObjectWriter::add(const c10::IValue& value, const Place& place) {
  TORCH_CHECK(place.depth < ObjectReader::kMaxDepth, "cannot save ", place.name(), ": it is nested deeper than ",
              ObjectReader::kMaxDepth);
  const bool is_container = value.isTuple() || value.isList() || value.isGenericDict();
  TORCH_CHECK(!is_container || !place.is_in(value.internalToPointer()), "cannot save ", place.name(),
              ": it contains itself");
  const auto add_all = [&](const auto& items) {
    for (size_t i = 0; i < items.size(); ++i) add(c10::IValue(items[i]), place.inner(static_cast<int64_t>(i), value));
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
    add_dict(value, place);
  } else {
    TORCH_CHECK(false, "cannot save ", place.name(), ": it is a ", value.tagKind(),
                "; only tensors, numbers, strings, None, and lists, tuples and dictionaries of these can be saved");
  }
}

void ObjectWriter::add_dict(const c10::IValue& value, const Place& place) {
  pickle_writer_.begin_dict();
  for (const auto& item : value.toGenericDict()) {
    const c10::IValue& key = item.key();
    TORCH_CHECK(key.isString() || key.isInt(), "cannot save ", place.name(), ": a key of it is a ", key.tagKind(),
                "; keys are strings or whole numbers");
    const Place inner = place.inner(key, value);
    add(key, inner);
    add(item.value(), inner);
  }
  pickle_writer_.end_dict();
}

void ObjectWriter::add_tensor(const at::Tensor& given, const Place& place) {
  TORCH_CHECK(given.defined(), "cannot save ", place.name(), ": it is an undefined tensor");
  const Dtype* dtype = dtype_of(given.scalar_type());
  TORCH_CHECK(given.layout() == at::kStrided && dtype != nullptr && !given.is_meta(), "cannot save ", place.name(),
              ": it is a ", given.toString(), " of layout ", given.layout(),
              "; only plain tensors can be saved, so convert it first");
  at::Tensor tensor = given.detach();
  if (tensor.is_conj() || tensor.is_neg()) tensor = tensor.resolve_conj().resolve_neg();
  const size_t storage = storage_of(tensor);
  if (tensor.is_cpu() && tensor.numel() > 0 && tensor.is_non_overlapping_and_dense() &&
      slices_of(tensor.storage()) == nullptr)
    dense_.push_back({static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()});
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
  if (!is_new) return found->second;
  if (const std::string trouble = trouble_of(shared_weights_in({storage.unsafeGetStorageImpl()})); !trouble.empty())
    throw Error("cannot save the weights: " + trouble);
  kept_.push_back(storage);
  if (storage.device().is_cpu()) {
    storages_.push_back(storage);
    return found->second;
  }
  at::Tensor all = at::empty({0}, tensor.options().dtype(at::kByte).requires_grad(false));
  all.set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
  storages_.push_back(all.to(at::kCPU).storage());
  return found->second;
}

std::vector<c10::Storage> ObjectWriter::sliced() const {
  std::vector<c10::Storage> sliced;
  for (const c10::Storage& storage : kept_)
    if (slices_of(storage) != nullptr) sliced.push_back(storage);
  return sliced;
}

void ObjectWriter::bring_slices_from(const Group& group) {
  std::vector<Slices> all;
  for (const c10::Storage& storage : sliced()) all.push_back(*slices_of(storage));
  others_ = std::make_unique<SliceStream>(group, std::move(all));
}

const Slices* ObjectWriter::slices(size_t storage) const {
  return others_ != nullptr && storage < kept_.size() ? slices_of(kept_[storage]) : nullptr;
}

void ObjectWriter::detach_from_tensors(ObjectWriter* old) {
  for (size_t i = 0; i < storages_.size(); ++i) {
    c10::Storage& bytes = storages_[i];
    // Bytes from another device are already a copy.
    if (bytes.unsafeGetStorageImpl() != kept_[i].unsafeGetStorageImpl()) continue;
    c10::Storage copy;
    if (old != nullptr && i < old->storages_.size() && old->storages_[i].nbytes() == bytes.nbytes())
      copy = std::move(old->storages_[i]);  // memory that was touched before causes no page faults
    else
      copy = at::empty({static_cast<int64_t>(bytes.nbytes())}, at::kByte).storage();
    if (slices(i) == nullptr) {
      as_tensor(copy).copy_(as_tensor(bytes));  // on as many threads as LibTorch uses
    } else {
      auto* to = static_cast<std::byte*>(copy.mutable_data());
      others_->read(static_cast<const std::byte*>(bytes.data()), [&to](const void* data, size_t size) {
        std::memcpy(to, data, size);
        to += size;
      });
    }
    bytes = std::move(copy);
  }
  kept_.clear();
  dense_.clear();
  places_.clear();
  others_.reset();
}

void ObjectWriter::write(ByteSink& sink, const std::string& name, ZipWriter::Checksums checksums) const {
  PtWriter writer(sink, name, pickle_, checksums);
  for (size_t i = 0; i < storages_.size(); ++i) {
    writer.begin_storage(std::to_string(i), storages_[i].nbytes());
    if (slices(i) == nullptr)
      writer.append(storages_[i].data(), storages_[i].nbytes());
    else
      others_->read(static_cast<const std::byte*>(storages_[i].data()),
                    [&writer](const void* data, size_t size) { writer.append(data, size); });
    writer.end_storage();
  }
  writer.finish();
}

ImageSlices ObjectWriter::places_of_sliced(const std::string& name, ZipWriter::Checksums checksums) const {
  struct : ByteSink {
    void write(const void*, size_t size) override { bytes += size; }
    uint64_t bytes = 0;
  } counter;
  std::vector<ImageSlices::Storage> places;
  PtWriter writer(counter, name, pickle_, checksums);
  for (size_t i = 0; i < storages_.size(); ++i) {
    writer.begin_storage(std::to_string(i), storages_[i].nbytes());
    if (const Slices* slices = slices_of(kept_[i])) {
      ImageSlices::Storage place{.begin = counter.bytes, .slice_bytes = slices->bytes, .holders = {}};
      for (int slice = 0; slice < slices->ranks; ++slice) place.holders.push_back(slices->holder(slice));
      places.push_back(std::move(place));
    }
    writer.append(storages_[i].data(), storages_[i].nbytes());
    writer.end_storage();
  }
  return ImageSlices(std::move(places));
}

uint64_t ObjectWriter::hash_of_samples(uint64_t turn) const {
  constexpr size_t kWords = 256;  // of all tensors, if they have more; each is a cache line from memory
  constexpr uint64_t kWordBytes = sizeof(uint64_t);
  const size_t words_each = std::max<size_t>(1, kWords / std::max<size_t>(1, dense_.size()));
  uint64_t place = Hash::mixed(Hash::kStart, turn), hash = Hash::kStart;
  for (const Bytes& tensor : dense_) {
    for (size_t i = 0; i < words_each; ++i) {
      place = Hash::mixed(place, i);
      uint64_t word = 0;
      if (tensor.count < kWordBytes)
        std::memcpy(&word, tensor.data, tensor.count);
      else
        std::memcpy(&word, tensor.data + place % (tensor.count / kWordBytes) * kWordBytes, kWordBytes);
      hash = Hash::mixed(hash, word);
    }
  }
  return hash;
}

uint64_t ObjectWriter::bytes() const {
  uint64_t sum = 0;
  for (const c10::Storage& storage : storages_) sum += storage.nbytes();
  return sum;
}

}  // namespace lockstep
