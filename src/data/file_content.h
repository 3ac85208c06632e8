#pragma once

#include <zlib.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/file_descriptor.h"

namespace lockstep::file_content {

/// Throws Error("<path>: <what>").
[[noreturn]] void fail(const std::filesystem::path& path, const std::string& what);
/// "1f 8b 08"
std::string hex(const uint8_t* bytes, size_t count);

/// The bytes of a regular file, front to back. Throws Error naming the file if it cannot be read or is not a regular
/// file.
class PlainFile {
 public:
  explicit PlainFile(const std::filesystem::path& path);

  /// Fewer than `bytes` only at the end of the file.
  size_t read(uint8_t* to, size_t bytes);
  int64_t file_bytes() const { return file_bytes_; }
  /// The most content that this file can hold.
  int64_t greatest_content_bytes() const { return file_bytes_; }
  bool cut_short() const { return false; }

 private:
  const std::filesystem::path path_;
  const FileDescriptor fd_;
  int64_t file_bytes_ = 0;
};

/// The content of a gzip file with one stream, whose checksum is verified at the end. Throws Error naming the file if
/// it is corrupt.
class GzipFile {
 public:
  enum class Trailing { kRefuse, kIgnore };
  explicit GzipFile(const std::filesystem::path& path, Trailing trailing = Trailing::kRefuse);
  ~GzipFile() { inflateEnd(&stream_); }
  GzipFile(const GzipFile&) = delete;
  GzipFile& operator=(const GzipFile&) = delete;

  /// Fewer than `bytes` only if the stream has ended, or the file too early.
  size_t read(uint8_t* to, size_t bytes);
  int64_t file_bytes() const { return file_.file_bytes(); }
  int64_t greatest_content_bytes() const;
  bool cut_short() const { return state_ == State::kCutShort; }

 private:
  enum class State { kInside, kEnded, kCutShort };

  bool refill();
  void check_nothing_follows();

  const std::filesystem::path path_;
  const Trailing trailing_;
  PlainFile file_;
  std::vector<uint8_t> input_;
  int64_t consumed_to_ = 0;  // bytes of the file read into input_ so far
  z_stream stream_{};
  State state_ = State::kInside;
};

/// All of a regular file of at most `limit` bytes.
std::vector<uint8_t> read_whole(const std::filesystem::path& path, int64_t limit);

}  // namespace lockstep::file_content
