#include "observe/growing_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/file_operations.h"

namespace lockstep {
namespace {

bool is_want_of_space(int error) { return error == ENOSPC || error == EDQUOT; }

}  // namespace

GrowingFile::GrowingFile(std::string path, std::string what, std::chrono::milliseconds flush_interval)
    : path_(std::move(path)), what_(std::move(what)), flush_interval_(flush_interval), flushed_(coarse_now()) {
  if (open()) return;
  if (!is_want_of_space(errno)) throw_errno<StorageError>("cannot write " + what_ + " " + path_);
  drop(errno);
}

GrowingFile::~GrowingFile() { flush(); }

bool GrowingFile::open() {
  file_ = FileDescriptor(file_operations().open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!file_) return false;
  end_ = ::lseek(file_.get(), 0, SEEK_END);
  if (end_ < 0) end_ = 0;
  return true;
}

void GrowingFile::append(std::string_view record) {
  waiting_ += record;
  ++records_waiting_;
  if (waiting_.size() >= kMostBytes || coarse_now() - flushed_ >= flush_interval_) flush();
}

void GrowingFile::flush() {
  flushed_ = coarse_now();
  if (records_waiting_ == 0) return;
  if (torn_ || (!file_ && !open()) || !write_whole()) drop(errno);
  waiting_.clear();
  records_waiting_ = 0;
}

bool GrowingFile::write_whole() {
  for (size_t done = 0; done < waiting_.size();) {
    const ssize_t written = file_operations().write(file_.get(), waiting_.data() + done, waiting_.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      const int error = written < 0 ? errno : EIO;
      torn_ = done > 0 && file_operations().truncate(file_.get(), end_) != 0;
      errno = error;
      return false;
    }
    done += static_cast<size_t>(written);
  }
  end_ += static_cast<int64_t>(waiting_.size());
  return true;
}

void GrowingFile::drop(int error) {
  lost_ += records_waiting_;
  if (std::exchange(warned_, true)) return;
  const std::string text = "lockstep: " + what_ + " " + path_ + " cannot be written (" + std::strerror(error) +
                           "); training goes on, and the file lacks what could not be written\n";
  std::fputs(text.c_str(), stderr);
}

}  // namespace lockstep
