#include "collectives/ancestor.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

namespace lockstep {
namespace {

/// The lines that `script` prints; $P is the program that prints its starting process, according to the variable X.
std::vector<std::string> lines_of(const std::string& script) {
  FILE* pipe = ::popen(("P='" LOCKSTEP_BIN_DIR "/print_ancestor X'; " + script).c_str(), "r");
  std::string text;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) text += static_cast<char>(c);
  EXPECT_EQ(::pclose(pipe), 0);
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST(StartingProcess, IsTheSameForSiblingsWhateverIsBetween) {
  // One rank is started at once, one through a shell, one through two; all in the background, as launchers do.
  const auto lines = lines_of(
      "export P; for i in 1 2 3; do case $i in 1) X=$i $P;; 2) X=$i sh -c '$P; true';; "
      "3) X=$i sh -c 'sh -c \"$P; true\"; true';; esac; done; echo $$");
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[0].substr(0, lines[0].find('-')), lines[3]);
  EXPECT_EQ(lines[1], lines[0]);
  EXPECT_EQ(lines[2], lines[0]);
}

TEST(StartingProcess, DiffersForTwoThatStart) {
  const auto lines = lines_of("export P; sh -c 'X=1 $P; true'; sh -c 'X=1 $P; true'");
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_NE(lines[0], lines[1]);
}

TEST(StartingProcess, OfAVariableWithAnotherNameIsTheParent) {
  // XX=1 and Y=X=1 are not X.
  const auto lines = lines_of("export P; sh -c 'echo $$; export XX=1 Y=X=1; X=1 $P; true'");
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[1].substr(0, lines[1].find('-')), lines[0]);
  EXPECT_GT(lines[1].size(), lines[0].size() + 1)
      << "without the time of its start, a later process could take its place";
}

}  // namespace
}  // namespace lockstep
