#include "checkpoint/format/file_tools.h"

#include <algorithm>
#include <set>

#include "base/atomic_file.h"
#include "base/error.h"
#include "checkpoint/format/contents.h"
#include "checkpoint/format/pickle_writer.h"

namespace lockstep {
namespace {

/// A view may repeat its elements (expand) any number of times; written out it must not be far larger than the file.
constexpr uint64_t kMaxGrowth = 64;

bool is_pt_name(const std::string& path) { return path.ends_with(".pt") || path.ends_with(".pth"); }

void check_growth(const Contents& contents, const std::string& from) {
  uint64_t limit = 1 << 20, sum = 0;
  if (__builtin_add_overflow(limit, contents.storages().bytes * kMaxGrowth, &limit)) return;
  for (const TensorEntry& tensor : contents.tensors())
    if (__builtin_add_overflow(sum, tensor.bytes(), &sum) || sum > limit)
      throw Error("cannot convert " + from + ": its tensors repeat their elements so often that tensor `" +
                  tensor.name + "` written out would make a file of more than " + std::to_string(limit) + " bytes");
}

void write_safetensors(const Contents& contents, const std::string& to) {
  std::vector<TensorEntry> entries;
  for (const TensorEntry& tensor : contents.tensors())
    entries.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape, .begin = 0, .end = 0});
  const std::string header = safetensors_header(entries, contents.texts(), to);
  AtomicFile file(to);
  file.write(header.data(), header.size());
  for (size_t i = 0; i < entries.size(); ++i)
    contents.read(i, [&](const char* bytes, uint64_t size) { file.write(bytes, size); });
  file.commit();
}

std::vector<int64_t> row_major(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(shape[i], 1);
  return strides;
}

void write_pt(const Contents& contents, const std::string& to) {
  PickleWriter pickle;
  pickle.begin_dict();
  const auto& tensors = contents.tensors();
  for (size_t i = 0; i < tensors.size(); ++i) {
    pickle.text(tensors[i].name);
    pickle.tensor({.dtype = tensors[i].dtype,
                   .storage = std::to_string(i),
                   .storage_bytes = tensors[i].bytes(),
                   .offset = 0,
                   .sizes = tensors[i].shape,
                   .strides = row_major(tensors[i].shape)});
  }
  for (const auto& [name, text] : contents.texts()) {
    pickle.text(name);
    pickle.text(text);
  }
  pickle.end_dict();
  AtomicFile file(to);
  PtWriter writer(file, archive_name(to), pickle.finish());
  for (size_t i = 0; i < tensors.size(); ++i) {
    writer.begin_storage(std::to_string(i), tensors[i].bytes());
    contents.read(i, [&](const char* bytes, uint64_t size) { writer.append(bytes, size); });
    writer.end_storage();
  }
  writer.finish();
  file.commit();
}

}  // namespace

std::string convert_file(const std::string& from, const std::string& to) {
  if (!is_pt_name(to) && !to.ends_with(".safetensors"))
    throw Error("cannot convert to " + to + ": the name must end in .pt, .pth or .safetensors");
  const Contents contents(from);
  check_growth(contents, from);
  std::set<std::string> names;
  for (const TensorEntry& tensor : contents.tensors()) names.insert(tensor.name);
  const auto both = std::find_if(contents.texts().begin(), contents.texts().end(),
                                 [&](const auto& text) { return names.contains(text.first); });
  if (both != contents.texts().end())
    throw Error("cannot convert " + from + ": `" + both->first + "` is a tensor and a string");
  if (is_pt_name(to))
    write_pt(contents, to);
  else
    write_safetensors(contents, to);
  std::string notes;
  if (contents.storages().count < contents.tensors().size())
    notes += "tensors that shared memory in " + from + " are written once each\n";
  if (!contents.texts().empty() && contents.is_pt())
    notes += std::to_string(contents.texts().size()) + " values that are not tensors are now strings\n";
  return notes;
}

}  // namespace lockstep
