#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include <lockstep/checkpoint.h>
#include <lockstep/error.h>

#include "base/atomic_file.h"

// The safetensors format: 8 bytes with the length of the header (little endian), the header in JSON, then the tensors'
// bytes without gaps. The header maps names to {"dtype", "shape", "data_offsets": [begin, end]}, and "__metadata__" to
// texts. Source: the format section of the safetensors documentation.

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kMetadata = "__metadata__";
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's bound

constexpr std::pair<const char*, at::ScalarType> kDtypes[] = {
    {"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf},        {"BF16", at::kBFloat16},
    {"I64", at::kLong},   {"I32", at::kInt},   {"I16", at::kShort},       {"I8", at::kChar},
    {"U8", at::kByte},    {"BOOL", at::kBool}, {"C64", at::kComplexFloat}};

std::string dtype_name(const std::string& tensor, at::ScalarType dtype) {
  for (const auto& [name, value] : kDtypes)
    if (value == dtype) return name;
  throw Error("tensor `" + tensor + "` is " + c10::toString(dtype) + ", which a .safetensors file cannot hold");
}

/// Everything after the length, checked piece by piece.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path), content_(read_file(path)) {}

  Checkpoint read() {
    const Json header = read_header();
    Checkpoint checkpoint;
    for (const auto& [name, entry] : header.items()) {
      if (name == kMetadata) {
        for (const auto& [key, value] : entry.items()) checkpoint.metadata[key] = value.get<std::string>();
      } else {
        checkpoint.tensors.insert(name, read_tensor(name, entry));
      }
    }
    if (data_bytes() != tensor_bytes_)
      fail("its tensors take " + std::to_string(tensor_bytes_) + " bytes, but it holds " +
           std::to_string(data_bytes()));
    return checkpoint;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw Error("cannot load " + path_ + ": " + what); }

  Json read_header() {
    uint64_t length = 0;
    if (content_.size() < sizeof length)
      fail("it has " + std::to_string(content_.size()) + " bytes, too few for a header");
    std::memcpy(&length, content_.data(), sizeof length);
    if (length > kMaxHeaderBytes || length > content_.size() - sizeof length)
      fail("its header should take " + std::to_string(length) + " bytes of " + std::to_string(content_.size()) +
           "; it is truncated, or no .safetensors file");
    data_ = sizeof length + length;
    Json header =
        Json::parse(content_.begin() + sizeof length, content_.begin() + static_cast<ptrdiff_t>(data_), nullptr,
                    /*allow_exceptions=*/false);
    if (!header.is_object()) fail("its header is no JSON object");
    return header;
  }

  uint64_t data_bytes() const { return content_.size() - data_; }

  at::Tensor read_tensor(const std::string& name, const Json& entry) {
    try {
      const auto dtype_text = entry.at("dtype").get<std::string>();
      const auto known = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                      [&](const auto& dtype) { return dtype.first == dtype_text; });
      if (known == std::end(kDtypes)) fail("tensor `" + name + "` has the unknown dtype " + dtype_text);
      const auto shape = entry.at("shape").get<std::vector<int64_t>>();
      const auto offsets = entry.at("data_offsets").get<std::array<uint64_t, 2>>();
      const uint64_t bytes = checked_bytes(name, shape, c10::elementSize(known->second));
      if (offsets[0] > offsets[1] || offsets[1] > data_bytes() || offsets[1] - offsets[0] != bytes)
        fail("tensor `" + name + "` should take " + std::to_string(bytes) + " bytes, but lies at " +
             std::to_string(offsets[0]) + " to " + std::to_string(offsets[1]) + " of " + std::to_string(data_bytes()));
      tensor_bytes_ += bytes;
      at::Tensor tensor = at::empty(shape, known->second);
      if (bytes > 0) std::memcpy(tensor.mutable_data_ptr(), content_.data() + data_ + offsets[0], bytes);
      return tensor;
    } catch (const Json::exception&) {
      fail("the header's entry for tensor `" + name + "` lacks a dtype, shape or data_offsets of the right kind");
    }
  }

  /// Bytes of the tensor, no more than the file has.
  uint64_t checked_bytes(const std::string& name, const std::vector<int64_t>& shape, uint64_t element_bytes) const {
    uint64_t bytes = element_bytes;
    for (int64_t size : shape) {
      if (size < 0) fail("tensor `" + name + "` has a negative size");
      if (size == 0) return 0;
    }
    for (int64_t size : shape) {
      if (static_cast<uint64_t>(size) > data_bytes() / bytes) fail("tensor `" + name + "` is larger than the file");
      bytes *= static_cast<uint64_t>(size);
    }
    return bytes;
  }

  const std::string path_;
  const std::string content_;
  uint64_t data_ = 0;          ///< where the tensors start
  uint64_t tensor_bytes_ = 0;  ///< of all tensors so far; equal to data_bytes() when none overlap and no gap is left
};

}  // namespace

void save(const Checkpoint& checkpoint, const std::string& path) {
  if (!path.ends_with(".safetensors"))
    throw Error("cannot save " + path + ": the name must end in .safetensors, the format Lockstep writes");
  Json header = Json::object();
  if (!checkpoint.metadata.empty()) header[kMetadata] = checkpoint.metadata;
  std::vector<at::Tensor> tensors;
  uint64_t offset = 0;
  for (const auto& item : checkpoint.tensors) {
    tensors.push_back(item.value().detach().to(at::kCPU).contiguous());
    const uint64_t end = offset + tensors.back().nbytes();
    header[item.key()] = {{"dtype", dtype_name(item.key(), item.value().scalar_type())},
                          {"shape", item.value().sizes().vec()},
                          {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // aligns the tensors
  const uint64_t length = text.size();
  AtomicFile file(path);
  file.write(&length, sizeof length);
  file.write(text.data(), text.size());
  for (const auto& tensor : tensors) file.write(tensor.const_data_ptr(), tensor.nbytes());
  file.commit();
}

Checkpoint load(const std::string& path) { return Reader(path).read(); }

}  // namespace lockstep
