#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace lockstep {

/// A number in 0 .. limit - 1, all equally likely. Lemire, "Fast Random Integer Generation in an Interval", ACM
/// Transactions on Modeling and Computer Simulation 29 (2019): the high word of draw * limit is the number; the 2^64
/// mod limit smallest low words are redrawn, since they would favour some numbers.
uint64_t draw_below(uint64_t limit, std::mt19937_64& generator);

/// 0 .. size - 1 in an order drawn from `seed`; every order is equally likely, within the limits of the generator.
///
/// The result is the same on every machine. The generator is std::mt19937_64, whose numbers the standard defines; the
/// draws from it are our own, because the standard's distributions differ between libraries. This is the Fisher-Yates
/// shuffle, from the end: position i gets the value of a position drawn from 0 .. i.
std::vector<int64_t> permutation(int64_t size, uint64_t seed);

}  // namespace lockstep
