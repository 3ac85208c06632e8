#include "base/atomic_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "base/error.h"

namespace lockstep {

namespace {

bool has_name(int file, const std::string& name) {
  struct stat open, named;
  return ::fstat(file, &open) == 0 && ::stat(name.c_str(), &named) == 0 && open.st_dev == named.st_dev &&
         open.st_ino == named.st_ino;
}

}  // namespace

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)), partial_(path_ + ".partial") {
  FileDescriptor file;
  do {
    file = FileDescriptor(::open(partial_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
    if (!file) throw_errno("cannot write " + path_);
    // A lock, unlike a name, ends with its process. File systems without locks go without.
    if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
      throw Error("cannot write " + path_ + ": another process is just writing it; let one rank alone save it");
    // Whoever held the lock until now may have taken the file away by its rename.
  } while (!has_name(file.get(), partial_));
  if (::ftruncate(file.get(), 0) != 0) throw_errno("cannot write " + path_);
  file_ = std::move(file);
}

AtomicFile::~AtomicFile() {
  if (file_) ::unlink(partial_.c_str());
}

void AtomicFile::write(const void* data, size_t size) {
  const char* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = ::write(file_.get(), bytes, size);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw_errno("cannot write " + path_);
    bytes += written;
    size -= static_cast<size_t>(written);
  }
}

void AtomicFile::commit() {
  if (::fsync(file_.get()) != 0) throw_errno("cannot sync " + path_);
  if (::rename(partial_.c_str(), path_.c_str()) != 0) throw_errno("cannot put in place " + path_);
  file_.reset();
  auto folder = std::filesystem::path(path_).parent_path();
  if (folder.empty()) folder = ".";
  const FileDescriptor directory(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory || ::fsync(directory.get()) != 0) throw_errno("cannot sync the folder " + folder.string());
}

std::string read_file(const std::string& path) {
  // Not to wait for the writer of a pipe before it is refused.
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status;
  if (!file || ::fstat(file.get(), &status) != 0) throw_errno("cannot read " + path);
  if (!S_ISREG(status.st_mode)) throw Error("cannot read " + path + ": it is no regular file");
  std::string content(static_cast<size_t>(status.st_size), '\0');
  for (size_t done = 0; done < content.size();) {
    const ssize_t count = ::read(file.get(), content.data() + done, content.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_errno("cannot read " + path);
    if (count == 0) throw Error("cannot read " + path + ": it became shorter while it was read");
    done += static_cast<size_t>(count);
  }
  return content;
}

}  // namespace lockstep
