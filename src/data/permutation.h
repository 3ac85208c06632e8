#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

/// 0 .. size - 1 in an order drawn from `seed`, every order equally likely as far as the generator goes.
///
/// The same on every machine: the generator is std::mt19937_64, whose numbers the standard fixes; the draws from it
/// are ours, because the standard's distributions differ between libraries. Fisher and Yates' shuffle, from the end:
/// place i takes the value of a place drawn from 0 .. i.
std::vector<int64_t> permutation(int64_t size, uint64_t seed);

}  // namespace lockstep
