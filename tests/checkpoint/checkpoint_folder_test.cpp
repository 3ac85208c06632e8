#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <thread>

#include "base/file_descriptor.h"
#include "checkpoint/failure.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/pickle_writer.h"
#include "checkpoint/format/pt_file.h"
#include "checkpoint/recorded_operations.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::Call;
using testing::FailingOperations;
using testing::failure;
using testing::RecordedOperations;

constexpr size_t kBytes = 3000;

/// A .pt file of one tensor full of the byte `step`.
void write_state(ByteSink& sink, int64_t step) {
  PickleWriter pickle;
  pickle.begin_dict();
  pickle.text("x");
  pickle.tensor({.dtype = dtype_of_name("uint8"),
                 .storage = "0",
                 .storage_bytes = kBytes,
                 .offset = 0,
                 .sizes = {kBytes},
                 .strides = {1}});
  pickle.end_dict();
  PtWriter writer(sink, "state", pickle.finish());
  const std::string content(kBytes, static_cast<char>(step));
  writer.begin_storage("0", kBytes);
  writer.append(content.data(), content.size());
  writer.end_storage();
  writer.finish();
}

CheckpointManifest add(CheckpointFolder& folder, int64_t step, std::optional<double> score = {}) {
  return folder.add(step, score, 1, [&](ByteSink& sink) { write_state(sink, step); });
}

/// The step of the newest intact checkpoint, read to its last byte; -1 if there is none.
int64_t newest(const std::string& path) {
  const CheckpointFolder folder(path);
  for (const CheckpointManifest& manifest : folder.list()) {
    if (!failure([&] { folder.check(manifest); }).empty()) continue;
    const FileSource source(folder.path_of(manifest));
    const PtFile file(source);
    std::string content(file.storage_bytes(0), '\0');
    file.read_storage(0, content.data());
    EXPECT_EQ(content, std::string(kBytes, static_cast<char>(manifest.step)));
    return manifest.step;
  }
  return -1;
}

std::set<std::string> names_in(const std::string& path) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path)) names.insert(entry.path().filename());
  return names;
}

class CheckpointFolderTest : public ::testing::Test {
 protected:
  std::string path() const { return (temporary_.path() / "checkpoints").string(); }
  TemporaryFolder temporary_;
};

TEST_F(CheckpointFolderTest, ListsTheNewestFirstAndKeepsTheLastAndTheBest) {
  EXPECT_EQ(newest(path()), -1);
  CheckpointFolder folder(path());
  for (int step = 1; step <= 6; ++step) {
    add(folder, step, step == 2 ? 0.9 : 0.1 * step);
    folder.prune(2, 1, /*higher_is_better=*/true);
  }
  std::vector<int64_t> steps;
  for (const auto& manifest : folder.list()) steps.push_back(manifest.step);
  EXPECT_EQ(steps, (std::vector<int64_t>{6, 5, 2}));
  EXPECT_EQ(names_in(path()).size(), 6u);  // two files each, nothing else
  folder.prune(1, 1, /*higher_is_better=*/false);
  EXPECT_EQ(folder.list().size(), 2u);  // the last has 0.6, the lowest of those left 0.5
  EXPECT_EQ(newest(path()), 6);
}

TEST_F(CheckpointFolderTest, TheSameStepTwiceIsTwoCheckpoints) {
  CheckpointFolder folder(path());
  const auto first = add(folder, 7), second = add(folder, 7);
  EXPECT_NE(first.file, second.file);
  EXPECT_EQ(folder.list().front().file, second.file);
}

TEST_F(CheckpointFolderTest, PassesOverWhatIsDamaged) {
  CheckpointFolder folder(path());
  add(folder, 1);
  const auto damaged = add(folder, 2), shorter = add(folder, 3), without = add(folder, 4);
  {
    std::fstream file(folder.path_of(damaged), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(1500).put('!');
  }
  std::filesystem::resize_file(folder.path_of(shorter), 100);
  std::filesystem::remove(folder.path_of(without));
  std::ofstream(path() + "/step-000000000009.0.json") << "{\"step\": 9, \"file\": \"../../etc/passwd\"";
  std::ofstream(path() + "/notes.txt") << "mine";
  EXPECT_EQ(newest(path()), 1);
  EXPECT_NE(failure([&] { folder.check(damaged); }).find(damaged.file), std::string::npos);
  add(folder, 10);
  folder.prune(1, 0, true);
  EXPECT_EQ(newest(path()), 10);
  EXPECT_TRUE(std::filesystem::exists(path() + "/notes.txt"));
}

TEST_F(CheckpointFolderTest, OneProcessWrites) {
  CheckpointFolder folder(path()), other(path());
  add(folder, 1);
  EXPECT_NE(failure([&] { add(other, 2); }).find("another process saves"), std::string::npos);
}

TEST_F(CheckpointFolderTest, AFolderThatCannotBeIsNamed) {
  std::ofstream(path()) << "a file where the folder should be";
  CheckpointFolder folder(path() + "/run");
  EXPECT_NE(failure([&] { add(folder, 1); }).find("cannot make the folder " + path() + "/run"), std::string::npos);
}

/// A disk that keeps what was synced, and an arbitrary part of the rest.
class Disk {
 public:
  explicit Disk(std::map<std::string, std::string> start) {
    for (auto& [name, content] : start) {
      entries_[name] = static_cast<int>(files_.size());
      files_.push_back(content);
    }
    first_ = static_cast<int>(files_.size());
  }

  /// The folder after the first `count` calls, if of the calls that were not synced only those that `survives` picks
  /// survive.
  std::map<std::string, std::string> after(const std::vector<Call>& calls, size_t count,
                                           const std::function<bool()>& survives) const {
    auto files = files_;
    auto entries = entries_;
    for (size_t i = 0; i < count; ++i) {
      const Call& call = calls[i];
      const bool is_entry =
          call.kind == Call::Kind::kCreate || call.kind == Call::Kind::kRename || call.kind == Call::Kind::kUnlink;
      if (call.kind == Call::Kind::kCreate) files.resize(static_cast<size_t>(first_ + call.file) + 1);
      if (call.kind == Call::Kind::kWrite) write(files, calls, i, count, survives);
      if (is_entry && (synced(calls, i, count, Call::Kind::kSyncFolder, -1) || survives())) apply(entries, call);
    }
    std::map<std::string, std::string> folder;
    for (const auto& [name, file] : entries) folder[name] = files[static_cast<size_t>(file)];
    return folder;
  }

 private:
  static bool synced(const std::vector<Call>& calls, size_t from, size_t count, Call::Kind kind, int file) {
    for (size_t i = from; i < count; ++i)
      if (calls[i].kind == kind && calls[i].file == file) return true;
    return false;
  }
  void write(std::vector<std::string>& files, const std::vector<Call>& calls, size_t i, size_t count,
             const std::function<bool()>& survives) const {
    const Call& call = calls[i];
    size_t at = 0;
    for (size_t j = 0; j < i; ++j)
      if (calls[j].kind == Call::Kind::kWrite && calls[j].file == call.file) at += calls[j].data.size();
    if (!synced(calls, i, count, Call::Kind::kSync, call.file) && !survives()) return;
    std::string& file = files[static_cast<size_t>(first_ + call.file)];
    if (file.size() < at + call.data.size()) file.resize(at + call.data.size());  // holes read as zeros
    file.replace(at, call.data.size(), call.data);
  }
  void apply(std::map<std::string, int>& entries, const Call& call) const {
    if (call.kind == Call::Kind::kCreate) entries[call.name] = first_ + call.file;
    if (call.kind == Call::Kind::kUnlink) entries.erase(call.name);
    if (call.kind != Call::Kind::kRename) return;
    // A rename may reach the disk though the creation of its source did not: what it names is known from the record.
    entries.erase(call.name);
    entries[call.to] = first_ + sources_.at(call.name);
  }

 public:
  /// Which file each partial name stands for.
  void learn(const std::vector<Call>& calls) {
    for (const Call& call : calls)
      if (call.kind == Call::Kind::kCreate) sources_[call.name] = call.file;
  }

 private:
  std::vector<std::string> files_;
  std::map<std::string, int> entries_;
  std::map<std::string, int> sources_;
  int first_ = 0;
};

std::map<std::string, std::string> content_of(const std::string& path) {
  std::map<std::string, std::string> content;
  for (const auto& name : names_in(path)) {
    std::ifstream file(path + '/' + name, std::ios::binary);
    content[name] = std::string(std::istreambuf_iterator<char>(file), {});
  }
  return content;
}

/// The long counts run in `make test-nightly`.
int rounds(int in_ci, int nightly) { return std::getenv("LOCKSTEP_NIGHTLY") != nullptr ? nightly : in_ci; }

TEST_F(CheckpointFolderTest, EveryCrashStateHasTheOldOrTheNewCheckpoint) {
  CheckpointFolder folder(path());
  add(folder, 1);
  add(folder, 2);
  Disk disk(content_of(path()));
  RecordedOperations recorded;
  {
    const ScopedFileOperations in_place(recorded);
    add(folder, 3);
    folder.prune(2, 0, true);
  }
  const std::vector<Call>& calls = recorded.calls();
  disk.learn(calls);
  ASSERT_GT(calls.size(), 20u);
  const auto last_sync =
      std::find_if(calls.rbegin(), calls.rend(), [](const Call& call) { return call.kind == Call::Kind::kSyncFolder; });
  const auto durable = static_cast<size_t>(calls.rend() - last_sync);  // after so many calls the save has returned
  const unsigned seed = std::random_device()();
  std::mt19937 chance(seed);
  std::set<int64_t> found;
  const int total = rounds(1000, 10000);
  for (int round = 0; round < total; ++round) {
    const size_t count = static_cast<size_t>(round) % (calls.size() + 1);
    // Sometimes everything or nothing survives, else a random subset, denser or thinner.
    const unsigned odds = chance() % 5;
    const auto survives = [&] { return odds == 0 ? false : odds == 1 ? true : chance() % 5 < odds; };
    const std::string state = (temporary_.path() / "state").string();
    std::filesystem::remove_all(state);
    std::filesystem::create_directory(state);
    for (const auto& [name, content] : disk.after(calls, count, survives))
      std::ofstream(state + '/' + name, std::ios::binary) << content;
    const int64_t step = newest(state);
    ASSERT_TRUE(step == 2 || step == 3) << "step " << step << " after " << count << " calls, seed " << seed;
    if (count >= durable) {
      ASSERT_EQ(step, 3) << "after " << count << " calls, seed " << seed;
    }
    found.insert(step);
  }
  EXPECT_EQ(found, (std::set<int64_t>{2, 3}));
}

TEST_F(CheckpointFolderTest, EachErrnoAtEachCallLeavesACheckpointAndAWayOn) {
  const char* expected_calls[] = {"open", "write", "truncate", "sync", "rename", "unlink"};
  std::set<std::string> failed;
  for (const bool for_good : {false, true})
    for (const int error : {ENOSPC, EIO, EROFS, EACCES, EDQUOT, EMFILE, EINTR}) {
      for (int which = 0;; ++which) {
        std::filesystem::remove_all(path());
        CheckpointFolder folder(path());
        add(folder, 1);
        add(folder, 2);
        FailingOperations failing(which, error, for_good);
        std::string problem;
        {
          const ScopedFileOperations in_place(failing);
          if (error == EINTR && for_good) break;  // a call that is always interrupted never returns
          problem = failure([&] {
            add(folder, 3);
            folder.prune(2, 0, true);
          });
        }
        if (failing.failed().empty()) break;
        failed.insert(failing.failed());
        const std::string what = failing.failed() + ", call " + std::to_string(which) + ": " + problem;
        const int64_t step = newest(path());
        EXPECT_TRUE(step == 2 || step == 3) << what;
        if (problem.empty()) {
          EXPECT_EQ(step, 3) << what;
        }
        if (!problem.empty()) {
          EXPECT_NE(problem.find(path()), std::string::npos) << what;
        }
        // The next save works, and cleans up.
        add(folder, 4);
        folder.prune(2, 0, true);
        EXPECT_EQ(newest(path()), 4) << what;
        EXPECT_EQ(names_in(path()).size(), 4u) << what;
      }
    }
  for (const char* call : expected_calls) EXPECT_TRUE(failed.contains(call)) << call << " never failed";
}

TEST_F(CheckpointFolderTest, TwoHundredKillsInASaveLoopNeverCostACheckpoint) {
  const unsigned seed = std::random_device()();
  std::mt19937 chance(seed);
  int64_t done = 0;
  int in_a_save = 0;
  for (int round = 0; round < 200; ++round) {
    int acknowledged[2];
    ASSERT_EQ(::pipe(acknowledged), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      CheckpointFolder folder(path());
      for (int64_t step = newest(path()) + 1;; ++step) {
        add(folder, step < 1 ? 1 : step);
        folder.prune(2, 0, true);
        const int64_t word = step < 1 ? 1 : step;
        if (::write(acknowledged[1], &word, sizeof word) != sizeof word) ::_exit(1);
      }
    }
    ::close(acknowledged[1]);
    const FileDescriptor pipe(acknowledged[0]);
    std::this_thread::sleep_for(std::chrono::microseconds(chance() % 20000));
    ::kill(child, SIGKILL);
    int status;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << "round " << round << ", seed " << seed;
    for (int64_t word; ::read(pipe.get(), &word, sizeof word) == sizeof word;) done = word;
    if (!std::filesystem::exists(path())) continue;
    for (const auto& name : names_in(path())) in_a_save += name.ends_with(".partial") ? 1 : 0;
    const int64_t step = newest(path());
    if (done > 0) {
      ASSERT_GE(step, done) << "round " << round << ", seed " << seed;
    }
    done = std::max(done, step);
  }
  EXPECT_GT(done, 0);
  EXPECT_GT(in_a_save, 0) << "no kill fell into a save";
}

}  // namespace
}  // namespace lockstep
