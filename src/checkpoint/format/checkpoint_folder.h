#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/atomic_file.h"
#include "base/file_descriptor.h"

namespace lockstep {

/// One checkpoint: the content of its manifest.
struct CheckpointManifest {
  int64_t step = 0;
  std::string file;  ///< name within the folder
  uint64_t bytes = 0;
  std::string hash;             ///< StreamHash of the file
  std::optional<double> score;  ///< e.g. an accuracy
  int world_size = 1;           ///< of the run that saved it
};

/// A folder of checkpoints. Each is a file "step-<12 digits>.<number>.pt" and a manifest of the same name with .json,
/// written after it. A checkpoint exists once its manifest does, unless its file is missing or has another size.
///
/// Each of the two is written to a new file, synced and renamed, and the folder is synced, in this order. So whenever
/// the machine stops, the checkpoint is complete or its predecessors remain. File names are never reused. One process
/// at a time writes; it holds a lock on the folder until it ends.
class CheckpointFolder {
 public:
  explicit CheckpointFolder(std::string path) : path_(std::move(path)) {}

  /// All checkpoints, newest (highest step) first. Throws Error if the folder exists but cannot be read; a missing
  /// folder is empty.
  std::vector<CheckpointManifest> list() const;

  /// Reads the whole file. Throws Error, naming it, if it differs from what was written.
  void check(const CheckpointManifest& manifest) const;

  /// Makes the folder if needed. Throws Error if it cannot be made, or if `to_write` and it cannot be written.
  void make(bool to_write) const;

  /// Makes the folder if needed, and takes its lock, waiting while another process writes. Throws Error after
  /// `patience`.
  void hold(std::chrono::milliseconds patience);

  /// Makes the folder if needed, and adds a checkpoint of the bytes that `write` puts into the sink. Throws Error
  /// naming the failure; earlier checkpoints are untouched.
  CheckpointManifest add(int64_t step, std::optional<double> score, int world_size,
                         const std::function<void(ByteSink&)>& write);

  /// Removes all but the newest `last` and the `best` by score, and leftovers of interrupted saves. Files that cannot
  /// be removed stay.
  /// REQUIRES: this process is the writer.
  void prune(int last, int best, bool higher_is_better) const;

  /// Removes all checkpoints and leftovers of interrupted saves. Throws Error if another process writes, or if a file
  /// stays.
  void clear();

  std::string path_of(const CheckpointManifest& manifest) const { return path_ + '/' + manifest.file; }

 private:
  struct Name {
    int64_t step;
    int number;  ///< among checkpoints of one step
  };
  static std::optional<Name> parse(const std::string& file, const std::string& ending);
  std::vector<std::string> files() const;
  std::optional<CheckpointManifest> read(const std::string& file) const;
  std::string new_name(int64_t step) const;
  void lock(std::chrono::milliseconds patience = std::chrono::milliseconds(0));

  const std::string path_;
  FileDescriptor lock_;
};

}  // namespace lockstep
