#pragma once

#include <string>

#include "base/byte_sink.h"
#include "base/file_descriptor.h"

namespace lockstep {

/// A file that takes its name only when it is complete. Until commit() it lies beside its place as "<path>.partial";
/// without commit() it is removed again, and what had the name before stays. A process that is killed leaves its
/// partial file behind, which the next AtomicFile of the path takes over. Every failure throws Error naming the file.
class AtomicFile : public ByteSink {
 public:
  /// Throws Error also when the same path is just being written, here or by another process.
  explicit AtomicFile(std::string path);
  ~AtomicFile() override;
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t size) override;
  /// Syncs the file, gives it its name, and syncs the folder. If the last of these fails the file has its name, but
  /// might lose it if the machine stops.
  void commit();

 private:
  const std::string path_;
  const std::string partial_;
  FileDescriptor file_;
  size_t unstarted_ = 0;  ///< bytes written whose way to the disk was not begun
  off_t end_ = 0;
};

/// Syncs a folder, so that what was renamed or removed in it stays so. Throws Error naming it.
void sync_folder(const std::string& folder);

/// The whole file. Throws Error naming it.
std::string read_file(const std::string& path);

}  // namespace lockstep
