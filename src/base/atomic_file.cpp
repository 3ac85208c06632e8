#include "base/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "base/error.h"

namespace lockstep {

AtomicFile::AtomicFile(std::string path)
    : path_(std::move(path)),
      temporary_(path_ + ".partial-" + std::to_string(::getpid())),
      file_(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
  if (!file_) throw_errno("cannot write " + path_);
}

AtomicFile::~AtomicFile() {
  if (file_) ::unlink(temporary_.c_str());
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
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) throw_errno("cannot put in place " + path_);
  file_.reset();
  auto folder = std::filesystem::path(path_).parent_path();
  if (folder.empty()) folder = ".";
  const FileDescriptor directory(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory || ::fsync(directory.get()) != 0) throw_errno("cannot sync the folder " + folder.string());
}

std::string read_file(const std::string& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
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
