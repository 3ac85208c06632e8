#pragma once

#include <chrono>
#include <functional>
#include <ostream>
#include <string>

#include <lockstep/context.h>

namespace lockstep::testing {

/// Runs `body` on `count` ranks, each a process of its own that joins the others as it would under `lockstep run`, and
/// fails the current test if a rank has a failed expectation, throws, dies, or is not done in time. Ranks that are
/// left are killed. Expectations inside `body` name the rank in their trace. `machines` has a letter for each rank, the
/// same for ranks that are to share a machine; empty: all do.
void run_ranks(int count, const std::function<void(Context&)>& body,
               std::chrono::milliseconds timeout = std::chrono::seconds(60),
               ContextOptions options = {.announce = false}, const std::string& machines = "");

/// The number of ranks, and the backend: "shm", "gloo" or "hierarchical", or "" for a world of one.
struct Engine {
  int world_size;
  std::string backend;
  std::string machines = "";  ///< as run_ranks takes it
};
/// "2_shm", "3_hierarchical_aab": names test instances.
std::string name_of(const Engine& engine);
inline void PrintTo(const Engine& engine, std::ostream* out) { *out << name_of(engine); }
void run_ranks(const Engine& engine, const std::function<void(Context&)>& body);

}  // namespace lockstep::testing
