#pragma once

namespace lockstep {

/// The output of `lockstep --version`: the version, and how this was built.
const char* build_facts();

}  // namespace lockstep
