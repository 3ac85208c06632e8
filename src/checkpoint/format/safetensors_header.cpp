#include "checkpoint/format/safetensors_header.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "checkpoint/format/names.h"

// The safetensors format: 8 bytes with the length of the header (little endian), the header in JSON, then the tensors'
// bytes without gaps. The header maps names to {"dtype", "shape", "data_offsets": [begin, end]}, and "__metadata__" to
// texts. Source: the format section of the safetensors documentation.
//
// A header may have 100 MB and millions of tensors, so it is never held as a whole, neither as a string nor as a tree.
// The parser reads the file piece by piece, and each of its events goes into the current entry.

namespace lockstep {
namespace {

using Json = nlohmann::json;

constexpr const char* kMetadataName = "__metadata__";
constexpr size_t kMaxDepth = 3;                    // {"name": {"shape": [number]}}
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's bound
constexpr uint64_t kChunk = 256 << 10;
constexpr uint64_t kLeastEntryBytes = 50;   // of the header: "":{"dtype":"I8","shape":[],"data_offsets":[0,1]}
constexpr size_t kMaxTextBytes = 8 << 20;   // a name, or a text of the metadata
constexpr size_t kMaxWordBytes = 1000;      // a number
constexpr size_t kMaxMetadata = 256 << 10;  // texts

/// The header's characters, one after the other. Refuses strings and numbers that the parser would needlessly keep
/// whole.
class Characters {
 public:
  Characters(const ByteSource& source, uint64_t begin, uint64_t end) : source_(source), next_(begin), end_(end) {
    fill();
  }

  bool at_end() const { return at_ == chunk_.size(); }
  char current() const { return chunk_[at_]; }
  void advance() {
    measure(chunk_[at_]);
    if (++at_ == chunk_.size()) fill();
  }

  /// An iterator for the parser; the end has no characters.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = char;
    using difference_type = std::ptrdiff_t;
    using pointer = const char*;
    using reference = char;
    Iterator() = default;
    explicit Iterator(Characters& of) : of_(&of) {}
    char operator*() const { return of_->current(); }
    Iterator& operator++() {
      of_->advance();
      return *this;
    }
    bool operator==(const Iterator& other) const { return is_end() == other.is_end(); }
    bool operator!=(const Iterator& other) const { return !(*this == other); }

   private:
    bool is_end() const { return of_ == nullptr || of_->at_end(); }
    Characters* of_ = nullptr;
  };

 private:
  void fill() {
    chunk_.resize(std::min(kChunk, end_ - next_));
    source_.read(next_, chunk_.data(), chunk_.size());
    next_ += chunk_.size();
    at_ = 0;
  }

  void measure(char c) {
    if (++run_ > (in_text_ ? kMaxTextBytes : kMaxWordBytes))
      source_.refuse(std::string("its header has a ") + (in_text_ ? "string" : "number") + " of more than " +
                     std::to_string(in_text_ ? kMaxTextBytes : kMaxWordBytes) + " bytes");
    if (in_text_) {
      if (!escaped_ && c == '"') in_text_ = false, run_ = 0;
      escaped_ = !escaped_ && c == '\\';
    } else if (c == '"') {
      in_text_ = true;
      run_ = 0;
    } else if (c == ',' || c == ':' || c == '[' || c == ']' || c == '{' || c == '}' || c <= ' ') {
      run_ = 0;
    }
  }

  const ByteSource& source_;
  uint64_t next_;  ///< in the file, after the chunk
  const uint64_t end_;
  std::string chunk_;
  size_t at_ = 0;
  bool in_text_ = false, escaped_ = false;
  size_t run_ = 0;  ///< characters of the current string or number
};

/// Turns the parser's events into entries. An error in an entry is reported only if the rest is JSON.
class Events : public nlohmann::json_sax<Json> {
 public:
  Events(SafetensorsHeader& header, uint64_t data_bytes) : header_(header), data_bytes_(data_bytes) {}

  /// The reason why this class stopped the parser; empty if it did not, so that the text is not JSON.
  const std::string& stop() const { return stop_; }
  bool is_object() const { return is_object_; }
  /// The first problem; empty: none.
  const std::string& problem() const { return problem_; }

  bool key(std::string& name) override {
    if (depth_ == 1) {
      is_metadata_ = name == kMetadataName;
      if (is_metadata_ && std::exchange(has_metadata_, true)) return stop_at_twice(name);
      entry_ = {};
      entry_.tensor.name = std::move(name);
    } else if (within_ == Within::kMetadata && depth_ == 2) {
      key_ = std::move(name);
      if (header_.metadata.contains(key_)) return stop_at_twice(key_);
    } else if (within_ == Within::kEntry && depth_ == 2) {
      field_ = name == "dtype"          ? &entry_.dtype
               : name == "shape"        ? &entry_.shape
               : name == "data_offsets" ? &entry_.offsets
                                        : nullptr;
      if (field_ != nullptr && std::exchange(field_->given, true)) return stop_at_twice(name);
    }
    return true;
  }

  bool start_object(size_t) override {
    if (depth_ == 0)
      is_object_ = true;
    else if (depth_ == 1)
      within_ = is_metadata_ ? Within::kMetadata : Within::kEntry;
    else
      misplaced();
    return open();
  }
  bool start_array(size_t) override {
    in_numbers_ = within_ == Within::kEntry && depth_ == 2 && field_ != nullptr && field_ != &entry_.dtype;
    if (in_numbers_)
      field_->good = true;
    else
      misplaced();
    return open();
  }
  bool end_object() override { return close(); }
  bool end_array() override {
    in_numbers_ = false;
    return close();
  }

  bool string(std::string& text) override {
    if (within_ == Within::kMetadata && depth_ == 2) {
      if (header_.metadata.size() == kMaxMetadata)
        return stop_because("its header has more than " + std::to_string(kMaxMetadata) + " strings in " +
                            kMetadataName);
      header_.metadata.emplace(std::move(key_), std::move(text));
    } else if (within_ == Within::kEntry && depth_ == 2 && field_ == &entry_.dtype) {
      entry_.dtype.good = true;
      entry_.tensor.dtype = dtype_of_safetensors(text);
      if (entry_.tensor.dtype == nullptr) note("tensor `" + entry_.tensor.name + "` has the unknown dtype " + text);
    } else {
      misplaced();
    }
    return true;
  }
  bool number_unsigned(uint64_t number) override {
    if (!in_numbers_ || number > std::numeric_limits<int64_t>::max()) return misplaced();
    if (field_ == &entry_.offsets) {
      if (entry_.offset_count < 2) entry_.offset[entry_.offset_count] = number;
      ++entry_.offset_count;
      return true;
    }
    if (entry_.tensor.shape.size() == kMaxDimensions)
      return stop_because("tensor `" + entry_.tensor.name + "` in its header has more than " +
                          std::to_string(kMaxDimensions) + " dimensions");
    entry_.tensor.shape.push_back(static_cast<int64_t>(number));
    return true;
  }
  bool null() override { return misplaced(); }
  bool boolean(bool) override { return misplaced(); }
  bool number_integer(int64_t) override { return misplaced(); }
  bool number_float(double, const std::string&) override { return misplaced(); }
  bool binary(Json::binary_t&) override { return misplaced(); }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }

 private:
  struct Field {
    bool given = false, good = false;
  };
  struct Entry {
    TensorEntry tensor{};
    Field dtype, shape, offsets;
    uint64_t offset[2] = {};
    size_t offset_count = 0;
  };
  /// The open object of depth 2.
  enum class Within : uint8_t { kNothing, kMetadata, kEntry };

  bool stop_because(const std::string& why) {
    stop_ = why;
    return false;
  }
  bool stop_at_twice(const std::string& name) { return stop_because("its header has `" + name + "` twice"); }
  void note(const std::string& what) {
    if (problem_.empty()) problem_ = what;
  }

  bool open() {
    if (depth_ == kMaxDepth) return stop_because("its header is nested deeper than that of a .safetensors file");
    ++depth_;
    return true;
  }
  bool close() {
    if (--depth_ == 1 && std::exchange(within_, Within::kNothing) == Within::kEntry) finish_entry();
    return true;
  }

  /// A value that has no meaning at its position.
  bool misplaced() {
    if (depth_ == 1 && is_metadata_) note(std::string(kMetadataName) + " in its header is not a JSON object");
    if (depth_ == 1 && !is_metadata_) note_lacking("dtype");
    if (within_ == Within::kMetadata && depth_ == 2)
      note("`" + key_ + "` of " + kMetadataName + " in its header is not a string");
    if (in_numbers_) field_->good = false;
    return true;
  }
  void note_lacking(const char* what) {
    note("the header's entry for tensor `" + entry_.tensor.name + "` has no " + what);
  }

  void finish_entry() {
    TensorEntry& tensor = entry_.tensor;
    if (!problem_.empty()) return;
    if (!entry_.dtype.good) return note_lacking("dtype");
    if (!entry_.shape.good) return note_lacking("shape of whole numbers from 0 to 2^63 - 1");
    if (!entry_.offsets.good) return note_lacking("data_offsets of whole numbers from 0 to 2^63 - 1");
    if (entry_.offset_count != 2)
      return note("tensor `" + tensor.name + "` has " + std::to_string(entry_.offset_count) + " data_offsets, not 2");
    tensor.begin = entry_.offset[0];
    tensor.end = entry_.offset[1];
    const std::optional<uint64_t> bytes = bytes_of(tensor);
    if (!bytes) return note("tensor `" + tensor.name + "` is larger than the file");
    if (tensor.begin > tensor.end || tensor.end > data_bytes_ || tensor.bytes() != *bytes)
      return note("tensor `" + tensor.name + "` should take " + std::to_string(*bytes) + " bytes, but lies at " +
                  std::to_string(tensor.begin) + " to " + std::to_string(tensor.end) + " of " +
                  std::to_string(data_bytes_));
    tensor.storage = header_.entries.size();
    header_.entries.push_back(std::move(tensor));
  }

  /// Empty if they are more than the file has.
  std::optional<uint64_t> bytes_of(const TensorEntry& tensor) const {
    auto bytes = static_cast<int64_t>(tensor.dtype->bytes);
    bool too_many = false, empty = false;
    for (int64_t size : tensor.shape) {
      empty |= size == 0;
      // Strides are products of the sizes above 0, so they are bounded even if a 0 makes the tensor empty.
      too_many |= __builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes);
    }
    if (too_many || (!empty && static_cast<uint64_t>(bytes) > data_bytes_)) return std::nullopt;
    return empty ? 0 : static_cast<uint64_t>(bytes);
  }

  SafetensorsHeader& header_;
  const uint64_t data_bytes_;
  size_t depth_ = 0;  ///< of open objects and arrays
  Within within_ = Within::kNothing;
  bool is_object_ = false, is_metadata_ = false, has_metadata_ = false;
  bool in_numbers_ = false;  ///< the innermost open container is the array of `field_`
  Entry entry_;
  Field* field_ = nullptr;  ///< the entry's field to which the current value belongs
  std::string key_, stop_, problem_;
};

/// The tensors must be consecutive, whatever the order of their names.
void check_order(const ByteSource& source, const std::vector<TensorEntry>& entries, uint64_t data_bytes) {
  std::vector<uint32_t> order(entries.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return std::pair(entries[a].begin, entries[a].end) < std::pair(entries[b].begin, entries[b].end);
  });
  uint64_t end = 0;
  for (const uint32_t at : order) {
    const TensorEntry& entry = entries[at];
    if (entry.begin != end)
      source.refuse("tensor `" + entry.name + "` starts at " + std::to_string(entry.begin) + ", where " +
                    std::to_string(end) + " was expected; tensors overlap or leave a gap");
    end = entry.end;
  }
  if (end != data_bytes)
    source.refuse("its tensors take " + std::to_string(end) + " bytes, but it holds " + std::to_string(data_bytes));
}

}  // namespace

SafetensorsHeader read_safetensors_header(const ByteSource& source) {
  uint64_t length = 0;
  if (source.size() < sizeof length)
    source.refuse("it has " + std::to_string(source.size()) + " bytes, too few for a header");
  source.read(0, &length, sizeof length);
  if (length > kMaxHeaderBytes || length > source.size() - sizeof length)
    source.refuse("its header should take " + std::to_string(length) + " bytes of " + std::to_string(source.size()) +
                  "; it is truncated, or not a .safetensors file");
  SafetensorsHeader header;
  header.data = sizeof length + length;
  // Unused memory is never touched, and growing would need the old and the new memory at once.
  header.entries.reserve(length / kLeastEntryBytes);
  Characters characters(source, sizeof length, header.data);
  Events events(header, source.size() - header.data);
  const bool is_json = Json::sax_parse(Characters::Iterator(characters), Characters::Iterator(), &events);
  if (!events.stop().empty()) source.refuse(events.stop());
  if (!is_json || !events.is_object())
    source.refuse("its header is not a JSON object; it is damaged, or not a .safetensors file");
  if (!events.problem().empty()) source.refuse(events.problem());
  if (const std::string* name = name_given_twice(header.entries)) source.refuse("its header has `" + *name + "` twice");
  check_order(source, header.entries, source.size() - header.data);
  return header;
}

}  // namespace lockstep
