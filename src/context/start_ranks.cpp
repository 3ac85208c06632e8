#include "context/start_ranks.h"

#include "base/environment.h"
#include "launch/process/own_program.h"
#include "rendezvous/world.h"

namespace lockstep {

void start_ranks_if_asked(int argc, const char* const* argv) {
  const World world = discover_world(Environment::from_process());
  become_launcher_if_asked({argv, argv + argc}, world.source == World::Source::kAlone ? "" : name_of(world.source));
}

}  // namespace lockstep
