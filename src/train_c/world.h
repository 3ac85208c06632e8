#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/context.h>

#include "base/shared_segment.h"
#include "collectives/call_guard.h"
#include "train_c/handles.h"

namespace lockstep::train_c {

/// Ranks that work together.
struct Party {
  Group group;
  std::vector<int> numbers{};  ///< of its ranks in the world; empty: the same
};

/// The ranks of the run, behind a lockstep_train_world.
struct World {
  explicit World(Context joined) : context(std::move(joined)) {}

  Context context;
  const Party all{context.group()};
  CurrentCaller caller;
  const unsigned generation = fork_generation();
  int made = 0;  ///< models and replicas so far; ranks that make the same calls give them the same numbers
};

Handles<World, lockstep_train_world>& worlds();

/// Held during a call of a world or of what belongs to it. Refuses a second thread, and a child of fork().
class Call {
 public:
  /// `function` is a literal.
  Call(const char* function, World& world);

 private:
  std::unique_ptr<CallGuard> guard_;
};

/// What a rank tells the others before anything is changed.
struct Report {
  std::string call;                      ///< the function, and what it is called on
  std::string settings;                  ///< lines that must be equal on all ranks
  std::string problem;                   ///< why this rank cannot take part; empty: it can
  lockstep_status status = LOCKSTEP_OK;  ///< of the problem
  double loss = 0, weight = 1;
  bool for_all = false;  ///< rank 0 works for all ranks, which get its status, too; not sent
};

/// Runs `body`, whose failure becomes the report's problem, and exchanges the reports. Returns all ranks', in the order
/// of the party. Throws on all of them if a rank calls something else, cannot take part, or has other settings: this
/// rank's own exception, or a StatusError that names the rank. The world remains usable.
std::vector<Report> agree(const Party& party, Report report, const std::function<void(Report&)>& body);

/// Runs `body`. If it throws, tells the other ranks, which wait in `call`, before the exception goes on.
void or_tell(const Party& party, const std::string& call, const std::function<void()>& body);

/// What is behind the handle of a function that all ranks call. If the handle is refused, tells the other ranks, which
/// wait in this process's world.
template <typename Thing, typename Handle>
std::shared_ptr<Thing> find_on_all(const char* function, Handles<Thing, Handle>& all, const Handle* handle) {
  if (std::shared_ptr<Thing> thing = all.find_or_null(handle)) return thing;
  if (const std::shared_ptr<World> world = worlds().only()) {
    const Call call(function, *world);
    or_tell(world->all, std::string(function) + " with a handle that is refused", [&] { all.find(function, handle); });
  }
  return all.find(function, handle);
}

/// As in the functions of the C interface.
ContextOptions context_options(const char* function, const lockstep_train_options* options);
/// Joins the ranks of an MPI communicator. `communicator` points to an MPI_Comm, or to a Fortran program's handle.
Context join_mpi(const void* communicator, bool is_fortran, ContextOptions options);

}  // namespace lockstep::train_c
