#pragma once

#include <cstddef>
#include <string>

#include "base/file_descriptor.h"

namespace lockstep {

/// A destination for a stream of bytes.
class ByteSink {
 public:
  virtual ~ByteSink() = default;
  /// Appends the bytes. Throws Error naming the destination.
  virtual void write(const void* data, size_t size) = 0;
};

/// A file that gets its name only when complete. Until commit() it is called "<path>.partial"; without commit() it is
/// removed, and the earlier file of that name stays. A killed process leaves its partial file behind, and the next
/// AtomicFile with that path reuses it. Only the last 256 MiB of a large file stay in the page cache, so that saving
/// takes no memory from the training. Every failure throws Error naming the file.
class AtomicFile : public ByteSink {
 public:
  /// Also throws Error if this or another process is writing the same path.
  explicit AtomicFile(std::string path);
  ~AtomicFile() override;
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t size) override;
  /// Syncs the file, gives it its name, and syncs the folder. If the last step fails the file has its name, but may
  /// lose it if the machine crashes.
  void commit();

 private:
  void write_behind();

  const std::string path_;
  const std::string partial_;
  FileDescriptor file_;
  size_t unstarted_ = 0;  ///< bytes written whose write-back has not been started
  off_t end_ = 0;
  off_t given_up_ = 0;  ///< bytes from the start that are on the disk and no longer in the page cache
};

/// Syncs a folder, so that renames and removals in it are durable. Throws Error naming it.
void sync_folder(const std::string& folder);

/// The content of the whole file. Throws Error naming it.
std::string read_file(const std::string& path);

}  // namespace lockstep
