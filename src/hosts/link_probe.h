#pragma once

namespace lockstep::hosts {

/// What the ranks of `lockstep doctor --hosts` do, one on each machine: every pair connects in both directions and
/// measures its link; pairs that have no machine in common do so at the same time. Rank 0 prints a JSON list of what
/// was found, an object for each pair. Returns the exit code; throws Error.
int probe_links();

}  // namespace lockstep::hosts
