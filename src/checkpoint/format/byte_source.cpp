#include "checkpoint/format/byte_source.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/text.h"

namespace lockstep {

void ByteSource::refuse(const std::string& what) const {
  throw RefusedInput("cannot load " + name_ + ": " + printable(what));
}

void ByteSource::read(uint64_t offset, void* to, uint64_t count) const {
  if (offset > size_ || count > size_ - offset)
    refuse("bytes " + std::to_string(offset) + " to " + std::to_string(offset + count) +
           " were requested, but it has " + std::to_string(size_));
  if (count > 0) copy(offset, static_cast<char*>(to), count);
}

std::string ByteSource::read_text(uint64_t offset, uint64_t count) const {
  if (count > size_) refuse("it is truncated");
  std::string text(count, '\0');
  read(offset, text.data(), count);
  return text;
}

FileSource::FileSource(std::string path) : ByteSource(std::move(path), 0) {
  // A pipe is refused without waiting for its writer.
  file_ = FileDescriptor(::open(name().c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status;
  if (!file_ || ::fstat(file_.get(), &status) != 0) throw_errno<RefusedInput>("cannot read " + name());
  if (!S_ISREG(status.st_mode)) throw RefusedInput("cannot read " + name() + ": it is not a regular file");
  size_ = static_cast<uint64_t>(status.st_size);
}

void FileSource::copy(uint64_t offset, char* to, uint64_t count) const {
  while (count > 0) {
    const ssize_t done = ::pread(file_.get(), to, count, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw_errno<RefusedInput>("cannot read " + name());
    if (done == 0) refuse("it became shorter while it was read");
    to += done;
    offset += static_cast<uint64_t>(done);
    count -= static_cast<uint64_t>(done);
  }
}

void MemorySource::copy(uint64_t offset, char* to, uint64_t count) const {
  std::memcpy(to, bytes_.data() + offset, count);
}

}  // namespace lockstep
