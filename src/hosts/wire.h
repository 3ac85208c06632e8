#pragma once

#include <bit>
#include <climits>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/error.h"

namespace lockstep::hosts {

/// The other side violated the protocol.
struct ProtocolError : Error {
  using Error::Error;
};

/// Messages between the coordinator and its agents are frames: uint32 length of the rest | uint8 kind | body. A body is
/// the message's fields, one after the other: numbers as 8 bytes, little endian; texts and lists preceded by their
/// size. Never allocates more than the size of the received bytes.
struct Frame {
  uint8_t kind = 0;
  std::string_view body;  ///< into the parsed bytes
  size_t bytes = 0;       ///< length of the whole frame
};

void append_frame(std::string& out, uint8_t kind, std::string_view body);

/// The frame at the start of `bytes`; empty if more bytes are needed. Throws ProtocolError for a length over `limit`.
std::optional<Frame> parse_frame(std::string_view bytes, size_t limit);

template <typename T>
concept Scalar = std::integral<T> || std::is_enum_v<T> || std::same_as<T, double>;

class WireWriter {
 public:
  template <Scalar T>
  void operator()(const T& number) {
    uint64_t word;
    if constexpr (std::same_as<T, double>)
      word = std::bit_cast<uint64_t>(number);
    else
      word = static_cast<uint64_t>(static_cast<int64_t>(number));
    for (int byte = 0; byte < 8; ++byte) out.push_back(static_cast<char>(word >> 8 * byte));
  }
  void operator()(const std::string& text) {
    (*this)(text.size());
    out += text;
  }
  template <typename T>
  void operator()(const std::vector<T>& list) {
    (*this)(list.size());
    for (const T& one : list) (*this)(one);
  }
  template <typename T>
  requires requires(T& message, WireWriter& writer) { message.fields(writer); }
  void operator()(const T& message) {
    const_cast<T&>(message).fields(*this);  // only reads when writing to the wire
  }

  std::string out;
};

class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : rest_(bytes) {}

  template <Scalar T>
  void operator()(T& number) {
    if (rest_.size() < 8) throw ProtocolError("a message ends inside a number");
    uint64_t word = 0;
    for (size_t byte = 0; byte < 8; ++byte)
      word |= static_cast<uint64_t>(static_cast<unsigned char>(rest_[byte])) << 8 * byte;
    rest_.remove_prefix(8);
    if constexpr (std::same_as<T, double>) {
      number = std::bit_cast<double>(word);
    } else {
      number = static_cast<T>(static_cast<int64_t>(word));
      if (static_cast<uint64_t>(static_cast<int64_t>(number)) != word)
        throw ProtocolError("a message has a number out of range");
    }
  }
  void operator()(std::string& text) {
    const size_t size = count(1);
    text.assign(rest_.substr(0, size));
    rest_.remove_prefix(size);
  }
  template <typename T>
  void operator()(std::vector<T>& list) {
    list.clear();
    for (size_t left = count(8); left > 0; --left) (*this)(list.emplace_back());
  }
  template <typename T>
  requires requires(T& message, WireReader& reader) { message.fields(reader); }
  void operator()(T& message) { message.fields(*this); }
  bool done() const { return rest_.empty(); }

 private:
  /// A number of items of at least `bytes_each` bytes each.
  size_t count(size_t bytes_each) {
    uint64_t number = 0;
    (*this)(number);
    if (number > rest_.size() / bytes_each) throw ProtocolError("a message is shorter than a list or text in it");
    return number;
  }

  std::string_view rest_;
};

template <typename Message>
std::string encode(const Message& message) {
  WireWriter writer;
  writer(message);
  return std::move(writer.out);
}

/// Throws ProtocolError unless `body` is exactly one such message.
template <typename Message>
Message decode(std::string_view body) {
  WireReader reader(body);
  Message message;
  reader(message);
  if (!reader.done()) throw ProtocolError("a message is longer than its fields");
  return message;
}

}  // namespace lockstep::hosts
