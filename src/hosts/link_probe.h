#pragma once

namespace lockstep::hosts {

/// The program of the ranks of `lockstep doctor --hosts`, one on each machine. Every pair connects in both directions
/// and measures its link; pairs without a common machine do so at the same time. Rank 0 prints the results as a JSON
/// list with one object per pair. Returns the exit code; throws Error.
int probe_links();

}  // namespace lockstep::hosts
