#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

#include "base/file_descriptor.h"

namespace lockstep {

/// A file of unsigned little-endian numbers of 1, 2 or 4 bytes, mapped read-only. Threads may read concurrently.
class TokenMap {
 public:
  /// Throws Error naming the file if it cannot be read, is not a regular file, or does not consist of whole tokens.
  TokenMap(std::filesystem::path path, int64_t token_bytes);
  ~TokenMap();
  TokenMap(const TokenMap&) = delete;
  TokenMap& operator=(const TokenMap&) = delete;

  const std::filesystem::path& path() const { return path_; }
  int64_t size() const { return size_; }

  /// Throws Error if the file has become shorter, because the truncated part can no longer be read. Called before
  /// reads; a truncation between this call and the read is not noticed and ends the process by SIGBUS.
  void check_length() const;
  /// Copies tokens first .. first + count - 1. Throws Error if there are no such tokens.
  void read(int64_t first, int64_t count, int64_t* to) const;

 private:
  const std::filesystem::path path_;
  const int64_t token_bytes_;
  FileDescriptor fd_;
  int64_t size_ = 0;
  const std::byte* tokens_ = nullptr;
};

}  // namespace lockstep
