#pragma once

#include <string>

#include <lockstep/error.h>

namespace lockstep {

/// Throws Error("<what>: <text of errno>").
[[noreturn]] void throw_errno(const std::string& what);

}  // namespace lockstep
