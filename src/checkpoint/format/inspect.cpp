#include "checkpoint/format/inspect.h"

#include <algorithm>
#include <set>

#include "base/printable.h"
#include "checkpoint/format/contents.h"

namespace lockstep {
namespace {

constexpr size_t kMaxTextBytes = 100;  // of a value that is shown

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::string padded(const std::string& text, size_t width) {
  return text + std::string(width - std::min(width, text.size()), ' ');
}

}  // namespace

std::string inspect_file(const std::string& path) {
  const Contents contents(path);
  size_t name_width = 4, dtype_width = 8, shape_width = 5;
  std::set<size_t> storages;
  for (const TensorEntry& tensor : contents.tensors()) {
    name_width = std::max(name_width, std::min<size_t>(printable(tensor.name).size(), 60));
    dtype_width = std::max(dtype_width, std::string(tensor.dtype->name).size());
    shape_width = std::max(shape_width, shape_text(tensor.shape).size());
    storages.insert(tensor.storage);
  }
  std::string text = padded("name", name_width) + "  " + padded("dtype", dtype_width) + "  " +
                     padded("shape", shape_width) + "  bytes\n";
  for (const TensorEntry& tensor : contents.tensors())
    text += padded(printable(tensor.name), name_width) + "  " + padded(tensor.dtype->name, dtype_width) + "  " +
            padded(shape_text(tensor.shape), shape_width) + "  " + std::to_string(tensor.bytes) + "\n";
  for (const auto& [name, value] : contents.texts())
    text += printable(name) + " = " + printable(value.substr(0, kMaxTextBytes)) +
            (value.size() > kMaxTextBytes ? "..." : "") + "\n";
  text +=
      std::to_string(contents.tensors().size()) + " tensors, " + std::to_string(contents.storage_bytes()) + " bytes";
  if (storages.size() < contents.tensors().size())
    text += " (" + std::to_string(storages.size()) + " pieces of memory, some shared)";
  return text + "\n";
}

}  // namespace lockstep
