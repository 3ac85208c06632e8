#pragma once

#include <ostream>
#include <string>
#include <vector>

#include <lockstep/context.h>

#include "support/golden_message.h"
#include "support/ranks.h"

// Wrong programs by name, each run on shm and Gloo with 2 and 3 ranks, where every rank must end with the program's
// message (golden_message.h).

namespace lockstep::testing {

struct GoldenCase {
  std::string name;
  Engine engine;
  friend void PrintTo(const GoldenCase& c, std::ostream* out) { *out << c.name << " " << name_of(c.engine); }
};
inline std::string name_of(const GoldenCase& c) { return c.name + "_" + name_of(c.engine); }

/// `programs`: a map by name.
template <typename Programs>
std::vector<GoldenCase> golden_cases(const Programs& programs) {
  std::vector<GoldenCase> cases;
  for (const auto& [name, program] : programs)
    for (const char* backend : {"shm", "gloo"})
      for (int world_size : {2, 3}) cases.push_back({name, {world_size, backend}});
  return cases;
}

/// `Side`: made of each rank's Context, what the program gets. `file`: has the messages.
template <typename Side, typename Program>
void expect_golden_case(const GoldenCase& golden, const std::string& file, const Program& program) {
  const auto body = [&](Context& context) {
    Side side(context);
    context.group().barrier();
    expect_golden_message(file, golden.name, golden.engine, context.rank(), [&] { program(side); });
  };
  // The timeout is long, so no error is found by waiting for it.
  run_ranks(golden.engine.world_size, body, std::chrono::seconds(30),
            {.collective_timeout = std::chrono::seconds(25), .backend = golden.engine.backend, .announce = false});
}

}  // namespace lockstep::testing
