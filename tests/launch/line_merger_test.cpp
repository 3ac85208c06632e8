#include "launch/output/line_merger.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <random>

namespace lockstep {
namespace {

using std::chrono::milliseconds;

/// A merger in front of a pipe, with its own clock.
class MergerTest : public testing::Test {
 protected:
  MergerTest() {
    std::array<int, 2> ends{};
    if (::pipe(ends.data()) != 0) throw std::runtime_error("pipe failed");
    read_ = FileDescriptor(ends[0]);
    write_ = FileDescriptor(ends[1]);
    sink_ = std::make_unique<Sink>(write_.get());
  }

  std::string shown() {
    std::array<char, 32 << 10> bytes;
    if (!readable()) return "";
    const ssize_t count = ::read(read_.get(), bytes.data(), bytes.size());
    return {bytes.data(), static_cast<size_t>(std::max<ssize_t>(count, 0))};
  }

  bool readable() const {
    pollfd polled{.fd = read_.get(), .events = POLLIN, .revents = 0};
    return ::poll(&polled, 1, 0) > 0;
  }

  FileDescriptor read_, write_;
  std::unique_ptr<Sink> sink_;
  Clock::time_point now_ = Clock::now();
};

TEST_F(MergerTest, EqualLinesOfAllAreShownOnceAndAtOnce) {
  LineMerger merger(*sink_, {0, 1, 2, 3});
  for (const int rank : {2, 0, 3}) merger.add(rank, "same\n", now_);
  EXPECT_EQ(shown(), "");
  merger.add(1, "same\n", now_);
  EXPECT_EQ(shown(), "[0-3] same\n");
  EXPECT_FALSE(merger.due());
}

TEST_F(MergerTest, ALineWaitsNoLongerThanItsWindow) {
  LineMerger merger(*sink_, {0, 1, 2});
  merger.add(1, "mine\n", now_);
  ASSERT_TRUE(merger.due());
  EXPECT_EQ(*merger.due(), now_ + LineMerger::kWindow);
  merger.release(now_ + LineMerger::kWindow - milliseconds(1));
  EXPECT_EQ(shown(), "");
  merger.add(2, "mine\n", now_);
  merger.release(now_ + LineMerger::kWindow);
  EXPECT_EQ(shown(), "[1, 2] mine\n");
}

TEST_F(MergerTest, ARanksLinesKeepTheirOrder) {
  LineMerger merger(*sink_, {0, 1});
  merger.add(0, "a\nb\n", now_);
  merger.add(1, "b\na\n", now_);  // its a comes after its b, so it is not rank 0's a
  merger.finish();
  EXPECT_EQ(shown(), "[0] a\n[0, 1] b\n[1] a\n");
}

TEST_F(MergerTest, LinesFoldWhateverTheOrderOfArrival) {
  // Rank 0's own line comes before all others, and its last line after all others.
  LineMerger merger(*sink_, {0, 1, 2});
  merger.add(0, "mine 0\n", now_);
  merger.add(1, "mine 1\nend\n", now_);
  merger.add(2, "mine 2\nend\n", now_);
  merger.add(0, "end\n", now_);
  EXPECT_EQ(shown(), "");
  merger.finish();
  EXPECT_EQ(shown(), "[2] mine 2\n[1] mine 1\n[0] mine 0\n[0-2] end\n");
}

TEST_F(MergerTest, AMovedLineTakesWhatFollowsItAlong) {
  LineMerger merger(*sink_, {0, 1});
  merger.add(0, "x\n", now_);
  merger.add(1, "end\nafter\n", now_ + LineMerger::kWindow / 2);
  merger.add(0, "end\n", now_ + LineMerger::kWindow / 2);
  merger.release(now_ + LineMerger::kWindow);
  EXPECT_EQ(shown(), "[0] x\n[0, 1] end\n[1] after\n");
}

TEST_F(MergerTest, ALineOfItsOwnDoesNotKeepTheNextFromJoining) {
  LineMerger merger(*sink_, {0, 1, 2});
  merger.add(1, "same\nmine 1\nend\n", now_);
  merger.add(2, "same\nmine 2\nend\n", now_);
  merger.add(0, "same\nmine 0\nend\n", now_ + LineMerger::kWindow / 2);
  merger.release(now_ + LineMerger::kWindow);
  EXPECT_EQ(shown(), "[0-2] same\n[0] mine 0\n[2] mine 2\n[1] mine 1\n[0-2] end\n");
}

TEST_F(MergerTest, TheSameLineTwiceIsTwoLines) {
  LineMerger merger(*sink_, {0, 1});
  merger.add(0, "x\nx\n", now_);
  merger.add(1, "x\n", now_);
  merger.finish();
  EXPECT_EQ(shown(), "[0, 1] x\n[0] x\n");
}

TEST_F(MergerTest, WhatWaitsIsBounded) {
  LineMerger merger(*sink_, {0, 1});
  for (size_t i = 0; i < 2 * LineMerger::kMaxWaiting; ++i) merger.add(0, std::to_string(i) + "\n", now_);
  EXPECT_TRUE(shown().starts_with("[0] 0\n[0] 1\n"));
  merger.add(1, "511\n", now_);
  merger.finish();
  EXPECT_TRUE(shown().ends_with("[0] 510\n[0, 1] 511\n"));
}

TEST_F(MergerTest, NothingIsLostOrReordered) {
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    LineMerger merger(*sink_, {0, 1, 2});
    std::array<std::string, 3> printed, seen;
    for (int i = 0; i < 200; ++i) {
      const size_t rank = random() % 3;
      const std::string line = std::to_string(random() % 4) + "\n";
      printed[rank] += line;
      merger.add(static_cast<int>(rank), line, now_ + milliseconds(i));
      if (random() % 5 == 0) merger.release(now_ + milliseconds(i));
    }
    merger.finish();
    std::string text = shown();
    for (size_t start = 0; start < text.size(); start = text.find('\n', start) + 1) {
      const size_t close = text.find(']', start);
      std::string who = text.substr(start, close - start);
      if (who == "[0-2") who = "012";
      for (const char rank : {'0', '1', '2'})
        if (who.find(rank) != std::string::npos)
          seen[static_cast<size_t>(rank - '0')] += text.substr(close + 2, text.find('\n', start) - close - 1);
    }
    EXPECT_EQ(seen, printed) << "round " << round;
  }
}

}  // namespace
}  // namespace lockstep
