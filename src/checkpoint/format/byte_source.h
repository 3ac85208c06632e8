#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/file_descriptor.h"

namespace lockstep {

/// A known number of bytes, read in pieces: a file, or memory in a test.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;

  const std::string& name() const { return name_; }
  uint64_t size() const { return size_; }
  /// Copies `count` bytes. Throws Error, naming the file, if they are out of bounds.
  void read(uint64_t offset, void* to, uint64_t count) const;
  std::string read_text(uint64_t offset, uint64_t count) const;

  /// Throws Error("cannot load <name>: <what>").
  [[noreturn]] void refuse(const std::string& what) const;

 protected:
  ByteSource(std::string name, uint64_t size) : name_(std::move(name)), size_(size) {}

 private:
  virtual void copy(uint64_t offset, char* to, uint64_t count) const = 0;
  const std::string name_;

 protected:
  uint64_t size_;
};

/// A regular file, read on demand. Nothing is mapped, so a file that shrinks meanwhile causes an Error.
class FileSource : public ByteSource {
 public:
  /// Throws Error naming the file if it cannot be read or is not a regular file.
  explicit FileSource(std::string path);
  int descriptor() const { return file_.get(); }

 private:
  void copy(uint64_t offset, char* to, uint64_t count) const override;
  FileDescriptor file_;
};

/// Memory that outlives the source.
class MemorySource : public ByteSource {
 public:
  MemorySource(std::string name, std::string_view bytes) : ByteSource(std::move(name), bytes.size()), bytes_(bytes) {}

 private:
  void copy(uint64_t offset, char* to, uint64_t count) const override;
  const std::string_view bytes_;
};

}  // namespace lockstep
