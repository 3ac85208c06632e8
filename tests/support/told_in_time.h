#pragma once

#include <string>

#include <gtest/gtest.h>

#include "base/clock.h"

namespace lockstep::testing {

/// Expects that a wrong call that began at `start` has ended within the five seconds in which every rank must be told.
inline void expect_told_in_time(Clock::time_point start, const std::string& what = "the error") {
  EXPECT_LT(seconds_since(start), 5) << what << " came late";
}

}  // namespace lockstep::testing
