#include "base/atomic_file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

class AtomicFileTest : public ::testing::Test {
 protected:
  std::string path() const { return (folder_.path() / "file").string(); }
  size_t files() const { return std::distance(fs::directory_iterator(folder_.path()), fs::directory_iterator()); }
  void put(const std::string& text) const {
    AtomicFile file(path());
    file.write(text.data(), text.size());
    file.commit();
  }
  std::string content() const { return read_file(path()); }

  TemporaryFolder folder_;
};

std::string failure(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// Runs `body` in its own process, which then ends without running destructors, like a process that is killed.
pid_t start(const std::function<void()>& body) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  body();
  ::_exit(::testing::Test::HasFailure() ? 1 : 0);
}

int code_of(pid_t pid) {
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST_F(AtomicFileTest, TakesItsNameWhenItIsComplete) {
  put("old");
  AtomicFile file(path());
  file.write("new", 3);
  EXPECT_EQ(content(), "old");
  file.commit();
  EXPECT_EQ(content(), "new");
  EXPECT_EQ(files(), 1u);
}

TEST_F(AtomicFileTest, LeavesNothingWithoutCommit) {
  put("old");
  {
    AtomicFile file(path());
    file.write("new", 3);
    EXPECT_EQ(files(), 2u);
  }
  EXPECT_EQ(content(), "old");
  EXPECT_EQ(files(), 1u);
}

TEST_F(AtomicFileTest, WhatAKilledProcessLeftIsTakenOver) {
  const std::string text(100'000, 'x');
  const pid_t writer = start([&] {
    AtomicFile file(path());
    file.write(text.data(), text.size());
    ::raise(SIGKILL);
  });
  EXPECT_EQ(code_of(writer), -SIGKILL);
  EXPECT_FALSE(fs::exists(path()));
  EXPECT_EQ(fs::file_size(path() + ".partial"), text.size());
  put("short");
  EXPECT_EQ(content(), "short");
  EXPECT_EQ(files(), 1u);
}

TEST_F(AtomicFileTest, ASecondWriterIsRefusedAndHarmsNothing) {
  AtomicFile first(path());
  first.write("first", 5);
  const std::string text = failure([&] { put("second"); });
  EXPECT_NE(text.find(path()), std::string::npos) << text;
  EXPECT_NE(text.find("another process is writing it"), std::string::npos) << text;
  first.commit();
  EXPECT_EQ(content(), "first");
  put("third");
  EXPECT_EQ(content(), "third");
}

TEST_F(AtomicFileTest, WritersThatRaceNeverMix) {
  constexpr size_t kBytes = 100'000;
  put(std::string(kBytes, 'a'));
  std::vector<pid_t> writers;
  for (int number = 0; number < 3; ++number)
    writers.push_back(start([&] {
      // One that is refused tries again: each gets its turn many times.
      const Deadline deadline(std::chrono::seconds(30));
      for (int done = 0; done < 30 && !deadline.passed();) {
        const std::string text =
            failure([&] { put(std::string(kBytes, static_cast<char>('a' + number * 8 + done % 8))); });
        if (text.empty())
          ++done;
        else
          EXPECT_NE(text.find("another process is writing it"), std::string::npos) << text;
      }
      EXPECT_FALSE(deadline.passed());
    }));
  for (int i = 0; i < 300; ++i) {
    const std::string text = content();
    ASSERT_EQ(text, std::string(kBytes, text.empty() ? '?' : text[0]));
  }
  for (const pid_t writer : writers) EXPECT_EQ(code_of(writer), 0);
  EXPECT_EQ(files(), 1u);
}

TEST_F(AtomicFileTest, AFullDiskKeepsTheOldOne) {
  put("old");
  const pid_t writer = start([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{.rlim_cur = 10'000, .rlim_max = 10'000};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    const std::string text = failure([&] { put(std::string(20'000, 'x')); });
    EXPECT_NE(text.find("cannot write " + path() + ": File too large"), std::string::npos) << text;
  });
  EXPECT_EQ(code_of(writer), 0);
  EXPECT_EQ(content(), "old");
  EXPECT_EQ(files(), 1u);
}

TEST_F(AtomicFileTest, NamesWhatCannotBeWritten) {
  put("");
  for (const std::string& place :
       {folder_.path().string() + "/missing/file", path() + "/below", folder_.path().string() + "/."}) {
    const std::string text = failure([&] {
      AtomicFile file(place);
      file.commit();
    });
    EXPECT_NE(text.find(place), std::string::npos) << text;
  }
  fs::create_directory(folder_.path() / "folder");
  const std::string folder = folder_.path().string() + "/folder";
  EXPECT_NE(failure([&] { AtomicFile(folder).commit(); }).find("cannot rename the finished file to " + folder),
            std::string::npos);
  EXPECT_EQ(files(), 2u);
}

TEST_F(AtomicFileTest, DoesNotFollowALinkLeftInThePartialFilesPlace) {
  put("old");
  fs::create_symlink(path(), path() + ".partial");
  EXPECT_NE(failure([&] { put("new"); }), "");
  EXPECT_EQ(content(), "old");
}

TEST_F(AtomicFileTest, ReadsWholeFiles) {
  const std::string text("a\0b\n", 4);
  put(text);
  EXPECT_EQ(content(), text);
  put("");
  EXPECT_EQ(content(), "");
}

TEST_F(AtomicFileTest, RefusesToReadWhatIsNoFile) {
  const std::string pipe = folder_.path().string() + "/pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_NE(failure([&] { read_file(pipe); }).find(pipe + ": it is not a regular file"), std::string::npos);
  EXPECT_NE(failure([&] { read_file(folder_.path().string()); }).find("it is not a regular file"), std::string::npos);
  EXPECT_NE(failure([&] { read_file(path()); }).find(path() + ": No such file"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
