#include "rendezvous/key_value_frame.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.h"

namespace lockstep {
namespace {

constexpr size_t kLengthBytes = sizeof(uint32_t);
constexpr size_t kHeaderBytes = sizeof(uint32_t) + sizeof(uint8_t);  // id and code

void append_number(std::string& out, uint32_t number) {
  out.append(reinterpret_cast<const char*>(&number), sizeof number);
}

/// Number of fields of each request in the order of KeyValueRequest; -1: any number of keys.
constexpr std::array<int, 10> kFields = {2, 1, 2, 3, 1, -1, -1, 0, 2, 0};

uint32_t read_number(std::string_view bytes) {
  uint32_t number;
  std::memcpy(&number, bytes.data(), sizeof number);
  return number;
}

}  // namespace

void append_frame(std::string& out, uint32_t id, uint8_t code, const std::vector<std::string_view>& fields) {
  size_t length = kHeaderBytes;
  for (const auto field : fields) length += kLengthBytes + field.size();
  append_number(out, static_cast<uint32_t>(length));
  append_number(out, id);
  out.push_back(static_cast<char>(code));
  for (const auto field : fields) {
    append_number(out, static_cast<uint32_t>(field.size()));
    out.append(field);
  }
}

std::optional<KeyValueFrame> parse_frame(std::string_view bytes) {
  if (bytes.size() < kLengthBytes) return std::nullopt;
  const size_t length = read_number(bytes);
  if (length < kHeaderBytes || length > kMaxFrameBytes)
    throw Error("a frame of " + std::to_string(length) + " bytes; the limits are " + std::to_string(kHeaderBytes) +
                " to " + std::to_string(kMaxFrameBytes));
  if (bytes.size() < kLengthBytes + length) return std::nullopt;
  std::string_view rest = bytes.substr(kLengthBytes, length);
  KeyValueFrame frame{.id = read_number(rest), .code = static_cast<uint8_t>(rest[4]), .bytes = kLengthBytes + length};
  rest.remove_prefix(kHeaderBytes);
  while (!rest.empty()) {
    if (rest.size() < kLengthBytes) throw Error("a frame ends inside a field");
    const size_t size = read_number(rest);
    rest.remove_prefix(kLengthBytes);
    if (size > rest.size()) throw Error("a field of " + std::to_string(size) + " bytes reaches beyond its frame");
    frame.fields.push_back(rest.substr(0, size));
    rest.remove_prefix(size);
  }
  return frame;
}

void check_request(const KeyValueFrame& frame) {
  if (frame.code >= kFields.size()) throw Error("unknown request " + std::to_string(frame.code));
  const int expected = kFields[frame.code];
  if (expected >= 0 && frame.fields.size() != static_cast<size_t>(expected))
    throw Error("request " + std::to_string(frame.code) + " with " + std::to_string(frame.fields.size()) + " fields");
  const size_t keys = expected < 0 ? frame.fields.size() : std::min<size_t>(frame.fields.size(), 1);
  for (size_t i = 0; i < frame.fields.size(); ++i) {
    const size_t limit = i < keys ? kMaxKeyBytes : kMaxValueBytes;
    if (frame.fields[i].size() > limit)
      throw Error("a key or value of " + std::to_string(frame.fields[i].size()) + " bytes");
  }
}

}  // namespace lockstep
