#pragma once

#include <lockstep/group.h>
#include <lockstep/loader.h>

namespace lockstep {

/// kOptions: size of the dataset, seed, batch size and the like. kPlace: where it is, too, and once a pass has begun the
/// order that a sampler gave; not within a step, where some virtual ranks have had their micro-batch and some have not.
enum class LoaderFacts { kOptions, kPlace };

/// Throws the same Error on all ranks if their loaders would deal out different epochs. All ranks call it.
void check_same_data(const Group& group, const LoaderBase& loader, LoaderFacts facts);

}  // namespace lockstep
