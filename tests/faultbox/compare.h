#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::faultbox {

/// The same faults under `lockstep run` and under torchrun of `python` (PyTorch's DistributedDataParallel on Gloo),
/// `count` times each, one at a time; prints a table in Markdown. `names`: only these faults; empty: all. A run
/// that has not ended after `patience_s` counts as hanging and is killed. Returns the exit code: 1 if Lockstep did
/// anything wrong.
int compare(const std::string& python, const std::vector<std::string>& names, uint64_t seed, int count, int patience_s);
std::vector<std::string> compared_faults();

}  // namespace lockstep::faultbox
