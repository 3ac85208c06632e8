#include "checkpoint/format/safetensors_file.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace lockstep {
namespace {

constexpr const char* kReserved = "__metadata__";
constexpr uint64_t kCopyChunk = 256 << 10;

}  // namespace

SafetensorsFile::SafetensorsFile(const ByteSource& source)
    : source_(source), header_(read_safetensors_header(source)) {}

void SafetensorsFile::read(const TensorEntry& entry, void* to) const {
  const bool truth_values = entry.dtype == dtype_of_name("bool");
  auto* bytes = static_cast<char*>(to);
  for (uint64_t done = 0; done < entry.bytes();) {
    const uint64_t count = std::min(kCopyChunk, entry.bytes() - done);
    source_.read(header_.data + entry.begin + done, bytes + done, count);
    if (truth_values && std::any_of(bytes + done, bytes + done + count, [](char byte) { return (byte & ~1) != 0; }))
      source_.refuse("tensor `" + entry.name + "` is BOOL, but holds bytes other than 0 and 1");
    done += count;
  }
}

std::string safetensors_header(std::vector<TensorEntry>& entries, const std::map<std::string, std::string>& metadata,
                               const std::string& path) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kReserved] = metadata;
  uint64_t offset = 0;
  for (TensorEntry& entry : entries) {
    if (entry.name == kReserved) throw Error("cannot save " + path + ": no tensor may be called " + kReserved);
    if (entry.dtype->safetensors == nullptr)
      throw Error("cannot save " + path + ": tensor `" + entry.name + "` is " + entry.dtype->name +
                  ", which a .safetensors file cannot hold");
    uint64_t bytes = entry.dtype->bytes;
    for (int64_t size : entry.shape) bytes *= static_cast<uint64_t>(size);
    entry.begin = offset;
    entry.end = offset += bytes;
    header[entry.name] = {
        {"dtype", entry.dtype->safetensors}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception&) {
    throw Error("cannot save " + path + ": a name or a string of its metadata is not UTF-8");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');  // aligns the tensors
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + text;
}

}  // namespace lockstep
