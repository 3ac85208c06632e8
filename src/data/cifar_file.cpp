// zlib unpacks (and verifies the checksum, which libarchive's own filter does not); libarchive reads the tar inside.

#include "data/cifar_file.h"
#include "base/error.h"

#include <archive.h>
#include <archive_entry.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "base/text.h"
#include "data/file_content.h"

namespace lockstep {
namespace {

using file_content::fail;
using file_content::GzipFile;
using file_content::PlainFile;
namespace fs = std::filesystem;

constexpr int64_t kPixels = int64_t{3} * 32 * 32;
constexpr int64_t kGreatestUnpacked = int64_t{512} << 20;  // the real archives unpack to 185 MB
constexpr size_t kChunkBytes = 1 << 18;

int64_t record_bytes(const CifarLayout& layout) { return kPixels + static_cast<int64_t>(layout.classes.size()); }

// ---- records ----

/// Checks the size of a file of records before anything is allocated for it.
void check_size(const std::string& name, int64_t bytes, const CifarLayout& layout) {
  const int64_t record = record_bytes(layout);
  if (bytes <= 0 || bytes % record != 0)
    throw RefusedInput(name + ": expected whole records of " + std::to_string(record) + " bytes, found " +
                       std::to_string(bytes) + " bytes" +
                       (bytes > record ? ", " + std::to_string(bytes % record) + " too many" : ""));
  if (bytes / record > layout.greatest_records)
    throw RefusedInput(name + ": expected at most " + std::to_string(layout.greatest_records) + " images, found " +
                       std::to_string(bytes / record));
}

/// Appends `bytes` bytes of records, read by `read(to, count)`, which returns fewer only at the end of the file.
void append_records(const std::string& name, int64_t bytes, const CifarLayout& layout,
                    const std::function<size_t(uint8_t*, size_t)>& read, CifarImages& images) {
  const int64_t record = record_bytes(layout), labels = static_cast<int64_t>(layout.classes.size());
  images.pixels.reserve(images.pixels.size() + static_cast<size_t>(bytes / record * kPixels));
  std::vector<uint8_t> buffer(static_cast<size_t>(std::min<int64_t>(bytes, 64 * record)));
  for (int64_t done = 0; done < bytes;) {
    const int64_t wanted = std::min<int64_t>(bytes - done, static_cast<int64_t>(buffer.size()));
    const auto got = static_cast<int64_t>(read(buffer.data(), static_cast<size_t>(wanted)));
    if (got < wanted)
      throw RefusedInput(name + ": is truncated: expected " + std::to_string(bytes) + " bytes, found " +
                         std::to_string(done + got));
    for (const uint8_t* at = buffer.data(); at < buffer.data() + wanted; at += record) {
      for (int64_t i = 0; i < labels; ++i)
        if (at[i] >= layout.classes[static_cast<size_t>(i)])
          throw RefusedInput(name + ": label " + std::to_string(at[i]) + " of the image at byte " +
                             std::to_string(done + (at - buffer.data())) + ", expected 0 to " +
                             std::to_string(layout.classes[static_cast<size_t>(i)] - 1));
      images.labels.insert(images.labels.end(), at, at + labels);
      images.pixels.insert(images.pixels.end(), at + labels, at + record);
    }
    done += wanted;
  }
}

CifarImages read_folder(const fs::path& folder, const CifarLayout& layout) {
  CifarImages images;
  for (const std::string& member : layout.members) {
    const fs::path path = folder / member;
    PlainFile file(path);
    check_size(path.string(), file.file_bytes(), layout);
    append_records(
        path.string(), file.file_bytes(), layout, [&](uint8_t* to, size_t bytes) { return file.read(to, bytes); },
        images);
  }
  return images;
}

// ---- archives ----

/// A tar file inside gzip. libarchive calls `give` for content; exceptions are kept in `failure_` until libarchive,
/// which is C, has returned.
class TarGz {
 public:
  explicit TarGz(const fs::path& path)
      : path_(path),
        content_(path, GzipFile::Trailing::kIgnore),
        buffer_(kChunkBytes),
        archive_(archive_read_new(), archive_read_free) {
    if (archive_ == nullptr || archive_read_support_format_tar(archive_.get()) != ARCHIVE_OK)
      fail(path, "libarchive cannot start");
    check(archive_read_open2(archive_.get(), this, nullptr, give, nullptr, nullptr));
  }

  /// The next entry, or null at the end of the archive.
  archive_entry* next() {
    archive_entry* entry = nullptr;
    const int code = archive_read_next_header(archive_.get(), &entry);
    if (code == ARCHIVE_EOF) return nullptr;
    check(code);
    return entry;
  }

  /// Fewer than `bytes` only at the end of the entry.
  size_t read(uint8_t* to, size_t bytes) {
    size_t done = 0;
    while (done < bytes) {
      const la_ssize_t got = archive_read_data(archive_.get(), to + done, bytes - done);
      if (got <= 0) {
        check(static_cast<int>(got));
        break;
      }
      done += static_cast<size_t>(got);
    }
    return done;
  }

  /// Called after the last entry: reads to the end of the gzip stream, where the checksum is.
  void finish() {
    while (unpack() > 0) {
    }
    if (content_.cut_short())
      fail(path_, "is truncated: expected the end of the gzip stream, found the end of the file after " +
                      std::to_string(content_.file_bytes()) + " bytes");
  }

 private:
  static la_ssize_t give(archive*, void* self, const void** bytes) {
    auto* mine = static_cast<TarGz*>(self);
    try {
      *bytes = mine->buffer_.data();
      return static_cast<la_ssize_t>(mine->unpack());
    } catch (...) {
      mine->failure_ = std::current_exception();
      return ARCHIVE_FATAL;
    }
  }

  size_t unpack() {
    const size_t got = content_.read(buffer_.data(), buffer_.size());
    unpacked_ += static_cast<int64_t>(got);
    if (unpacked_ > kGreatestUnpacked)
      fail(path_, "unpacks to more than " + std::to_string(kGreatestUnpacked) + " bytes, found after " +
                      std::to_string(content_.file_bytes()) + " bytes of file at most; this is not a CIFAR archive");
    return got;
  }

  void check(int code) {
    if (failure_ != nullptr) rethrow(std::exchange(failure_, nullptr));
    // Warnings concern names in an odd encoding and the like.
    if (code == ARCHIVE_OK || code == ARCHIVE_WARN || code > 0) return;
    const char* why = archive_error_string(archive_.get());
    fail(path_, std::string(content_.cut_short() ? "is truncated" : "is a corrupt archive") + " after " +
                    std::to_string(unpacked_) + " unpacked bytes: " + printable(why != nullptr ? why : "no tar"));
  }

  const fs::path path_;
  GzipFile content_;
  int64_t unpacked_ = 0;
  std::vector<uint8_t> buffer_;
  std::exception_ptr failure_;
  std::unique_ptr<archive, int (*)(archive*)> archive_;  // last: it uses the others
};

/// The member in an entry, judged by its name only: "folder/member" or "./folder/member".
std::optional<std::string> member_of(archive_entry* entry, const CifarLayout& layout) {
  const char* text = archive_entry_pathname(entry);
  if (text == nullptr) return {};
  std::string name = text;
  if (name.starts_with("./")) name.erase(0, 2);
  for (const std::string& member : layout.members)
    if (name == layout.folder + "/" + member) return member;
  return {};
}

CifarImages read_archive(const fs::path& path, const CifarLayout& layout) {
  TarGz tar(path);
  std::map<std::string, CifarImages> found;
  while (archive_entry* entry = tar.next()) {
    const std::optional<std::string> member = member_of(entry, layout);
    if (!member) continue;
    const std::string name = path.string() + ": " + layout.folder + "/" + *member;
    if (archive_entry_filetype(entry) != AE_IFREG || archive_entry_hardlink(entry) != nullptr)
      throw RefusedInput(name + ": expected a file, found a link, a folder or a device");
    if (found.contains(*member)) throw RefusedInput(name + ": is in the archive twice");
    const int64_t bytes = archive_entry_size_is_set(entry) != 0 ? archive_entry_size(entry) : 0;
    check_size(name, bytes, layout);
    append_records(
        name, bytes, layout, [&](uint8_t* to, size_t count) { return tar.read(to, count); }, found[*member]);
  }
  tar.finish();
  CifarImages images;
  size_t pixels = 0;
  for (const auto& [member, part] : found) pixels += part.pixels.size();
  images.pixels.reserve(pixels);
  for (const std::string& member : layout.members) {
    if (!found.contains(member))
      throw RefusedInput(path.string() + ": contains no " + layout.folder + "/" + member + ". " + layout.remedy);
    const CifarImages& part = found[member];
    images.pixels.insert(images.pixels.end(), part.pixels.begin(), part.pixels.end());
    images.labels.insert(images.labels.end(), part.labels.begin(), part.labels.end());
    found.erase(member);
  }
  return images;
}

}  // namespace

CifarImages read_cifar(const fs::path& path, const CifarLayout& layout) {
  std::error_code ignored;
  if (fs::is_regular_file(path, ignored)) return read_archive(path, layout);
  if (!fs::is_directory(path, ignored))
    throw RefusedInput("data folder or archive '" + path.string() + "' does not exist. " + layout.remedy);
  for (const fs::path& folder : {path, path / layout.folder})
    if (fs::exists(folder / layout.members.front(), ignored)) return read_folder(folder, layout);
  if (fs::exists(path / layout.archive, ignored)) return read_archive(path / layout.archive, layout);
  throw RefusedInput("data folder '" + path.string() + "' contains neither " + layout.members.front() + ", nor " +
                     layout.folder + ", nor " + layout.archive + ". " + layout.remedy);
}

}  // namespace lockstep
