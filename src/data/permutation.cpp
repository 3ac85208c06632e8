#include "data/permutation.h"

#include <numeric>
#include <random>
#include <utility>

namespace lockstep {
namespace {

/// A number in 0 .. range - 1, all equally likely. Lemire, "Fast Random Integer Generation in an Interval", ACM
/// Transactions on Modeling and Computer Simulation 29 (2019): the high word of draw * range is the number; the
/// 2^64 mod range smallest low words are drawn again, since they would favour some numbers.
uint64_t draw_below(uint64_t range, std::mt19937_64& generator) {
  using Product = unsigned __int128;
  Product product = Product{generator()} * range;
  if (static_cast<uint64_t>(product) < range) {
    const uint64_t rejected = (0 - range) % range;
    while (static_cast<uint64_t>(product) < rejected) product = Product{generator()} * range;
  }
  return static_cast<uint64_t>(product >> 64);
}

}  // namespace

std::vector<int64_t> permutation(int64_t size, uint64_t seed) {
  std::vector<int64_t> order(size);
  std::iota(order.begin(), order.end(), int64_t{0});
  std::mt19937_64 generator(seed);
  for (int64_t last = size - 1; last > 0; --last)
    std::swap(order[last], order[draw_below(static_cast<uint64_t>(last) + 1, generator)]);
  return order;
}

}  // namespace lockstep
