#include <algorithm>
#include <cstring>
#include <set>

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

using Json = nlohmann::json;

constexpr const char* kMetadata = "__metadata__";
constexpr size_t kMaxDepth = 3;                    // {"name": {"shape": [number]}}
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

/// A first look at the header, for what Json does not keep: the order of the names, and whether one is given twice,
/// where readers would differ in which of the two they take.
struct HeaderLook : nlohmann::json_sax<Json> {
  std::vector<std::string> names;
  std::string problem;
  std::vector<std::set<std::string>> keys;  ///< of the objects that are open; arrays have none

  bool open() {
    if (keys.size() == kMaxDepth) return fail("its header is nested deeper than that of a .safetensors file");
    keys.emplace_back();
    return true;
  }
  bool close() {
    keys.pop_back();
    return true;
  }
  bool fail(const std::string& what) {
    problem = what;
    return false;
  }
  bool key(std::string& name) override {
    if (keys.size() == 1) names.push_back(name);
    return keys.back().insert(name).second || fail("its header has `" + name + "` twice");
  }
  bool start_object(size_t) override { return open(); }
  bool start_array(size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(int64_t) override { return true; }
  bool number_unsigned(uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(Json::binary_t&) override { return true; }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }
};

/// Everything after the length, checked piece by piece.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path), content_(read_file(path)) {}

  Checkpoint read() {
    const Json header = read_header();
    Checkpoint checkpoint;
    if (const auto metadata = header.find(kMetadata); metadata != header.end()) read_metadata(*metadata, checkpoint);
    // All are checked before memory is taken for the first.
    std::vector<Entry> entries;
    for (const auto& name : names_)
      if (name != kMetadata) entries.push_back(read_entry(name, header[name]));
    check_order(entries);
    for (const auto& entry : entries) checkpoint.tensors.insert(entry.name, read_tensor(entry));
    return checkpoint;
  }

 private:
  struct Entry {
    std::string name;
    at::ScalarType dtype;
    std::vector<int64_t> shape;
    uint64_t begin, end;
  };

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
    const auto begin = content_.begin() + sizeof length, end = content_.begin() + static_cast<ptrdiff_t>(data_);
    HeaderLook look;
    Json::sax_parse(begin, end, &look);
    if (!look.problem.empty()) fail(look.problem);
    names_ = std::move(look.names);
    Json header = Json::parse(begin, end, nullptr, /*allow_exceptions=*/false);
    if (!header.is_object()) fail("its header is no JSON object; it is damaged, or no .safetensors file");
    return header;
  }

  uint64_t data_bytes() const { return content_.size() - data_; }

  void read_metadata(const Json& metadata, Checkpoint& checkpoint) const {
    if (!metadata.is_object()) fail(std::string(kMetadata) + " in its header is no JSON object");
    for (const auto& [key, value] : metadata.items()) {
      if (!value.is_string()) fail("`" + key + "` of " + kMetadata + " in its header is no text");
      checkpoint.metadata[key] = value.get<std::string>();
    }
  }

  Entry read_entry(const std::string& name, const Json& json) const {
    const auto is_size = [](const Json& value) {
      return value.is_number_unsigned() && value.get<uint64_t>() <= std::numeric_limits<int64_t>::max();
    };
    const auto sizes = [&](const char* key) {
      const auto found = json.find(key);
      if (found == json.end() || !found->is_array() || !std::all_of(found->begin(), found->end(), is_size))
        fail("the header's entry for tensor `" + name + "` has no " + key + " of whole numbers from 0 to 2^63 - 1");
      return found->get<std::vector<int64_t>>();
    };
    if (!json.is_object() || !json.contains("dtype") || !json["dtype"].is_string())
      fail("the header's entry for tensor `" + name + "` has no dtype");
    const std::string dtype = json["dtype"];
    const auto known = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                    [&](const auto& candidate) { return candidate.first == dtype; });
    if (known == std::end(kDtypes)) fail("tensor `" + name + "` has the unknown dtype " + dtype);
    Entry entry{.name = name, .dtype = known->second, .shape = sizes("shape")};
    const auto offsets = sizes("data_offsets");
    if (offsets.size() != 2)
      fail("tensor `" + name + "` has " + std::to_string(offsets.size()) + " data_offsets, not 2");
    entry.begin = static_cast<uint64_t>(offsets[0]);
    entry.end = static_cast<uint64_t>(offsets[1]);
    const uint64_t bytes = bytes_of(entry);
    if (entry.begin > entry.end || entry.end > data_bytes() || entry.end - entry.begin != bytes)
      fail("tensor `" + name + "` should take " + std::to_string(bytes) + " bytes, but lies at " +
           std::to_string(entry.begin) + " to " + std::to_string(entry.end) + " of " + std::to_string(data_bytes()));
    return entry;
  }

  uint64_t bytes_of(const Entry& entry) const {
    int64_t bytes = static_cast<int64_t>(c10::elementSize(entry.dtype));
    bool too_many = false, empty = false;
    for (int64_t size : entry.shape) {
      empty |= size == 0;
      // Strides are products of the sizes above 0, so these are bounded even where a 0 makes the tensor empty.
      too_many |= __builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes);
    }
    if (too_many || (!empty && static_cast<uint64_t>(bytes) > data_bytes()))
      fail("tensor `" + entry.name + "` is larger than the file");
    return empty ? 0 : static_cast<uint64_t>(bytes);
  }

  /// The tensors must lie one behind the other, whatever the order of their names.
  void check_order(std::vector<Entry> entries) const {
    std::sort(entries.begin(), entries.end(),
              [](const Entry& a, const Entry& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
    uint64_t end = 0;
    for (const auto& entry : entries) {
      if (entry.begin != end)
        fail("tensor `" + entry.name + "` starts at " + std::to_string(entry.begin) + ", where " + std::to_string(end) +
             " was expected; tensors overlap or leave a gap");
      end = entry.end;
    }
    if (end != data_bytes())
      fail("its tensors take " + std::to_string(end) + " bytes, but it holds " + std::to_string(data_bytes()));
  }

  at::Tensor read_tensor(const Entry& entry) const {
    at::Tensor tensor = at::empty(entry.shape, entry.dtype);
    const char* bytes = content_.data() + data_ + entry.begin;
    const uint64_t size = entry.end - entry.begin;
    if (entry.dtype == at::kBool && std::any_of(bytes, bytes + size, [](char byte) { return (byte & ~1) != 0; }))
      fail("tensor `" + entry.name + "` is BOOL, but holds bytes other than 0 and 1");
    if (size > 0) std::memcpy(tensor.mutable_data_ptr(), bytes, size);
    return tensor;
  }

  const std::string path_;
  const std::string content_;
  uint64_t data_ = 0;               ///< where the tensors start
  std::vector<std::string> names_;  ///< the header's, in order
};

std::string header_text(const nlohmann::ordered_json& header, const std::string& path) {
  try {
    return header.dump();
  } catch (const nlohmann::json::exception&) {
    throw Error("cannot save " + path + ": a name or a text of its metadata is not UTF-8");
  }
}

}  // namespace

void save(const Checkpoint& checkpoint, const std::string& path) {
  if (!path.ends_with(".safetensors"))
    throw Error("cannot save " + path + ": the name must end in .safetensors, the format Lockstep writes");
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!checkpoint.metadata.empty()) header[kMetadata] = checkpoint.metadata;
  std::vector<at::Tensor> tensors;
  uint64_t offset = 0;
  for (const auto& item : checkpoint.tensors) {
    if (item.key() == kMetadata) throw Error("cannot save " + path + ": no tensor may be called " + kMetadata);
    tensors.push_back(item.value().detach().to(at::kCPU).contiguous());
    const uint64_t end = offset + tensors.back().nbytes();
    header[item.key()] = {{"dtype", dtype_name(item.key(), item.value().scalar_type())},
                          {"shape", item.value().sizes().vec()},
                          {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header_text(header, path);
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
