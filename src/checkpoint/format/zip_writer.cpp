#include "checkpoint/format/zip_writer.h"

#include <zlib.h>

#include <algorithm>
#include <future>
#include <stdexcept>
#include <system_error>

namespace lockstep {
namespace {

constexpr uint64_t kAlignment = 64;
constexpr uint64_t kWriteChunk = 256 << 10;  // stays in the cache between the sink's hashing and its copy
constexpr uint64_t kLarge = 1 << 20;         // worth a thread
constexpr uint64_t kSmall = 0xffffffff;
constexpr uint16_t kFlags = 0x0808;  // the checksum follows the bytes; names are UTF-8

uint32_t crc_of(uint32_t before, const unsigned char* bytes, uint64_t size) {
  uLong crc = before;
  for (uint64_t done = 0; done < size; done += kWriteChunk)
    crc = ::crc32(crc, bytes + done, static_cast<uInt>(std::min(kWriteChunk, size - done)));
  return static_cast<uint32_t>(crc);
}

/// Little-endian numbers, one after the other.
class Record {
 public:
  /// In reused memory: a file may have thousands of records.
  explicit Record(std::string& bytes) : bytes_(bytes) { bytes_.clear(); }
  Record& u16(uint64_t value) { return number(value, 2); }
  Record& u32(uint64_t value) { return number(value, 4); }
  Record& u64(uint64_t value) { return number(value, 8); }
  Record& text(const std::string& value) {
    bytes_ += value;
    return *this;
  }
  Record& fill(uint64_t count, char value) {
    bytes_.append(count, value);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  Record& number(uint64_t value, int bytes) {
    char text[8];
    for (int i = 0; i < 8; ++i) text[i] = static_cast<char>(value >> 8 * i);
    bytes_.append(text, static_cast<size_t>(bytes));
    return *this;
  }
  std::string& bytes_;
};

}  // namespace

void ZipWriter::put(const std::string& bytes) {
  sink_.write(bytes.data(), bytes.size());
  position_ += bytes.size();
}

void ZipWriter::add(const std::string& name, std::string_view content) {
  begin(name, content.size());
  append(content.data(), content.size(), /*with_checksum=*/true);
  end();
}

void ZipWriter::begin(const std::string& name, uint64_t bytes) {
  const bool large = bytes >= kSmall;
  Record extra(extra_);
  if (large) extra.u16(1).u16(16).u64(bytes).u64(bytes);
  // PyTorch's field "FB" fills up to the alignment.
  const uint64_t start = position_ + 30 + name.size() + extra.bytes().size() + 4;
  const uint64_t padding = (kAlignment - start % kAlignment) % kAlignment;
  extra.u16(0x4246).u16(padding).fill(padding, 'Z');
  entries_.push_back({name, position_, bytes, 0});
  Record header(record_);
  header.u32(0x04034b50).u16(large ? 45 : 0).u16(kFlags).u16(0).u32(0).u32(0);
  header.u32(large ? kSmall : 0).u32(large ? kSmall : 0).u16(name.size()).u16(extra.bytes().size());
  put(header.text(name).text(extra.bytes()).bytes());
  open_bytes_ = 0;
}

void ZipWriter::append(const void* data, uint64_t size, bool with_checksum) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  open_bytes_ += size;
  if (!with_checksum) return sink_.write(data, size);
  const uint32_t before = entries_.back().crc;
  std::future<uint32_t> sum;
  if (size >= kLarge) {
    try {  // concurrently with writing, which takes about as long
      sum = std::async(std::launch::async, [=] { return crc_of(before, bytes, size); });
    } catch (const std::system_error&) {
      // The system has no more threads.
    }
  }
  if (!sum.valid()) entries_.back().crc = crc_of(before, bytes, size);
  for (uint64_t done = 0; done < size; done += kWriteChunk)
    sink_.write(bytes + done, std::min(kWriteChunk, size - done));
  if (sum.valid()) entries_.back().crc = sum.get();
}

void ZipWriter::end() {
  const Entry& entry = entries_.back();
  if (open_bytes_ != entry.bytes)
    throw std::logic_error("ZipWriter: an entry has another size than it was started with");
  position_ += open_bytes_;
  combined_ = (combined_ ^ entry.crc) * 0x100000001b3 + entry.bytes;
  Record descriptor(record_);
  descriptor.u32(0x08074b50).u32(entry.crc);
  if (entry.bytes >= kSmall)
    descriptor.u64(entry.bytes).u64(entry.bytes);
  else
    descriptor.u32(entry.bytes).u32(entry.bytes);
  put(descriptor.bytes());
}

void ZipWriter::finish() {
  const uint64_t start = position_;
  for (const Entry& entry : entries_) {
    Record extra(extra_);
    if (entry.bytes >= kSmall) extra.u64(entry.bytes).u64(entry.bytes);
    if (entry.header >= kSmall) extra.u64(entry.header);
    const uint64_t extra_bytes = extra.bytes().empty() ? 0 : extra.bytes().size() + 4;
    Record record(record_);
    record.u32(0x02014b50).u16(0).u16(extra_bytes > 0 ? 45 : 0).u16(kFlags).u16(0).u32(0).u32(entry.crc);
    record.u32(std::min(entry.bytes, kSmall)).u32(std::min(entry.bytes, kSmall));
    record.u16(entry.name.size()).u16(extra_bytes).u16(0).u16(0).u16(0).u32(0).u32(std::min(entry.header, kSmall));
    record.text(entry.name);
    if (extra_bytes > 0) record.u16(1).u16(extra.bytes().size()).text(extra.bytes());
    put(record.bytes());
  }
  const uint64_t end = position_, bytes = end - start, count = entries_.size();
  Record tail(record_);
  tail.u32(0x06064b50).u64(44).u16(0x031e).u16(45).u32(0).u32(0).u64(count).u64(count).u64(bytes).u64(start);
  tail.u32(0x07064b50).u32(0).u64(end).u32(1);
  tail.u32(0x06054b50).u16(0).u16(0).u16(std::min<uint64_t>(count, 0xffff)).u16(std::min<uint64_t>(count, 0xffff));
  tail.u32(std::min(bytes, kSmall)).u32(std::min(start, kSmall)).u16(0);
  put(tail.bytes());
}

}  // namespace lockstep
