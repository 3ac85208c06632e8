#include "checkpoint/format/pt_file.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "checkpoint/format/pickle_tree.h"

// Source: the output of torch.save of PyTorch 2.13, byte by byte; torch/serialization.py.

namespace lockstep {
namespace {

constexpr size_t kMaxTreeDepth = 128;
constexpr size_t kMaxEntryNameBytes = 64 << 10;

/// The folder of the archive that holds data.pkl.
std::string folder_of(const ByteSource& source, const ZipReader& zip) {
  std::string found;
  for (const ZipEntry& entry : zip.entries()) {
    const size_t slash = entry.name.find('/');
    if (slash == std::string::npos || entry.name.compare(slash, std::string::npos, "/data.pkl") != 0) continue;
    if (!found.empty()) source.refuse("it has two entries data.pkl");
    found = entry.name.substr(0, slash + 1);
  }
  if (found.empty()) source.refuse("it is a zip archive without a data.pkl, so torch.save did not write it");
  return found;
}

void refuse_other_formats(const ByteSource& source) {
  char start[4] = {};
  source.read(0, start, std::min<uint64_t>(source.size(), sizeof start));
  const std::string_view bytes(start, 4);
  if (bytes.starts_with("PK\3\4") || bytes.starts_with("PK\5\6")) return;
  if (source.size() > 2 && start[0] == '\x80' && start[1] <= 5)
    source.refuse(
        "it is in the format of PyTorch before 1.6 (a bare pickle). Rewrite it in Python: "
        "torch.save(torch.load(f), f)");
  source.refuse("torch.save did not write it: it does not start like a zip archive");
}

class LeafWalk {
 public:
  LeafWalk(const PickleTree& tree, std::vector<Leaf>& leaves) : tree_(tree), leaves_(leaves) {}

  void walk(NodeId id, size_t depth) {
    if (depth > kMaxTreeDepth)
      throw RefusedInput("it is nested deeper than " + std::to_string(kMaxTreeDepth) + ", or contains itself");
    if (++visited_ > kMaxPickleNodes)
      throw RefusedInput("its content is far larger than the file: it refers to the same lists again and again");
    const Node& node = tree_[id];
    switch (node.kind) {
      case NodeKind::kDict:
        for (size_t i = 0; i + 1 < node.items.size(); i += 2) walk_below(word(node.items[i]), node.items[i + 1], depth);
        return;
      case NodeKind::kList:
      case NodeKind::kTuple:
      case NodeKind::kSet:
        for (size_t i = 0; i < node.items.size(); ++i) walk_below(std::to_string(i), node.items[i], depth);
        return;
      default:
        count(names_bytes_, name_.size());
        leaves_.push_back({name_, id});
    }
  }

 private:
  void walk_below(std::string_view word, NodeId id, size_t depth) {
    const size_t before = name_.size();
    if (before + word.size() > kMaxEntryNameBytes)
      throw RefusedInput("a name in it is longer than " + std::to_string(kMaxEntryNameBytes) + " bytes");
    count(words_bytes_, word.size());
    if (!name_.empty()) name_ += '.';
    name_ += word;
    walk(id, depth + 1);
    name_.resize(before);
  }
  /// Everything copied counts: a short file may name the same long key over and over, with or without a leaf below it.
  static void count(uint64_t& sum, size_t bytes) {
    sum += bytes;
    if (sum > kMaxPickleBytes) throw RefusedInput("the names in it take too much memory");
  }
  std::string word(NodeId key) const {
    const Node& node = tree_[key];
    switch (node.kind) {
      case NodeKind::kText:
        return std::string(node.text);
      case NodeKind::kInt:
        return std::to_string(node.integer);
      case NodeKind::kBool:
        return node.integer != 0 ? "True" : "False";
      case NodeKind::kNone:
        return "None";
      case NodeKind::kReal:
        return std::to_string(node.real);
      default:
        throw RefusedInput("a key of a dictionary is neither a string nor a number");
    }
  }

  const PickleTree& tree_;
  std::vector<Leaf>& leaves_;
  std::string name_;  ///< of the current subtree
  size_t visited_ = 0;
  uint64_t words_bytes_ = 0, names_bytes_ = 0;
};

/// Refuses a TorchScript archive, saying how either language may have written it, and what to do instead.
[[noreturn]] void refuse_script_archive(const ByteSource& source, const ZipReader& zip, const std::string& folder) {
  // C++'s torch::save puts everything into objects of an empty class of this name.
  constexpr std::string_view kRootOfCpp = "__torch__\nModule\n";
  const std::string root = zip.read_text(*zip.find(folder + "data.pkl"), kMaxPickleBytes).substr(0, 64);
  if (root.find(kRootOfCpp) == std::string::npos)
    source.refuse("it is a TorchScript archive (torch.jit.save); load it with torch::jit::load");
  source.refuse(
      "it was written by torch::save in C++, which writes TorchScript archives; load it with torch::load into a "
      "module, "
      "optimizer or tensor like the one that was saved, and write that module's state with "
      "lockstep::save(lockstep::state_dict(*module), \"FILE.pt\"), which C++ and Python read");
}

}  // namespace

PtFile::PtFile(const ByteSource& source) : source_((refuse_other_formats(source), source)), zip_(source) {
  const std::string folder = folder_of(source, zip_);
  if (zip_.find(folder + "constants.pkl") != nullptr) refuse_script_archive(source, zip_, folder);
  if (const ZipEntry* order = zip_.find(folder + "byteorder"))
    if (const std::string text = zip_.read_text(*order, 100); text != "little")
      source.refuse("its numbers are " + text.substr(0, 20) + "-endian; rewrite it on a little-endian machine");
  tree_ = std::make_unique<PickleTree>(zip_.read_text(*zip_.find(folder + "data.pkl"), kMaxPickleBytes));
  try {
    read_pickle(*tree_);
  } catch (const Error& error) {
    source.refuse(error.what());
  }
  for (const PickledStorage& storage : tree_->storages) {
    const ZipEntry* entry = zip_.find(folder + "data/" + storage.key);
    if (entry == nullptr) source.refuse("the storage " + storage.key + " of its tensors is missing");
    zip_.check_stored(*entry);
    if (entry->bytes != storage.bytes)
      source.refuse("the storage " + storage.key + " of its tensors should have " + std::to_string(storage.bytes) +
                    " bytes, but has " + std::to_string(entry->bytes));
    entries_.push_back(entry);
  }
}

PtWriter::PtWriter(ByteSink& sink, std::string name, const std::string& pickle, ZipWriter::Checksums checksums)
    : name_(std::move(name)), zip_(sink, checksums) {
  zip_.add(name_ + "/data.pkl", pickle);
  zip_.add(name_ + "/.format_version", "1");
  zip_.add(name_ + "/.storage_alignment", "64");
  zip_.add(name_ + "/byteorder", "little");
}

void PtWriter::finish() {
  zip_.add(name_ + "/version", "3\n");
  // PyTorch writes a number that depends on the content, for logs.
  zip_.add(name_ + "/.data/serialization_id",
           formatted("%040llu", static_cast<unsigned long long>(zip_.combined_crc())));
  zip_.finish();
}

std::string archive_name(const std::string& path) {
  std::string name = path.substr(path.rfind('/') + 1);
  name = name.substr(0, name.rfind('.'));
  return name.empty() || name.size() > 1000 ? "archive" : name;
}

std::vector<Leaf> leaves_of(const PickleTree& tree) {
  std::vector<Leaf> leaves;
  LeafWalk(tree, leaves).walk(tree.root, 0);
  return leaves;
}

uint64_t bytes_of(const PickleTree& tree, const PickledTensor& tensor) {
  uint64_t bytes = tensor.dtype->bytes;  // checked when it was read
  for (int64_t size : tree.numbers(tensor.sizes)) bytes *= static_cast<uint64_t>(size);
  return bytes;
}

void for_each_run(const PickleTree& tree, const PickledTensor& tensor, const char* storage,
                  const std::function<void(const char*, uint64_t)>& take) {
  const std::vector<int64_t> sizes = tree.numbers(tensor.sizes), strides = tree.numbers(tensor.strides);
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return;
  const uint64_t element = tensor.dtype->bytes;
  // The last dimensions without gaps are one run.
  size_t outer = sizes.size();
  int64_t run = 1;
  while (outer > 0 && (sizes[outer - 1] == 1 || strides[outer - 1] == run)) run *= sizes[--outer];
  std::vector<int64_t> place(outer, 0);
  int64_t at = tensor.offset;
  for (;;) {
    take(storage + static_cast<uint64_t>(at) * element, static_cast<uint64_t>(run) * element);
    size_t i = outer;
    while (i > 0) {
      --i;
      at += strides[i];
      if (++place[i] < sizes[i]) break;
      at -= strides[i] * sizes[i];
      place[i] = 0;
      if (i == 0) return;
    }
    if (outer == 0) return;
  }
}

}  // namespace lockstep
