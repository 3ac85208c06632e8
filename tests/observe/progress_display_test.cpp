#include "observe/progress_display.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <vector>

#include "base/file_descriptor.h"

namespace lockstep::progress_display_test {
namespace {

using std::chrono::milliseconds;

const ProgressLine::Pass kPass{.label = "", .epoch = 0, .epochs = 2, .steps = 1000, .rank = 0, .world_size = 1};

/// Both ends of a pipe: what is written into it can be read at once.
class Pipe {
 public:
  Pipe() {
    std::array<int, 2> ends;
    if (::pipe2(ends.data(), O_NONBLOCK) != 0) throw std::runtime_error("no pipe");
    read_ = FileDescriptor(ends[0]);
    write_ = FileDescriptor(ends[1]);
  }
  int in() const { return write_.get(); }
  std::string content() {
    std::string text;
    std::array<char, 4096> buffer;
    for (ssize_t got; (got = ::read(read_.get(), buffer.data(), buffer.size())) > 0;) text.append(buffer.data(), got);
    return text;
  }

 private:
  FileDescriptor read_, write_;
};

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++found;
  return found;
}

/// Runs stderr into a pipe while it lives.
class StandardError {
 public:
  StandardError() : saved_(::dup(STDERR_FILENO)) { ::dup2(pipe_.in(), STDERR_FILENO); }
  ~StandardError() { ::dup2(saved_.get(), STDERR_FILENO); }
  std::string content() { return pipe_.content(); }

 private:
  Pipe pipe_;
  FileDescriptor saved_;
};

TEST(ProgressDisplay, RedrawsTenTimesASecondOnATerminal) {
  Pipe pipe;
  const auto start = Clock::now();
  ProgressDisplay display(kPass, {.fd = pipe.in(), .columns = 80}, start);
  EXPECT_EQ(pipe.content(), "\repoch 1/2  step 0/1000\x1b[K");
  for (int i = 1; i <= 1000; ++i) display.step(4, start + milliseconds(i));
  const std::string live = pipe.content();
  EXPECT_EQ(count(live, "\r"), 10);
  EXPECT_EQ(count(live, "\n"), 0) << "the next drawing must replace this one";
  display.finish(start + milliseconds(1000));
  EXPECT_EQ(pipe.content(), "\repoch 1/2  step 1000/1000  4,000 samples/s  time 0:01\x1b[K\n");
}

TEST(ProgressDisplay, NeverFillsTheTerminalsLine) {
  for (int columns : {1, 2, 10, 20, 40}) {
    Pipe pipe;
    const auto start = Clock::now();
    ProgressDisplay display(kPass, {.fd = pipe.in(), .columns = columns}, start);
    display.step(4, start + milliseconds(500));
    display.finish(start + milliseconds(600));
    const std::string text = pipe.content();
    for (size_t at = 0; (at = text.find('\r', at)) != std::string::npos; ++at)
      EXPECT_LE(text.find('\x1b', at) - at - 1, static_cast<size_t>(columns - 1));
  }
}

TEST(ProgressDisplay, PlainLinesEveryTenSecondsElsewhere) {
  Pipe pipe;
  const auto start = Clock::now();
  ProgressDisplay display(kPass, {.fd = pipe.in(), .columns = {}}, start);
  for (int i = 1; i <= 250; ++i) display.step(4, start + milliseconds(100 * i));
  display.finish(start + milliseconds(25000));
  EXPECT_EQ(pipe.content(),
            "epoch 1/2  step 100/1000  40 samples/s  ETA 1:30\n"
            "epoch 1/2  step 200/1000  40 samples/s  ETA 1:20\n"
            "epoch 1/2  step 250/1000  40 samples/s  time 0:25\n");
}

TEST(ProgressDisplay, FinishesOnce) {
  Pipe pipe;
  {
    ProgressDisplay display(kPass, {.fd = pipe.in(), .columns = {}}, Clock::now());
    display.step(4, Clock::now());
    display.finish(Clock::now());
    display.step(4, Clock::now() + std::chrono::hours(1));
  }
  EXPECT_EQ(count(pipe.content(), "\n"), 1);
}

TEST(ProgressDisplay, AnAbandonedPassLeavesItsLastState) {
  Pipe pipe;
  {
    const auto start = Clock::now();
    ProgressDisplay display(kPass, {.fd = pipe.in(), .columns = 80}, start);
    display.step(4, start);
  }
  EXPECT_TRUE(pipe.content().ends_with("\x1b[K\n"));
}

TEST(ProgressDisplay, NothingDoneNothingSaidElsewhere) {
  Pipe pipe;
  { ProgressDisplay display(kPass, {.fd = pipe.in(), .columns = {}}, Clock::now()); }
  EXPECT_EQ(pipe.content(), "");
}

TEST(ProgressDisplay, AClosedOutputDoesNoHarm) {
  const FileDescriptor read_only(::open("/dev/null", O_RDONLY));
  const StandardError captured;
  for (const int fd : {-1, read_only.get()}) {  // EBADF, both of them
    errno = 0;
    const auto start = Clock::now();
    ProgressDisplay display(kPass, {.fd = fd, .columns = 80}, start);
    EXPECT_EQ(errno, EBADF) << "it has not tried to draw";
    for (int i = 1; i <= 1000; ++i) display.step(1, start + milliseconds(i));
    display.finish(start + milliseconds(1000));
    EXPECT_LT(seconds_since(start), 5) << "it goes on trying";
  }
}

TEST(ProgressOutput, BelievesTheLauncher) {
  StandardError captured;  // a pipe, as under the launcher
  EXPECT_FALSE(ProgressOutput::standard_error({}).columns);
  Environment environment;
  environment.lockstep_terminal = "132";
  EXPECT_EQ(ProgressOutput::standard_error(environment).columns, 132);
  for (const char* nonsense : {"x", "0", "-3"}) {
    environment.lockstep_terminal = nonsense;
    EXPECT_EQ(ProgressOutput::standard_error(environment).columns, 80);
  }
}

TEST(ProgressLine, OnlyRankZeroSpeaks) {
  StandardError captured;
  for (int rank : {0, 1}) {
    ProgressLine::Pass pass = kPass;
    pass.rank = rank;
    ProgressLine line(pass);
    line.step(1);
    line.loss(0.5);
    line.communication(1);
    line.finish();
    EXPECT_EQ(count(captured.content(), "\n"), rank == 0 ? 1 : 0);
  }
}

TEST(ProgressLine, AStepCostsNextToNothing) {
  StandardError captured;
  ProgressLine line(kPass);
  constexpr int kSteps = 200000;
  const auto start = Clock::now();
  for (int i = 0; i < kSteps; ++i) {
    line.step(128);
    line.loss(0.5);
    line.communication(i * 1e-3);
  }
  const double nanoseconds = seconds_since(start) / kSteps * 1e9;
  RecordProperty("nanoseconds_per_step", static_cast<int>(nanoseconds));
  EXPECT_LT(nanoseconds, 1000) << "three calls together";
}

// ---- the wrapper ----

struct FakeTensor {
  int64_t samples;
  int64_t size(int) const { return samples; }
};
struct FakeBatch {
  FakeTensor data, target;
};

class FakeLoader {
 public:
  class Iterator {
   public:
    using value_type = FakeBatch;
    explicit Iterator(std::vector<FakeBatch>& batches) : batches_(&batches) {}
    FakeBatch& operator*() const { return (*batches_)[at_]; }
    Iterator& operator++() {
      ++at_;
      return *this;
    }
    bool operator==(std::default_sentinel_t) const { return at_ == batches_->size(); }

   private:
    std::vector<FakeBatch>* batches_;
    size_t at_ = 0;
  };
  Iterator begin() { return Iterator(batches_); }
  int epoch() const { return 3; }
  int epoch_count() const { return 7; }
  int64_t size() const { return static_cast<int64_t>(batches_.size()); }
  int rank() const { return 0; }
  int world_size() const { return 1; }

 private:
  std::vector<FakeBatch> batches_ = std::vector<FakeBatch>(4, {{10}, {10}});
};

TEST(Progress, PassesTheBatchesThrough) {
  StandardError captured;
  FakeLoader loader;
  auto bar = progress(loader);
  int steps = 0;
  for (auto& [data, target] : bar) {
    EXPECT_EQ(data.samples, 10);
    data.samples = 0;  // as if moved away
    bar.loss(++steps);
  }
  EXPECT_EQ(steps, 4);
  const std::string text = captured.content();
  EXPECT_TRUE(text.starts_with("epoch 4/7  step 4/4  loss 4.0000  ")) << text;
  EXPECT_EQ(text.find(" 0.0 samples/s"), std::string::npos) << text;
  EXPECT_EQ(count(text, "\n"), 1) << text;
}

TEST(Progress, ALoopThatIsLeftEarlyEndsItsLine) {
  StandardError captured;
  FakeLoader loader;
  int steps = 0;
  for (auto& batch : progress(loader, {.label = "test"})) {
    (void)batch;
    if (++steps == 3) break;
  }
  const std::string text = captured.content();
  EXPECT_TRUE(text.starts_with("test  step 2/4")) << "the step that was left is not done: " << text;
  EXPECT_EQ(count(text, "\n"), 1);
}

}  // namespace
}  // namespace lockstep::progress_display_test
