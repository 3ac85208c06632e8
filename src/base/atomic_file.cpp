#include "base/atomic_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "base/error.h"
#include "base/file_operations.h"

namespace lockstep {

namespace {

/// After this many bytes, write-back is started without waiting for it, so that the final sync has little left to do.
constexpr size_t kWriteBehindBytes = 8 << 20;
constexpr off_t kCachedBytes = 256 << 20;

}  // namespace

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)), partial_(path_ + ".partial") {
  FileDescriptor file;
  do {
    file = FileDescriptor(file_operations().open(partial_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
    if (!file) throw_errno<StorageError>("cannot write " + path_);
    // Unlike a name, a lock ends with its process. File systems without locks are used without.
    if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
      throw StorageError("cannot write " + path_ + ": another process is writing it; let only one rank save it");
    // The previous holder of the lock may have renamed the file.
  } while (!has_name(file.get(), partial_));
  if (file_operations().truncate(file.get(), 0) != 0) throw_errno<StorageError>("cannot write " + path_);
  file_ = std::move(file);
}

AtomicFile::~AtomicFile() {
  if (file_) file_operations().unlink(partial_.c_str());
}

void AtomicFile::write(const void* data, size_t size) {
  const char* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = file_operations().write(file_.get(), bytes, size);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw_errno<StorageError>("cannot write " + path_);
    bytes += written;
    size -= static_cast<size_t>(written);
    unstarted_ += static_cast<size_t>(written);
    end_ += written;
  }
  if (unstarted_ >= kWriteBehindBytes) write_behind();
}

void AtomicFile::write_behind() {
  // If the file system does not support the calls, nothing is lost.
  ::sync_file_range(file_.get(), end_ - static_cast<off_t>(unstarted_), static_cast<off_t>(unstarted_),
                    SYNC_FILE_RANGE_WRITE);
  unstarted_ = 0;
  const off_t old = end_ - kCachedBytes - given_up_;
  if (old <= 0) return;
  ::sync_file_range(file_.get(), given_up_, old,
                    SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  ::posix_fadvise(file_.get(), given_up_, old, POSIX_FADV_DONTNEED);
  given_up_ += old;
}

void AtomicFile::commit() {
  if (file_operations().sync(file_.get()) != 0) throw_errno<StorageError>("cannot sync " + path_);
  if (file_operations().rename(partial_.c_str(), path_.c_str()) != 0)
    throw_errno<StorageError>("cannot rename the finished file to " + path_);
  file_.reset();
  sync_folder(std::filesystem::path(path_).parent_path());
}

void sync_folder(const std::string& folder) {
  const std::string name = folder.empty() ? "." : folder;
  const FileDescriptor directory(file_operations().open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
  if (!directory || file_operations().sync(directory.get()) != 0)
    throw_errno<StorageError>("cannot sync the folder " + name);
}

std::string read_file(const std::string& path) {
  // O_NONBLOCK: a pipe is refused without waiting for its writer.
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status;
  if (!file || ::fstat(file.get(), &status) != 0) throw_errno<RefusedInput>("cannot read " + path);
  if (!S_ISREG(status.st_mode)) throw RefusedInput("cannot read " + path + ": it is not a regular file");
  std::string content(static_cast<size_t>(status.st_size), '\0');
  for (size_t done = 0; done < content.size();) {
    const ssize_t count = ::read(file.get(), content.data() + done, content.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_errno<RefusedInput>("cannot read " + path);
    if (count == 0) throw RefusedInput("cannot read " + path + ": it shrank while it was read");
    done += static_cast<size_t>(count);
  }
  return content;
}

}  // namespace lockstep
