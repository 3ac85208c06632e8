#include "data/permutation.h"

#include <numeric>
#include <utility>

namespace lockstep {

uint64_t draw_below(uint64_t limit, std::mt19937_64& generator) {
  using Product = unsigned __int128;
  Product product = Product{generator()} * limit;
  if (static_cast<uint64_t>(product) < limit) {
    const uint64_t rejected = (0 - limit) % limit;
    while (static_cast<uint64_t>(product) < rejected) product = Product{generator()} * limit;
  }
  return static_cast<uint64_t>(product >> 64);
}

std::vector<int64_t> permutation(int64_t size, uint64_t seed) {
  std::vector<int64_t> order(size);
  std::iota(order.begin(), order.end(), int64_t{0});
  std::mt19937_64 generator(seed);
  for (int64_t last = size - 1; last > 0; --last)
    std::swap(order[last], order[draw_below(static_cast<uint64_t>(last) + 1, generator)]);
  return order;
}

}  // namespace lockstep
