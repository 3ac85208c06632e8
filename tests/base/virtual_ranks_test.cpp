#include "base/virtual_ranks.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace lockstep {
namespace {

/// A generator that appends a letter to its state for each number that is drawn.
struct Drawing {
  std::string state = "own";
  void draw() { state += '.'; }
  VirtualRanks::Generator generator() {
    return {[this] { return state; }, [this](const std::string& to) { state = to; }};
  }
};

TEST(VirtualRanks, EachHasItsOwnGenerator) {
  Drawing drawing;
  VirtualRanks ranks(5, 1, 2, 1, drawing.generator(), {"two", "three", "four"});
  EXPECT_EQ(ranks.block(), (LeafRange{2, 5}));
  EXPECT_FALSE(ranks.one_each());
  for (int step = 0; step < 2; ++step)
    for (int v = 2; v < 5; ++v) {
      ranks.enter(v);
      ranks.enter(v);
      EXPECT_EQ(ranks.current(), v);
      EXPECT_EQ(VirtualRanks::current_of_process(), v);
      drawing.draw();
    }
  EXPECT_EQ(drawing.state, "four..");
  EXPECT_EQ(ranks.generator_states(), (std::vector<std::string>{"own", "two..", "three..", "four.."}));
  ranks.leave();
  EXPECT_EQ(drawing.state, "own");
  EXPECT_EQ(VirtualRanks::current_of_process(), -1);
  ranks.enter(3);
  ranks.set_generator_states({"o", "t", "h", "f"});
  EXPECT_EQ(drawing.state, "h");
  ranks.leave();
  EXPECT_EQ(drawing.state, "o");
}

TEST(VirtualRanks, RefusesThoseOfOtherProcesses) {
  Drawing drawing;
  VirtualRanks ranks(4, 0, 2, 1, drawing.generator(), {"a", "b"});
  EXPECT_THROW(ranks.enter(2), Error);
  EXPECT_EQ(ranks.current(), std::nullopt);
}

TEST(VirtualRanks, TellsListenersBeforeTheGeneratorChanges) {
  Drawing drawing;
  VirtualRanks ranks(2, 0, 1, 1, drawing.generator(), {"a", "b"});
  std::vector<std::string> heard;
  auto listening = ranks.listen([&](std::optional<int> from, std::optional<int> to) {
    heard.push_back(std::to_string(from.value_or(-1)) + ">" + std::to_string(to.value_or(-1)) + drawing.state);
  });
  ranks.enter(0);
  ranks.enter(1);
  listening.reset();
  ranks.leave();
  EXPECT_EQ(heard, (std::vector<std::string>{"-1>0own", "0>1a"}));
}

}  // namespace
}  // namespace lockstep
