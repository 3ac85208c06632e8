#pragma once

namespace lockstep {

/// What `lockstep --version` prints: the version, and how this was built.
const char* build_facts();

}  // namespace lockstep
