#include "checkpoint/format/checkpoint_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "base/atomic_file.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/file_operations.h"
#include "base/hash.h"
#include "base/text.h"
#include "checkpoint/format/byte_source.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxManifestBytes = 64 << 10;
constexpr uint64_t kHashChunk = 1 << 20;

/// Hashes the bytes that it passes on to another sink.
class HashingSink : public ByteSink {
 public:
  explicit HashingSink(ByteSink& next) : next_(next) {}
  void write(const void* data, size_t size) override {
    hash_.add(data, size);
    next_.write(data, size);
  }
  const StreamHash& hash() const { return hash_; }

 private:
  ByteSink& next_;
  StreamHash hash_;
};

bool newer(const CheckpointManifest& a, const CheckpointManifest& b) {
  return std::pair(a.step, a.file) > std::pair(b.step, b.file);
}

}  // namespace

std::optional<CheckpointFolder::Name> CheckpointFolder::parse(const std::string& file, const std::string& ending) {
  // step-000000000042.3.pt
  constexpr size_t kStart = 5, kDigits = 12;
  if (!file.starts_with("step-") || !file.ends_with(ending) || file.size() < kStart + kDigits + 2 + ending.size())
    return {};
  const char* middle = file.data() + kStart + kDigits;
  const char* end = file.data() + file.size() - ending.size();
  Name name{};
  const auto step = std::from_chars(file.data() + kStart, middle, name.step);
  const auto number = std::from_chars(middle + 1, end, name.number);
  if (step.ec != std::errc() || step.ptr != middle || *middle != '.' || number.ec != std::errc() || number.ptr != end)
    return {};
  return name;
}

std::vector<std::string> CheckpointFolder::files() const {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entries(path_, error);
  if (error == std::errc::no_such_file_or_directory) return names;
  for (; !error && entries != fs::directory_iterator(); entries.increment(error))
    names.push_back(entries->path().filename().string());
  if (error) throw RefusedInput("cannot read the folder " + path_ + ": " + error.message());
  return names;
}

std::optional<CheckpointManifest> CheckpointFolder::read(const std::string& file) const {
  CheckpointManifest manifest;
  try {
    const FileSource source(path_ + '/' + file);
    if (source.size() > kMaxManifestBytes) return {};
    const nlohmann::json json = nlohmann::json::parse(source.read_text(0, source.size()));
    manifest.step = json.at("step").get<int64_t>();
    manifest.file = json.at("file").get<std::string>();
    manifest.bytes = json.at("bytes").get<uint64_t>();
    manifest.hash = json.at("hash").get<std::string>();
    manifest.world_size = json.at("world_size").get<int>();
    if (const auto score = json.find("score"); score != json.end()) manifest.score = score->get<double>();
  } catch (const std::exception&) {
    return {};
  }
  // A file of this folder, not a path to another.
  const bool own = manifest.file == file.substr(0, file.size() - 5) + ".pt";
  std::error_code error;
  const uint64_t bytes = own ? fs::file_size(path_of(manifest), error) : 0;
  if (!own || error || bytes != manifest.bytes) return {};
  return manifest;
}

std::vector<CheckpointManifest> CheckpointFolder::list() const {
  std::vector<CheckpointManifest> manifests;
  for (const std::string& file : files())
    if (parse(file, ".json"))
      if (auto manifest = read(file)) manifests.push_back(std::move(*manifest));
  std::sort(manifests.begin(), manifests.end(), newer);
  return manifests;
}

void CheckpointFolder::check(const CheckpointManifest& manifest) const {
  const FileSource source(path_of(manifest));
  std::string chunk(std::min(kHashChunk, source.size()), '\0');
  StreamHash hash;
  for (uint64_t done = 0; done < source.size();) {
    const uint64_t count = std::min<uint64_t>(chunk.size(), source.size() - done);
    source.read(done, chunk.data(), count);
    hash.add(chunk.data(), count);
    done += count;
  }
  if (hash.bytes() != manifest.bytes || hash.digits() != manifest.hash)
    source.refuse("it is damaged: its content is not what was saved");
}

void CheckpointFolder::hold(std::chrono::milliseconds patience) {
  make(false);
  lock(patience);
}

void CheckpointFolder::lock(std::chrono::milliseconds patience) {
  if (lock_) return;
  FileDescriptor folder(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder) throw_errno<StorageError>("cannot open the folder " + path_);
  // A lock ends with its process. File systems without locks are used without.
  for (const Deadline deadline(patience); ::flock(folder.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;) {
    if (deadline.passed())
      throw StorageError("another process saves checkpoints to " + path_ + "; give each run a folder of its own");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  lock_ = std::move(folder);
}

std::string CheckpointFolder::new_name(int64_t step) const {
  int number = 0;
  for (const std::string& file : files())
    for (const char* ending : {".pt", ".json", ".pt.partial", ".json.partial"})
      if (const auto name = parse(file, ending); name && name->step == step)
        number = std::max(number, name->number + 1);
  return formatted("step-%012lld.%d", static_cast<long long>(step), number);
}

void CheckpointFolder::make(bool to_write) const {
  std::error_code error;
  fs::create_directories(path_, error);
  if (error) throw StorageError("cannot make the folder " + path_ + ": " + error.message());
  if (to_write && ::access(path_.c_str(), W_OK | X_OK) != 0)
    throw_errno<StorageError>("cannot write to the folder " + path_);
}

CheckpointManifest CheckpointFolder::add(int64_t step, std::optional<double> score, int world_size,
                                         const std::function<void(ByteSink&)>& write) {
  make(false);
  lock();
  const std::string name = new_name(step);
  CheckpointManifest manifest{.step = step, .file = name + ".pt", .score = score, .world_size = world_size};
  {
    AtomicFile file(path_of(manifest));
    HashingSink sink(file);
    write(sink);
    manifest.bytes = sink.hash().bytes();
    manifest.hash = sink.hash().digits();
    file.commit();
  }
  nlohmann::ordered_json json = {{"step", step},
                                 {"file", manifest.file},
                                 {"bytes", manifest.bytes},
                                 {"hash", manifest.hash},
                                 {"world_size", world_size}};
  if (score && std::isfinite(*score)) json["score"] = *score;
  const std::string text = json.dump(2) + '\n';
  AtomicFile file(path_ + '/' + name + ".json");
  file.write(text.data(), text.size());
  file.commit();
  return manifest;
}

void CheckpointFolder::clear() {
  if (files().empty()) return;
  lock();
  prune(0, 0, true);
  const auto left = list();
  if (!left.empty()) throw StorageError("cannot remove the old checkpoint " + path_of(left.front()));
}

void CheckpointFolder::prune(int last, int best, bool higher_is_better) const {
  const std::vector<CheckpointManifest> all = list();
  std::set<std::string> kept;
  for (size_t i = 0; i < all.size() && static_cast<int>(i) < last; ++i) kept.insert(all[i].file);
  std::vector<CheckpointManifest> scored;
  std::copy_if(all.begin(), all.end(), std::back_inserter(scored),
               [](const auto& one) { return one.score.has_value(); });
  std::stable_sort(scored.begin(), scored.end(), [&](const auto& a, const auto& b) {
    return higher_is_better ? *a.score > *b.score : *a.score < *b.score;
  });
  for (size_t i = 0; i < scored.size() && static_cast<int>(i) < best; ++i) kept.insert(scored[i].file);
  const auto remove = [&](const std::string& file) { file_operations().unlink((path_ + '/' + file).c_str()); };
  const std::vector<std::string> names = files();
  // Manifests first: a manifest without its file means nothing, but a file without its manifest is only clutter.
  for (const char* ending : {".json", ".json.partial", ".pt", ".pt.partial"})
    for (const std::string& file : names) {
      if (!parse(file, ending)) continue;
      const std::string stem = file.substr(0, file.size() - std::string(ending).size());
      if (std::string(ending).ends_with(".partial") || !kept.contains(stem + ".pt")) remove(file);
    }
}

}  // namespace lockstep
