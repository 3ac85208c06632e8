#include "optim/gradient_source.h"

#include <array>

#include "collectives/shm/segment/layout.h"

namespace lockstep::optim {

void GradientSource::load(void* to, size_t at, size_t count) const {
  std::array<const void*, shm::kMaxRanks> from;
  for (size_t i = 0; i < parts.size(); ++i) from[i] = parts[i] + at;
  size_t first = 0;
  if (sum != nullptr)
    sum({&to, 1, from.data(), static_cast<int>(parts.size()), count, nullptr});
  else
    scale({&to, 1, from.data(), 1, count, &factors[first++]});
  for (; first < factors.size(); ++first) multiply(to, count, factors[first]);
}

void GradientSource::multiply(void* elements, size_t count, double factor) const {
  const void* const from = elements;
  scale({&elements, 1, &from, 1, count, &factor});
}

}  // namespace lockstep::optim
