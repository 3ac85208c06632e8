#pragma once

#include <lockstep/group.h>
#include <lockstep/loader.h>

namespace lockstep {

/// kNextPass: size of the dataset, seed, batch size and so on, and a sampler's order for the next pass. kPlace: also
/// the position and, once a pass has begun, its order; not within a step, when only some virtual ranks have had their
/// micro-batch.
enum class LoaderFacts { kNextPass, kPlace };

/// Throws the same Error on all ranks if their loaders would deal out different epochs, or have other ranks than
/// `group`.
/// REQUIRES: all ranks call it.
void check_same_data(const Group& group, const LoaderBase& loader, LoaderFacts facts);

}  // namespace lockstep
