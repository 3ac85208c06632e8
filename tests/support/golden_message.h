#pragma once

#include <algorithm>
#include <fstream>
#include <regex>
#include <string>

#include <gtest/gtest.h>

#include <c10/util/Exception.h>

#include "base/clock.h"
#include "base/error.h"
#include "support/ranks.h"

// Messages of wrong programs, from files with lines such as "name: text", or "name shm odd: text" for one engine and
// side: "odd" is the last rank, "rest" the others. " ... " stands for anything, {odd}, {rest}, {all} and {last} for
// ranks.

namespace lockstep::testing {

/// `file` relative to the sources; `side`: "shm odd".
inline std::string golden_message(const std::string& file, const std::string& name, const std::string& side) {
  std::ifstream lines(std::string(LOCKSTEP_SOURCE_DIR "/") + file);
  for (std::string line; std::getline(lines, line);) {
    const size_t colon = line.find(": ");
    if (line.substr(0, colon) == name || line.substr(0, colon) == name + " " + side) return line.substr(colon + 2);
  }
  return "no line in " + file;
}

/// For 2 or 3 ranks.
inline std::string with_ranks(std::string text, int world_size) {
  const std::string odd = "rank " + std::to_string(world_size - 1), rest = world_size == 2 ? "rank 0" : "ranks 0, 1";
  text = std::regex_replace(text, std::regex("\\{odd\\}"), odd);
  text = std::regex_replace(text, std::regex("\\{all\\}"), world_size == 2 ? "ranks 0, 1" : "ranks 0-2");
  text = std::regex_replace(text, std::regex("\\{last\\}"), std::to_string(world_size - 1));
  return std::regex_replace(text, std::regex("\\{rest\\}"), rest);
}

/// Whether `text` contains the parts of `pattern` between " ... " in this order, and begins with the first.
inline bool matches_golden(const std::string& text, const std::string& pattern) {
  size_t at = 0;
  for (size_t from = 0; from <= pattern.size();) {
    const size_t to = std::min(pattern.find(" ... ", from), pattern.size());
    const size_t found = text.find(pattern.substr(from, to - from), at);
    if (found == std::string::npos || (from == 0 && found != 0)) return false;
    at = found + to - from;
    from = to + 5;
  }
  return true;
}

/// Expects that `program` ends within two seconds with the message that `file` has for it.
template <typename Program>
void expect_golden_message(const std::string& file, const std::string& name, const Engine& engine, int rank,
                           const Program& program) {
  const std::string side = engine.backend + (rank == engine.world_size - 1 ? " odd" : " rest");
  const std::string expected = with_ranks(golden_message(file, name, side), engine.world_size);
  const std::string where = "rank " + std::to_string(rank) + " of " + name;
  const auto start = Clock::now();
  std::string said;
  try {
    program();
    ADD_FAILURE() << where << " ended well";
  } catch (const Error& error) {
    said = error.what();
  } catch (const c10::Error& error) {
    said = error.what_without_backtrace();
  }
  EXPECT_TRUE(matches_golden(said, expected)) << where << " says\n" << said << "\nnot\n" << expected;
  EXPECT_LT(seconds_since(start), 2) << where;
}

}  // namespace lockstep::testing
