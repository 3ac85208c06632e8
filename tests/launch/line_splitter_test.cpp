#include "launch/output/line_splitter.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

std::string split(const std::vector<std::string>& pieces) {
  LineSplitter splitter;
  std::string lines;
  for (const auto& piece : pieces) splitter.feed(piece, lines);
  splitter.finish(lines);
  return lines;
}

TEST(LineSplitter, MakesWholeLinesOfAnyPieces) {
  EXPECT_EQ(split({}), "");
  EXPECT_EQ(split({"a\nb\n"}), "a\nb\n");
  EXPECT_EQ(split({"a", "b\n", "\nc"}), "ab\n\nc\n");
  EXPECT_EQ(split({std::string("n\0l\n", 4)}), std::string("n\0l\n", 4));
}

TEST(LineSplitter, KeepsTheLastStateOfARedrawnLine) {
  EXPECT_EQ(split({"10%\r20%\r30%\ndone\n"}), "30%\ndone\n");
  EXPECT_EQ(split({"\r10%", "\r", "20%", "\r\n"}), "20%\n");
  EXPECT_EQ(split({"10%\r20%\r"}), "20%\n");
  EXPECT_EQ(split({"\r10 %\x1b[K\r9 %\x1b[K\n"}), "9 %\n");
}

TEST(LineSplitter, TakesCarriageReturnAndNewlineForOneEnd) { EXPECT_EQ(split({"a\r\nb\r", "\nc\r\r\n"}), "a\nb\nc\n"); }

TEST(LineSplitter, SplittingDoesNotDependOnThePieces) {
  const std::string text = "one\rtwo\n\r\nthree\r\n\rfour\n\n five\r";
  std::vector<std::string> bytes;
  for (const char byte : text) bytes.emplace_back(1, byte);
  EXPECT_EQ(split(bytes), split({text}));
  EXPECT_EQ(split({text}), "two\n\nthree\nfour\n\n five\n");
}

TEST(LineSplitter, BreaksLinesWithoutEnd) {
  constexpr size_t kMost = LineSplitter::kMaxLineBytes;
  const std::string lines = split({std::string(2 * kMost + 5, 'x')});
  EXPECT_EQ(lines, std::string(kMost, 'x') + "\n" + std::string(kMost, 'x') + "\nxxxxx\n");
  EXPECT_EQ(split({std::string(kMost, 'y') + "\nz"}), std::string(kMost, 'y') + "\nz\n");
}

TEST(Tail, HoldsTheLastLines) {
  for (const int count : {0, 1, 19, 20, 21, 200}) {
    for (const int block_lines : {1, 7, 1000}) {
      Tail tail;
      std::string block;
      for (int i = 0; i < count; ++i) {
        block += std::to_string(i) + "\n";
        if (i % block_lines == block_lines - 1) tail.add(std::exchange(block, ""));
      }
      tail.add(block);
      const int kept = std::min(count, 20);
      ASSERT_EQ(tail.lines().size(), static_cast<size_t>(kept)) << count << " in blocks of " << block_lines;
      for (int i = 0; i < kept; ++i) EXPECT_EQ(tail.lines()[i], std::to_string(count - kept + i));
    }
  }
}

TEST(Tail, KeepsEmptyLinesAndShortensLongOnes) {
  Tail tail;
  tail.add("\n\n" + std::string(5000, 'x') + "\n");
  ASSERT_EQ(tail.lines().size(), 3u);
  EXPECT_EQ(tail.lines()[0], "");
  EXPECT_EQ(tail.lines()[2].size(), Tail::kLineBytes);
}

}  // namespace
}  // namespace lockstep
