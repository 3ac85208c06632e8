#pragma once

namespace lockstep {

/// The output of `lockstep --version`: the version, and the build's options.
const char* build_facts();

}  // namespace lockstep
