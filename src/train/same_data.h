#pragma once

#include <lockstep/group.h>
#include <lockstep/loader.h>

namespace lockstep {

/// kNextPass: size of the dataset, seed, batch size and the like, and the order that a sampler gives for the next pass.
/// kPlace: where it is, too, and once a pass has begun the order of that; not within a step, where some virtual ranks
/// have had their micro-batch and some have not.
enum class LoaderFacts { kNextPass, kPlace };

/// Throws the same Error on all ranks if their loaders would deal out different epochs, or are not those of the ranks
/// of `group`. All ranks call it.
void check_same_data(const Group& group, const LoaderBase& loader, LoaderFacts facts);

}  // namespace lockstep
