#include "checkpoint/format/safetensors_file.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"

// The safetensors format: 8 bytes with the length of the header (little endian), the header in JSON, then the tensors'
// bytes without gaps. The header maps names to {"dtype", "shape", "data_offsets": [begin, end]}, and "__metadata__" to
// texts. Source: the format section of the safetensors documentation.

namespace lockstep {
namespace {

using Json = nlohmann::json;

constexpr const char* kMetadata = "__metadata__";
constexpr size_t kMaxHeaderDepth = 3;              // {"name": {"shape": [number]}}
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's bound
constexpr uint64_t kCopyChunk = 256 << 10;

/// A first look at the header, for what Json does not keep: the order of the names, and whether one is given twice,
/// where readers would differ in which of the two they take.
struct HeaderLook : nlohmann::json_sax<Json> {
  std::vector<std::string> names;
  std::string problem;
  std::vector<std::set<std::string>> keys;  ///< of the objects that are open; arrays have none

  bool open() {
    if (keys.size() == kMaxHeaderDepth) return fail("its header is nested deeper than that of a .safetensors file");
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

}  // namespace

/// Everything after the length, checked piece by piece.
class SafetensorsFile::HeaderReader {
 public:
  explicit HeaderReader(SafetensorsFile& file) : file_(file), source_(file.source_) {}

  void read() {
    const Json header = read_header();
    file_.data_ = data_;
    if (const auto metadata = header.find(kMetadata); metadata != header.end()) read_metadata(*metadata);
    for (const auto& name : names_)
      if (name != kMetadata) file_.entries_.push_back(read_entry(name, header[name]));
    check_order(file_.entries_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { source_.refuse(what); }

  Json read_header() {
    uint64_t length = 0;
    if (source_.size() < sizeof length)
      fail("it has " + std::to_string(source_.size()) + " bytes, too few for a header");
    source_.read(0, &length, sizeof length);
    if (length > kMaxHeaderBytes || length > source_.size() - sizeof length)
      fail("its header should take " + std::to_string(length) + " bytes of " + std::to_string(source_.size()) +
           "; it is truncated, or no .safetensors file");
    data_ = sizeof length + length;
    const std::string text = source_.read_text(sizeof length, length);
    HeaderLook look;
    Json::sax_parse(text, &look);
    if (!look.problem.empty()) fail(look.problem);
    names_ = std::move(look.names);
    Json header = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!header.is_object()) fail("its header is no JSON object; it is damaged, or no .safetensors file");
    return header;
  }

  uint64_t data_bytes() const { return source_.size() - data_; }

  void read_metadata(const Json& metadata) const {
    if (!metadata.is_object()) fail(std::string(kMetadata) + " in its header is no JSON object");
    for (const auto& [key, value] : metadata.items()) {
      if (!value.is_string()) fail("`" + key + "` of " + kMetadata + " in its header is no text");
      file_.metadata_[key] = value.get<std::string>();
    }
  }

  SafetensorsEntry read_entry(const std::string& name, const Json& json) const {
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
    const lockstep::Dtype* known = dtype_of_safetensors(dtype);
    if (known == nullptr) fail("tensor `" + name + "` has the unknown dtype " + dtype);
    SafetensorsEntry entry{.name = name, .dtype = known, .shape = sizes("shape"), .begin = 0, .end = 0};
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

  uint64_t bytes_of(const SafetensorsEntry& entry) const {
    int64_t bytes = static_cast<int64_t>(entry.dtype->bytes);
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
  void check_order(std::vector<SafetensorsEntry> entries) const {
    std::sort(entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
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

  SafetensorsFile& file_;
  const ByteSource& source_;
  uint64_t data_ = 0;
  std::vector<std::string> names_;  ///< the header's, in order
};

SafetensorsFile::SafetensorsFile(const ByteSource& source) : source_(source) { HeaderReader(*this).read(); }

void SafetensorsFile::read(const SafetensorsEntry& entry, void* to) const {
  const bool truth_values = entry.dtype == dtype_of_name("bool");
  auto* bytes = static_cast<char*>(to);
  for (uint64_t done = 0; done < entry.bytes();) {
    const uint64_t count = std::min(kCopyChunk, entry.bytes() - done);
    source_.read(data_ + entry.begin + done, bytes + done, count);
    if (truth_values && std::any_of(bytes + done, bytes + done + count, [](char byte) { return (byte & ~1) != 0; }))
      source_.refuse("tensor `" + entry.name + "` is BOOL, but holds bytes other than 0 and 1");
    done += count;
  }
}

std::string safetensors_header(std::vector<SafetensorsEntry>& entries,
                               const std::map<std::string, std::string>& metadata, const std::string& path) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  uint64_t offset = 0;
  for (SafetensorsEntry& entry : entries) {
    if (entry.name == kMetadata) throw Error("cannot save " + path + ": no tensor may be called " + kMetadata);
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
    throw Error("cannot save " + path + ": a name or a text of its metadata is not UTF-8");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');  // aligns the tensors
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + text;
}

}  // namespace lockstep
