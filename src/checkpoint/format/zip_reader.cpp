#include "checkpoint/format/zip_reader.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>

// Source: PKWARE's APPNOTE.TXT, sections 4.3.7 (local header), 4.3.12 (central directory), 4.3.14 to 4.3.16 (ends) and
// 4.5.3 (the extra field of 64-bit sizes).

namespace lockstep {
namespace {

constexpr uint32_t kLocalHeader = 0x04034b50, kRecord = 0x02014b50, kEnd = 0x06054b50, kEnd64 = 0x06064b50,
                   kEnd64Locator = 0x07064b50;
constexpr uint64_t kLocalHeaderBytes = 30, kRecordBytes = 46, kEndBytes = 22, kEnd64Bytes = 56, kLocatorBytes = 20;
constexpr uint64_t kMaxCommentBytes = 65535;
constexpr uint64_t kMaxDirectoryBytes = 256 << 20;
constexpr uint64_t kReadChunk = 256 << 10;  // stays in the cache between its copy and its checksum

template <typename T>
T number(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

/// Replaces sizes that are all ones by those of the extra field of 64-bit sizes. Returns false if one is missing there.
bool widen(const char* extra, size_t bytes, std::initializer_list<uint64_t*> values) {
  const bool needed =
      std::any_of(values.begin(), values.end(), [](const uint64_t* value) { return *value == 0xffffffff; });
  if (!needed) return true;
  for (size_t at = 0; at + 4 <= bytes;) {
    const auto id = number<uint16_t>(extra + at);
    const size_t length = number<uint16_t>(extra + at + 2);
    at += 4;
    if (length > bytes - at) return false;
    if (id == 1) {
      size_t from = at;
      for (uint64_t* value : values) {
        if (*value != 0xffffffff) continue;
        if (from + 8 > at + length) return false;
        *value = number<uint64_t>(extra + from);
        from += 8;
      }
      return true;
    }
    at += length;
  }
  return false;
}

}  // namespace

ZipReader::ZipReader(const ByteSource& source) : source_(source) { read_directory(find_directory()); }

ZipReader::Directory ZipReader::find_directory() const {
  const uint64_t size = source_.size();
  const uint64_t tail_bytes = std::min(size, kEndBytes + kMaxCommentBytes);
  if (size < kEndBytes) source_.refuse("it has " + std::to_string(size) + " bytes, too few for a zip archive");
  const std::string tail = source_.read_text(size - tail_bytes, tail_bytes);
  for (size_t at = tail.size() - kEndBytes + 1; at-- > 0;) {
    const char* record = tail.data() + at;
    if (number<uint32_t>(record) != kEnd || number<uint16_t>(record + 20) != tail.size() - at - kEndBytes) continue;
    const uint64_t end = size - tail_bytes + at;
    if (end >= kLocatorBytes) {
      const std::string locator = source_.read_text(end - kLocatorBytes, kLocatorBytes);
      if (number<uint32_t>(locator.data()) == kEnd64Locator) {
        const auto place = number<uint64_t>(locator.data() + 8);
        if (place > end - kLocatorBytes || end - kLocatorBytes - place < kEnd64Bytes)
          source_.refuse("the end of its zip directory is damaged");
        return read_zip64_end(place);
      }
    }
    return {number<uint32_t>(record + 16), number<uint32_t>(record + 12), number<uint16_t>(record + 10)};
  }
  source_.refuse("it has no zip directory at its end; it is truncated, or of another format");
}

ZipReader::Directory ZipReader::read_zip64_end(uint64_t end) const {
  const std::string record = source_.read_text(end, kEnd64Bytes);
  if (number<uint32_t>(record.data()) != kEnd64) source_.refuse("the end of its zip directory is damaged");
  return {number<uint64_t>(record.data() + 48), number<uint64_t>(record.data() + 40),
          number<uint64_t>(record.data() + 32)};
}

void ZipReader::read_directory(const Directory& directory) {
  const uint64_t size = source_.size();
  if (directory.offset > size || directory.bytes > size - directory.offset || directory.bytes > kMaxDirectoryBytes ||
      directory.count > directory.bytes / kRecordBytes)
    source_.refuse("its zip directory of " + std::to_string(directory.count) + " entries should take " +
                   std::to_string(directory.bytes) + " bytes at " + std::to_string(directory.offset) + " of " +
                   std::to_string(size));
  const std::string text = source_.read_text(directory.offset, directory.bytes);
  size_t at = 0;
  std::vector<std::pair<uint64_t, size_t>> headers;  // positions of the local headers, with their entries
  for (uint64_t i = 0; i < directory.count; ++i) {
    uint64_t header = 0;
    ZipEntry entry = read_record(text, at, header);
    entry.offset = data_offset(entry, header, directory.offset);
    headers.emplace_back(header, entries_.size());
    if (!by_name_.emplace(entry.name, entries_.size()).second)
      source_.refuse("its zip directory has the entry `" + entry.name + "` twice");
    entries_.push_back(std::move(entry));
  }
  std::sort(headers.begin(), headers.end());
  for (size_t i = 0; i + 1 < headers.size(); ++i) {
    const ZipEntry& entry = entries_[headers[i].second];
    if (entry.offset + entry.bytes > headers[i + 1].first)
      source_.refuse("its entries `" + entry.name + "` and `" + entries_[headers[i + 1].second].name + "` overlap");
  }
}

ZipEntry ZipReader::read_record(const std::string& text, size_t& at, uint64_t& header) const {
  if (text.size() - at < kRecordBytes) source_.refuse("its zip directory is shorter than its number of entries");
  const char* record = text.data() + at;
  if (number<uint32_t>(record) != kRecord) source_.refuse("its zip directory is damaged");
  const auto flags = number<uint16_t>(record + 8), method = number<uint16_t>(record + 10);
  const size_t name_bytes = number<uint16_t>(record + 28), extra_bytes = number<uint16_t>(record + 30),
               comment_bytes = number<uint16_t>(record + 32);
  if (text.size() - at - kRecordBytes < name_bytes + extra_bytes + comment_bytes)
    source_.refuse("its zip directory is shorter than its entries");
  ZipEntry entry{
      .name = std::string(record + kRecordBytes, name_bytes), .offset = 0, .bytes = 0, .crc = 0, .compressed = false};
  entry.crc = number<uint32_t>(record + 16);
  entry.bytes = number<uint32_t>(record + 24);
  uint64_t packed = number<uint32_t>(record + 20);
  header = number<uint32_t>(record + 42);
  if (!widen(record + kRecordBytes + name_bytes, extra_bytes, {&entry.bytes, &packed, &header}))
    source_.refuse("the entry `" + entry.name + "` of its zip directory lacks its 64-bit size");
  entry.compressed = method != 0 || packed != entry.bytes;
  entry.bytes = packed;
  if ((flags & 1) != 0) source_.refuse("its entry `" + entry.name + "` is encrypted");
  at += kRecordBytes + name_bytes + extra_bytes + comment_bytes;
  return entry;
}

uint64_t ZipReader::data_offset(const ZipEntry& entry, uint64_t header, uint64_t limit) const {
  const auto outside = [&] {
    source_.refuse("its entry `" + entry.name + "` of " + std::to_string(entry.bytes) + " bytes does not lie within " +
                   std::to_string(limit) + " bytes; it is truncated or damaged");
  };
  const uint64_t least = kLocalHeaderBytes + entry.name.size();
  if (header > limit || limit - header < least) outside();
  const std::string text = source_.read_text(header, least);
  if (number<uint32_t>(text.data()) != kLocalHeader || number<uint16_t>(text.data() + 26) != entry.name.size() ||
      text.compare(kLocalHeaderBytes, std::string::npos, entry.name) != 0)
    source_.refuse("its entry `" + entry.name + "` is not where its zip directory says");
  const uint64_t offset = header + least + number<uint16_t>(text.data() + 28);
  if (offset > limit || limit - offset < entry.bytes) outside();
  return offset;
}

const ZipEntry* ZipReader::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &entries_[found->second];
}

void ZipReader::check_stored(const ZipEntry& entry) const {
  if (entry.compressed)
    source_.refuse("its entry `" + entry.name + "` is compressed; torch.save stores entries as they are");
}

void ZipReader::read(const ZipEntry& entry, void* to) const {
  check_stored(entry);
  auto* bytes = static_cast<unsigned char*>(to);
  uLong crc = ::crc32(0, nullptr, 0);
  for (uint64_t done = 0; done < entry.bytes;) {
    const uint64_t count = std::min(kReadChunk, entry.bytes - done);
    source_.read(entry.offset + done, bytes + done, count);
    if (entry.crc != 0) crc = ::crc32(crc, bytes + done, static_cast<uInt>(count));
    done += count;
  }
  if (entry.crc != 0 && entry.crc != crc)
    source_.refuse("its entry `" + entry.name + "` is damaged: its checksum is wrong");
}

std::string ZipReader::read_text(const ZipEntry& entry, uint64_t limit) const {
  if (entry.bytes > limit)
    source_.refuse("its entry `" + entry.name + "` has " + std::to_string(entry.bytes) + " bytes; more than " +
                   std::to_string(limit) + " are not read");
  std::string text(entry.bytes, '\0');
  read(entry, text.data());
  return text;
}

}  // namespace lockstep
