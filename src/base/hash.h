#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace lockstep {

/// FNV-1a over 64 bits (Fowler, Noll, Vo), eight bytes at a time where there are eight. Finds damage, not forgery.
/// The result depends on where add() was cut unless every piece but the last is a multiple of eight bytes.
class Hash {
 public:
  void add(const void* data, size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    for (; size >= 8; size -= 8, bytes += 8) {
      uint64_t word;
      __builtin_memcpy(&word, bytes, 8);
      mix(word);
    }
    for (; size > 0; --size) mix(*bytes++);
  }
  void add(const std::string& text) {
    add(text.data(), text.size());
    mix(text.size());
  }
  std::string digits() const {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value_));
    return text;
  }

 private:
  void mix(uint64_t word) {
    value_ = (value_ ^ word) * 0x100000001b3;
    value_ ^= value_ >> 32;  // lets the high bits of a word reach the low bits of the hash
  }
  uint64_t value_ = 0xcbf29ce484222325;
};

/// The same hash of a stream, wherever the stream is cut.
class StreamHash {
 public:
  void add(const void* data, size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    bytes_ += size;
    for (; pending_ > 0 && size > 0; --size) {
      pending_bytes_[pending_++ & 7] = *bytes++;  // below 8, which the compiler cannot see
      if (pending_ == 8) {
        hash_.add(pending_bytes_, 8);
        pending_ = 0;
      }
    }
    const size_t whole = size / 8 * 8;
    hash_.add(bytes, whole);
    for (size_t i = whole; i < size; ++i) pending_bytes_[pending_++ & 7] = bytes[i];
  }
  uint64_t bytes() const { return bytes_; }
  std::string digits() const {
    Hash whole = hash_;
    whole.add(pending_bytes_, pending_);
    return whole.digits();
  }

 private:
  Hash hash_;
  unsigned char pending_bytes_[8] = {};
  size_t pending_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace lockstep
