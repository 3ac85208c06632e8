#include "hosts/wire.h"

namespace lockstep::hosts {
namespace {

constexpr size_t kLengthBytes = 4;

}  // namespace

void append_frame(std::string& out, uint8_t kind, std::string_view body) {
  const size_t length = body.size() + 1;
  for (size_t byte = 0; byte < kLengthBytes; ++byte) out.push_back(static_cast<char>(length >> 8 * byte));
  out.push_back(static_cast<char>(kind));
  out += body;
}

std::optional<Frame> parse_frame(std::string_view bytes, size_t limit) {
  if (bytes.size() < kLengthBytes) return std::nullopt;
  size_t length = 0;
  for (size_t byte = 0; byte < kLengthBytes; ++byte)
    length |= static_cast<size_t>(static_cast<unsigned char>(bytes[byte])) << 8 * byte;
  if (length < 1 || length > limit)
    throw ProtocolError("a frame of " + std::to_string(length) + " bytes; the limit is " + std::to_string(limit));
  if (bytes.size() < kLengthBytes + length) return std::nullopt;
  return Frame{.kind = static_cast<uint8_t>(bytes[kLengthBytes]),
               .body = bytes.substr(kLengthBytes + 1, length - 1),
               .bytes = kLengthBytes + length};
}

}  // namespace lockstep::hosts
