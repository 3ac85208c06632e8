#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/byte_sink.h"
#include "base/file_descriptor.h"

namespace lockstep {

/// What is known of one checkpoint: the content of its manifest.
struct CheckpointManifest {
  int64_t step = 0;
  std::string file;  ///< name within the folder
  uint64_t bytes = 0;
  std::string hash;             ///< StreamHash of the file
  std::optional<double> score;  ///< e.g. an accuracy
  int world_size = 1;           ///< of the ranks that saved it
};

/// A folder of checkpoints, each a file "step-<12 digits>.<number>.pt" and, written after it, a manifest of the same
/// name with .json. A checkpoint is there once its manifest is; one whose file is missing or of another size is not.
///
/// Each of the two is written as a new file, synced, given its name, and the folder synced, in this order: whenever
/// the machine stops, the checkpoint is there whole or its predecessors are. A file is never written again under a
/// name that was used. One process at a time writes; it holds a lock on the folder that ends with it.
class CheckpointFolder {
 public:
  explicit CheckpointFolder(std::string path) : path_(std::move(path)) {}

  /// Those that are there, newest (highest step) first. Throws Error if the folder is there and cannot be read; one
  /// that is not there is empty.
  std::vector<CheckpointManifest> list() const;

  /// Reads the whole file. Throws Error, naming it, if it is not what was written.
  void check(const CheckpointManifest& manifest) const;

  /// Makes the folder if need be. Throws Error if it cannot be made, or not be written where `to_write` asks for that.
  void make(bool to_write) const;

  /// Makes the folder if need be, and a checkpoint of what `write` puts into the sink. Throws Error naming what failed;
  /// what was there before is untouched.
  CheckpointManifest add(int64_t step, std::optional<double> score, int world_size,
                         const std::function<void(ByteSink&)>& write);

  /// Removes all but the newest `last` and the `best` by score, and what an interrupted save left. What cannot be
  /// removed stays. Only the process that writes may call it.
  void prune(int last, int best, bool higher_is_better) const;

  std::string path_of(const CheckpointManifest& manifest) const { return path_ + '/' + manifest.file; }

 private:
  struct Name {
    int64_t step;
    int number;  ///< of checkpoints of the same step
  };
  static std::optional<Name> parse(const std::string& file, const std::string& ending);
  std::vector<std::string> files() const;
  std::optional<CheckpointManifest> read(const std::string& file) const;
  std::string new_name(int64_t step) const;
  void lock();

  const std::string path_;
  FileDescriptor lock_;
};

}  // namespace lockstep
