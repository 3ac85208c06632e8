#pragma once

#include <vector>

namespace lockstep {

/// Which weights hold something else for a while, such as averages that a model is evaluated with. By the addresses of
/// their storages, so that whoever is about to write a training's state can tell. Any thread may call.
void note_borrowed(const std::vector<const void*>& storages);
/// Undoes one note_borrowed() of the same storages.
void note_given_back(const std::vector<const void*>& storages);

bool any_borrowed();
bool is_borrowed(const void* storage);

}  // namespace lockstep
