#pragma once

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/clock.h"
#include "support/golden_message.h"
#include "support/ranks.h"
#include "support/told_in_time.h"

// Tables of wrong programs that leave their ranks able to go on, so that many run one after the other on the same
// ranks.

namespace lockstep::testing {

/// `Side` is one rank's side of a program, made anew for each. `expected` as in golden_message.h; "" for a program that
/// is odd, but right.
template <typename Side>
struct TabledProgram {
  std::string name, expected;
  std::function<void(Side&)> program;
};

/// Every program must end on every rank with its message, in time. `make` makes a side.
template <typename Side, typename Make>
void expect_each_told(Context& context, const std::vector<TabledProgram<Side>>& programs, const Make& make) {
  const std::string of = "rank " + std::to_string(context.rank()) + " of ";
  for (const auto& [name, expected, program] : programs) {
    context.group().barrier();
    auto side = make(name);
    context.group().barrier();
    std::string said;
    const auto start = Clock::now();
    try {
      program(*side);
    } catch (const c10::Error& error) {
      said = error.what_without_backtrace();
    } catch (const std::exception& error) {
      said = error.what();
    }
    if (!said.empty()) expect_told_in_time(start, of + name);
    if (expected.empty())
      EXPECT_EQ(said, "") << of << name;
    else
      EXPECT_TRUE(!said.empty() && matches_golden(said, with_ranks(expected, context.world_size())))
          << of << name << " says\n"
          << said << "\nnot\n"
          << with_ranks(expected, context.world_size());
  }
  context.group().barrier();
}

inline const std::vector<Engine>& engines_of_wrong_programs() {
  static const std::vector<Engine> kEngines{{2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}};
  return kEngines;
}

}  // namespace lockstep::testing
