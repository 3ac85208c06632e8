#pragma once

#include <unistd.h>
#include <zlib.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace lockstep {

/// A folder that goes with the test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    static std::atomic<int> number{0};
    path_ = std::filesystem::temp_directory_path() /
            ("lockstep_data_" + std::to_string(::getpid()) + "_" + std::to_string(number++));
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path write(const std::string& name, const std::string& content) const {
    std::ofstream(path_ / name, std::ios::binary) << content;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

inline std::string idx_header(std::initializer_list<uint32_t> shape) {
  std::string bytes{0, 0, 8, static_cast<char>(shape.size())};
  for (uint32_t size : shape)
    for (int shift : {24, 16, 8, 0}) bytes += static_cast<char>(size >> shift & 255);
  return bytes;
}

inline std::string gzip(const std::string& content) {
  z_stream stream{};
  constexpr int kGzip = 16;
  deflateInit2(&stream, Z_BEST_COMPRESSION, Z_DEFLATED, kGzip + MAX_WBITS, 9, Z_DEFAULT_STRATEGY);
  std::string packed(deflateBound(&stream, content.size()) + 32, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(content.data()));
  stream.avail_in = content.size();
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = packed.size();
  deflate(&stream, Z_FINISH);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

/// What `action` says when it fails with an Error, or "" if it does not.
template <typename Failure, typename Action>
std::string failure_of(Action action) {
  try {
    action();
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "";
}

}  // namespace lockstep
