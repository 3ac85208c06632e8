#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace lockstep {

/// A file with the fuzzer's bytes, for readers that open paths; removed when it goes.
class FuzzFile {
 public:
  FuzzFile(const uint8_t* data, size_t size, const std::string& suffix) : path_("/tmp/lockstep_fuzz_XXXXXX" + suffix) {
    const int file = ::mkstemps(path_.data(), static_cast<int>(suffix.size()));
    if (file < 0 || ::write(file, data, size) != static_cast<ssize_t>(size))
      throw std::runtime_error("cannot write " + path_);
    ::close(file);
  }
  ~FuzzFile() { ::unlink(path_.c_str()); }
  FuzzFile(const FuzzFile&) = delete;
  FuzzFile& operator=(const FuzzFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace lockstep
