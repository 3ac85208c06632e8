#include "data/file_content.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"

namespace lockstep::file_content {
namespace {

constexpr int64_t kGreatestExpansion = 1032;  // of deflate, by zlib's technical details
constexpr size_t kChunkBytes = 1 << 18;

}  // namespace

void fail(const std::filesystem::path& path, const std::string& what) {
  throw RefusedInput(path.string() + ": " + what);
}

std::string hex(const uint8_t* bytes, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    static constexpr char kDigits[] = "0123456789abcdef";
    if (i > 0) text += ' ';
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

PlainFile::PlainFile(const std::filesystem::path& path)
    // O_NONBLOCK refuses a pipe without waiting for its writer.
    : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (!fd_) throw_errno<RefusedInput>("opening " + path.string());
  struct stat status;
  if (::fstat(fd_.get(), &status) != 0) throw_errno<RefusedInput>("reading " + path.string());
  if (!S_ISREG(status.st_mode)) fail(path, "is not a regular file");
  file_bytes_ = status.st_size;
}

size_t PlainFile::read(uint8_t* to, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t got = ::read(fd_.get(), to + done, bytes - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno<RefusedInput>("reading " + path_.string());
    if (got == 0) break;
    done += got;
  }
  return done;
}

GzipFile::GzipFile(const std::filesystem::path& path, Trailing trailing)
    : path_(path), trailing_(trailing), file_(path), input_(kChunkBytes) {
  refill();
  if (stream_.avail_in < 2 || input_[0] != 0x1f || input_[1] != 0x8b)
    fail(path, "is not a gzip file: expected it to start with 1f 8b, found " +
                   (stream_.avail_in == 0 ? "nothing" : hex(input_.data(), std::min<size_t>(stream_.avail_in, 4))));
  constexpr int kGzipOnly = 16;
  if (inflateInit2(&stream_, kGzipOnly + MAX_WBITS) != Z_OK) fail(path, "zlib cannot start");
}

size_t GzipFile::read(uint8_t* to, size_t bytes) {
  size_t done = 0;
  while (done < bytes && state_ == State::kInside) {
    if (stream_.avail_in == 0 && !refill()) {
      state_ = State::kCutShort;
      break;
    }
    stream_.next_out = to + done;
    stream_.avail_out = static_cast<uInt>(std::min(bytes - done, kChunkBytes));
    const uInt room = stream_.avail_out;
    const int code = inflate(&stream_, Z_NO_FLUSH);
    done += room - stream_.avail_out;
    if (code == Z_STREAM_END) {
      state_ = State::kEnded;
      if (trailing_ == Trailing::kRefuse) check_nothing_follows();
    } else if (code != Z_OK) {
      fail(path_, std::string("is a corrupt gzip file: ") + (stream_.msg != nullptr ? stream_.msg : zError(code)));
    }
  }
  return done;
}

int64_t GzipFile::greatest_content_bytes() const { return file_.file_bytes() * kGreatestExpansion; }

bool GzipFile::refill() {
  stream_.next_in = input_.data();
  stream_.avail_in = static_cast<uInt>(file_.read(input_.data(), input_.size()));
  consumed_to_ += stream_.avail_in;
  return stream_.avail_in > 0;
}

void GzipFile::check_nothing_follows() {
  const int64_t stream_bytes = consumed_to_ - stream_.avail_in;
  if (stream_bytes < file_.file_bytes())
    fail(path_, "has trailing bytes: the gzip stream ends after " + std::to_string(stream_bytes) + " bytes, found " +
                    std::to_string(file_.file_bytes()));
}

std::vector<uint8_t> read_whole(const std::filesystem::path& path, int64_t limit) {
  PlainFile file(path);
  if (file.file_bytes() > limit)
    fail(path, "is too large: at most " + std::to_string(limit) + " bytes expected, found " +
                   std::to_string(file.file_bytes()));
  std::vector<uint8_t> bytes(static_cast<size_t>(file.file_bytes()));
  const size_t found = file.read(bytes.data(), bytes.size());
  if (found < bytes.size())
    fail(path, "became shorter while it was read: expected " + std::to_string(bytes.size()) + " bytes, found " +
                   std::to_string(found));
  return bytes;
}

}  // namespace lockstep::file_content
