#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/atomic_file.h"
#include "checkpoint/format/byte_source.h"
#include "checkpoint/format/pickle_tree.h"
#include "checkpoint/format/zip_reader.h"
#include "checkpoint/format/zip_writer.h"

namespace lockstep {

/// An open .pt file: the content of its pickle, and the positions of its storages. Every tensor lies within its storage
/// and every storage within the file. Tensor data is read one storage at a time.
class PtFile {
 public:
  /// Throws Error naming the file. `source` outlives this.
  explicit PtFile(const ByteSource& source);

  const PickleTree& tree() const { return *tree_; }
  const ByteSource& source() const { return source_; }
  uint64_t storage_bytes(size_t storage) const { return tree_->storages[storage].bytes; }
  uint64_t storage_offset(size_t storage) const { return entries_[storage]->offset; }
  /// Copies the bytes of a storage; throws Error if their checksum is wrong.
  void read_storage(size_t storage, void* to) const { zip_.read(*entries_[storage], to); }

 private:
  const ByteSource& source_;
  ZipReader zip_;
  std::unique_ptr<PickleTree> tree_;
  std::vector<const ZipEntry*> entries_;  ///< of the storages
};

/// Writes a .pt file: the pickle first, then the storages in any order, then finish().
class PtWriter {
 public:
  /// `name` is the folder inside the archive; PyTorch uses the file's name without its extension.
  PtWriter(ByteSink& sink, std::string name, const std::string& pickle,
           ZipWriter::Checksums checksums = ZipWriter::Checksums::kAll);
  void begin_storage(const std::string& key, uint64_t bytes) { zip_.begin(name_ + "/data/" + key, bytes); }
  void append(const void* data, uint64_t size) { zip_.append(data, size); }
  void end_storage() { zip_.end(); }
  void finish();

 private:
  const std::string name_;
  ZipWriter zip_;
};

/// "net" for "runs/net.pt".
std::string archive_name(const std::string& path);

/// A leaf of a tree, named by its keys, joined by dots.
struct Leaf {
  std::string name;
  NodeId node;
};

/// All leaves: nodes that are neither list, tuple, set nor dictionary. A leaf reachable by several paths occurs several
/// times. Throws Error, without a file name, for a tree that contains itself, is nested too deep, or becomes too large.
std::vector<Leaf> leaves_of(const PickleTree& tree);

/// Passes the tensor's elements to `take` in pieces, in order and without gaps, from the bytes of its storage.
void for_each_run(const PickleTree& tree, const PickledTensor& tensor, const char* storage,
                  const std::function<void(const char*, uint64_t)>& take);

uint64_t bytes_of(const PickleTree& tree, const PickledTensor& tensor);

}  // namespace lockstep
