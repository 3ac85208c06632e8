#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// Records that this library has set parameters of this process at the program's request, from a state or to another
/// rank's. Called when they are set, with the addresses of their storages. Any thread may call. `values` is a hash of
/// the new values; 0: the same on all ranks.
void note_weights_set(const std::vector<const void*>& storages, uint64_t values = 0);
/// Records that the program's own functions may have set any weights.
void note_any_weights_set();
/// note_weights_set() for a state that the program gave.
void note_weights_loaded(const std::vector<const void*>& storages, uint64_t values);
uint64_t times_weights_were_set();
/// How many of these times a state was given.
uint64_t times_weights_were_loaded();

/// Records that weights were loaded from a checkpoint, but not its part `name`, the outer copy that belongs to them.
/// The same on all ranks.
void note_outer_copy_left_out(const std::string& name);
struct OuterCopiesLeftOut {
  uint64_t times = 0;
  std::string last;  ///< name of a part
};
OuterCopiesLeftOut outer_copies_left_out();

/// Records that these weights, by the addresses of their storages, hold something else for a while, such as averages
/// for evaluating a model. Code that is about to write a training's state checks this. Any thread may call.
void note_borrowed(const std::vector<const void*>& storages);
/// Undoes one note_borrowed() of the same storages.
void note_given_back(const std::vector<const void*>& storages);

bool any_borrowed();
bool is_borrowed(const void* storage);

}  // namespace lockstep
