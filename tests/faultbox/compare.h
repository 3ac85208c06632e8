#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::faultbox {

/// The same faults under `lockstep run` and under torchrun of `python` (PyTorch's DistributedDataParallel on Gloo),
/// `count` times each, one at a time; prints a table, in Markdown. `names`: of these faults alone; empty: of all. A run
/// that is not over after `patience_s` is counted as hanging and killed. Returns the exit code: 1 where Lockstep did
/// not do what it must.
int compare(const std::string& python, const std::vector<std::string>& names, uint64_t seed, int count, int patience_s);
std::vector<std::string> compared_faults();

}  // namespace lockstep::faultbox
