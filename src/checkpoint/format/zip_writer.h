#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/atomic_file.h"

namespace lockstep {

/// Writes a zip archive of stored entries as PyTorch does. The bytes of each entry start at a multiple of 64, so that a
/// reader may map the file. The checksum follows the bytes, so that it is computed while they are written, for large
/// pieces on another thread.
class ZipWriter {
 public:
  enum class Checksums {
    kAll,
    kWholeEntries,  ///< only of entries from add(); entries in pieces have none
  };
  explicit ZipWriter(ByteSink& sink, Checksums checksums = Checksums::kAll) : sink_(sink), checksums_(checksums) {}

  void add(const std::string& name, std::string_view content);
  /// Adds an entry in pieces that total `bytes`.
  void begin(const std::string& name, uint64_t bytes);
  void append(const void* data, uint64_t size) { append(data, size, checksums_ == Checksums::kAll); }
  void end();
  /// Writes the directory, which ends the archive.
  void finish();

  /// The combined checksum so far.
  uint64_t combined_crc() const { return combined_; }

 private:
  struct Entry {
    std::string name;
    uint64_t header, bytes;
    uint32_t crc;
  };
  void put(const std::string& bytes);
  void append(const void* data, uint64_t size, bool with_checksum);

  ByteSink& sink_;
  const Checksums checksums_;
  std::vector<Entry> entries_;
  std::string record_, extra_;  ///< being assembled
  uint64_t position_ = 0;
  uint64_t open_bytes_ = 0;  ///< bytes of the unfinished entry written so far
  uint64_t combined_ = 0;
};

}  // namespace lockstep
