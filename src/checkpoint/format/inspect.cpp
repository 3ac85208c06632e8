#include "checkpoint/format/file_tools.h"

#include <algorithm>
#include <cstring>

#include "base/text.h"
#include "checkpoint/format/contents.h"

namespace lockstep {
namespace {

constexpr size_t kMaxShownBytes = 100;  // of a shown value
constexpr size_t kMaxColumn = 60;       // wider entries stand out
constexpr size_t kPiece = 64 << 10;

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::string padded(const std::string& text, size_t width) {
  return text + std::string(width - std::min(width, text.size()), ' ');
}

}  // namespace

void inspect_file(const std::string& path, const std::function<void(const std::string&)>& write) {
  const Contents contents(path, Contents::Repeated::kNumbered);
  size_t name_width = 4, dtype_width = 8, shape_width = 5;
  for (const TensorEntry& tensor : contents.tensors()) {
    name_width = std::max(name_width, std::min(printable(tensor.name.substr(0, kMaxColumn)).size(), kMaxColumn));
    dtype_width = std::max(dtype_width, std::strlen(tensor.dtype->name));
    shape_width = std::max(shape_width, std::min(shape_text(tensor.shape).size(), kMaxColumn));
  }
  // In pieces, because the whole text may be larger than the file.
  std::string text;
  const auto put = [&](const std::string& line) {
    text += line;
    if (text.size() < kPiece) return;
    write(text);
    text.clear();
  };
  put(padded("name", name_width) + "  " + padded("dtype", dtype_width) + "  " + padded("shape", shape_width) +
      "  bytes\n");
  for (const TensorEntry& tensor : contents.tensors())
    put(padded(printable(tensor.name), name_width) + "  " + padded(tensor.dtype->name, dtype_width) + "  " +
        padded(shape_text(tensor.shape), shape_width) + "  " + std::to_string(tensor.bytes()) + "\n");
  for (const auto& [name, value] : contents.texts())
    put(printable(name) + " = " + printable(value.substr(0, kMaxShownBytes)) +
        (value.size() > kMaxShownBytes ? "..." : "") + "\n");
  const Contents::Storages storages = contents.storages();
  put(std::to_string(contents.tensors().size()) + " tensors, " + std::to_string(storages.bytes) + " bytes");
  if (storages.count < contents.tensors().size())
    put(" (" + std::to_string(storages.count) + " pieces of memory, some shared)");
  write(text + "\n");
}

}  // namespace lockstep
