#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/format/byte_source.h"

namespace lockstep {

struct ZipEntry {
  std::string name;
  uint64_t offset;  ///< of its first byte in the file
  uint64_t bytes;
  uint32_t crc;     ///< 0 if the writer computed none
  bool compressed;  ///< refused when read
};

/// A zip archive of stored entries, as torch.save writes it. Compressed entries are listed, but cannot be read. Only
/// the central directory is used, and every number in it is checked against the size of the file. Overlapping entries
/// are refused, so together they are never larger than the file. Names are only compared, never opened.
class ZipReader {
 public:
  /// Throws Error naming the file and, if applicable, the entry. `source` outlives this.
  explicit ZipReader(const ByteSource& source);

  const std::vector<ZipEntry>& entries() const { return entries_; }
  /// Null if none.
  const ZipEntry* find(const std::string& name) const;

  /// Copies the entry to `to`, which must have room for it. Throws Error if its checksum is wrong or it is compressed.
  void read(const ZipEntry& entry, void* to) const;
  void check_stored(const ZipEntry& entry) const;
  /// The entry as a string. Throws Error if it is larger than `limit`.
  std::string read_text(const ZipEntry& entry, uint64_t limit) const;

 private:
  struct Directory {
    uint64_t offset, bytes, count;
  };
  Directory find_directory() const;
  Directory read_zip64_end(uint64_t end) const;
  void read_directory(const Directory& directory);
  /// The entry whose record starts at `at` in `text`, and the offset of its local header. Moves `at` past the record.
  ZipEntry read_record(const std::string& text, size_t& at, uint64_t& header) const;
  uint64_t data_offset(const ZipEntry& entry, uint64_t header, uint64_t limit) const;

  const ByteSource& source_;
  std::vector<ZipEntry> entries_;
  std::unordered_map<std::string, size_t> by_name_;
};

}  // namespace lockstep
