#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

/// Notes that this library has set parameters of this process as the program asked it to: from a state, or to those of
/// another rank. To be called when they are set, with the addresses of their storages. Any thread may call. `values`: a
/// hash of what they were set to; 0: the same on all ranks.
void note_weights_set(const std::vector<const void*>& storages, uint64_t values = 0);
/// The same for whatever a program's own functions have set.
void note_any_weights_set();
/// note_weights_set(), of a state that the program gave.
void note_weights_loaded(const std::vector<const void*>& storages, uint64_t values);
/// How often that was.
uint64_t times_weights_were_set();
/// How often of these a state was given.
uint64_t times_weights_were_loaded();

/// Which weights hold something else for a while, such as averages that a model is evaluated with. By the addresses of
/// their storages, so that whoever is about to write a training's state can tell. Any thread may call.
void note_borrowed(const std::vector<const void*>& storages);
/// Undoes one note_borrowed() of the same storages.
void note_given_back(const std::vector<const void*>& storages);

bool any_borrowed();
bool is_borrowed(const void* storage);

}  // namespace lockstep
