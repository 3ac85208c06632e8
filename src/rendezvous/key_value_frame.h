#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// The messages between KeyValueClient and KeyValueServer, on one machine and in its byte order:
///
///   uint32 length of all that follows | uint32 id | uint8 code | (uint32 length, bytes) for each field
///
/// A request's code is a KeyValueRequest, and the client chooses its id; the reply has the same id and a KeyValueReply.
/// Replies may come in a different order from their requests: a request for a missing key waits on the server, and
/// later requests do not wait for it.

constexpr size_t kMaxKeyBytes = 4 << 10;
constexpr size_t kMaxValueBytes = 16 << 20;
constexpr size_t kMaxFrameBytes = 2 * kMaxValueBytes + (64 << 10);

enum class KeyValueRequest : uint8_t {
  kSet,         ///< key, value -> nothing
  kGet,         ///< key -> value, once it exists
  kAdd,         ///< key, decimal amount -> decimal sum
  kCompareSet,  ///< key, expected, desired -> value
  kDelete,      ///< key -> "1" or "0"
  kCheck,       ///< keys -> "1" or "0"
  kWait,        ///< keys -> nothing, once all exist
  kNumKeys,     ///< -> decimal count
  kAppend,      ///< key, value -> nothing
  kCancel,      ///< answers the waiting request with this id at once, with kMissing; has no reply of its own
};

enum class KeyValueReply : uint8_t {
  kDone,     ///< the fields named above
  kMissing,  ///< cancelled: the missing keys
  kRefused,  ///< the reason
};

struct KeyValueFrame {
  uint32_t id = 0;
  uint8_t code = 0;
  std::vector<std::string_view> fields;  ///< into the parsed bytes
  size_t bytes = 0;                      ///< length of the whole frame
};

void append_frame(std::string& out, uint32_t id, uint8_t code, const std::vector<std::string_view>& fields);

/// The frame at the start of `bytes`; empty if more bytes are needed. Throws Error if no frame can start like this.
std::optional<KeyValueFrame> parse_frame(std::string_view bytes);

/// Throws Error unless `frame` is a request with the right number of fields, each within its bounds.
void check_request(const KeyValueFrame& frame);

}  // namespace lockstep
