#include "data/token_map.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"

namespace lockstep {
namespace {

template <typename Token>
void widen(const std::byte* from, int64_t count, int64_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    Token token;  // a number may begin at any address
    std::memcpy(&token, from + i * static_cast<int64_t>(sizeof(Token)), sizeof(Token));
    to[i] = token;
  }
}

int64_t bytes_of(int fd, const std::filesystem::path& path) {
  struct stat status;
  if (::fstat(fd, &status) != 0) throw_errno<RefusedInput>("reading " + path.string());
  if (!S_ISREG(status.st_mode)) throw RefusedInput(path.string() + ": is not a regular file");
  return status.st_size;
}

}  // namespace

TokenMap::TokenMap(std::filesystem::path path, int64_t token_bytes)
    : path_(std::move(path)), token_bytes_(token_bytes), fd_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (!fd_) throw_errno<RefusedInput>("opening " + path_.string());
  const int64_t bytes = bytes_of(fd_.get(), path_);
  if (bytes % token_bytes != 0)
    throw RefusedInput(path_.string() + ": expected whole tokens of " + std::to_string(token_bytes) + " bytes, found " +
                       std::to_string(bytes) + " bytes, " + std::to_string(bytes % token_bytes) +
                       " too many; the file is truncated, or its tokens are of another type (TokenFileOptions::type)");
  size_ = bytes / token_bytes;
  if (bytes == 0) return;  // an empty file cannot be mapped
  void* mapped = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED, fd_.get(), 0);
  if (mapped == MAP_FAILED) throw_errno<RefusedInput>("mapping " + path_.string());
  tokens_ = static_cast<const std::byte*>(mapped);
}

TokenMap::~TokenMap() {
  if (tokens_ != nullptr) ::munmap(const_cast<std::byte*>(tokens_), static_cast<size_t>(size_ * token_bytes_));
}

void TokenMap::check_length() const {
  const int64_t bytes = bytes_of(fd_.get(), path_);
  if (bytes < size_ * token_bytes_)
    throw RefusedInput(path_.string() + ": has become shorter since it was opened: expected " +
                       std::to_string(size_ * token_bytes_) + " bytes, found " + std::to_string(bytes) +
                       "; replace such a file by renaming a new one over it");
}

void TokenMap::read(int64_t first, int64_t count, int64_t* to) const {
  if (first < 0 || count < 0 || first > size_ || count > size_ - first)
    throw RefusedInput(path_.string() + ": " + std::to_string(count) + " tokens from position " +
                       std::to_string(first) + " on, of " + std::to_string(size_));
  const std::byte* from = tokens_ + first * token_bytes_;
  if (token_bytes_ == 1)
    widen<uint8_t>(from, count, to);
  else if (token_bytes_ == 2)
    widen<uint16_t>(from, count, to);
  else
    widen<uint32_t>(from, count, to);
}

}  // namespace lockstep
