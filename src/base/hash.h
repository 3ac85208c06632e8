#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace lockstep {

/// 64-bit FNV-1a (Fowler, Noll, Vo), over eight bytes at a time while that many remain. Finds damage, not forgery. The
/// result depends on how the bytes are split over calls of add(), unless every piece but the last is a multiple of
/// eight bytes.
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
  uint64_t value() const { return value_; }
  std::string digits() const {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value_));
    return text;
  }

  static constexpr uint64_t kStart = 0xcbf29ce484222325;
  static uint64_t mixed(uint64_t value, uint64_t word) {
    value = (value ^ word) * 0x100000001b3;
    return value ^ value >> 32;  // lets the high bits of a word reach the low bits of the hash
  }

 private:
  void mix(uint64_t word) { value_ = mixed(value_, word); }
  uint64_t value_ = kStart;
};

/// A hash of a stream, independent of how the stream is split. Computes four hashes as above, in parallel on the
/// processor: eight-byte word n belongs to hash n % 4. The remainder and the number of bytes come last.
class StreamHash {
 public:
  void add(const void* data, size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    bytes_ += size;
    if (pending_ > 0) {
      const size_t count = std::min(size, kBlock - pending_);
      std::memcpy(block_ + pending_, bytes, count);
      pending_ += count;
      bytes += count;
      size -= count;
      if (pending_ < kBlock) return;
      add_blocks(block_, 1);
      pending_ = 0;
    }
    add_blocks(bytes, size / kBlock);
    pending_ = size % kBlock;
    if (pending_ > 0) std::memcpy(block_, bytes + (size - pending_), pending_);
  }
  uint64_t bytes() const { return bytes_; }
  std::string digits() const {
    Hash whole;
    whole.add(lanes_, sizeof lanes_);
    whole.add(block_, pending_);
    whole.add(&bytes_, sizeof bytes_);
    return whole.digits();
  }

 private:
  static constexpr size_t kBlock = 32;

  void add_blocks(const unsigned char* bytes, size_t count) {
    uint64_t a = lanes_[0], b = lanes_[1], c = lanes_[2], d = lanes_[3];
    for (; count > 0; --count, bytes += kBlock) {
      uint64_t words[4];
      std::memcpy(words, bytes, sizeof words);
      a = Hash::mixed(a, words[0]);
      b = Hash::mixed(b, words[1]);
      c = Hash::mixed(c, words[2]);
      d = Hash::mixed(d, words[3]);
    }
    lanes_[0] = a;
    lanes_[1] = b;
    lanes_[2] = c;
    lanes_[3] = d;
  }

  uint64_t lanes_[4] = {Hash::kStart, Hash::kStart + 1, Hash::kStart + 2, Hash::kStart + 3};
  unsigned char block_[kBlock] = {};
  size_t pending_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace lockstep
