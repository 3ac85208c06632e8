#pragma once

#include <memory>
#include <vector>

namespace lockstep {

/// An object whose state a training changes, and without which a resumed run would begin that state anew.
struct StateInUse {
  const void* object;
  std::weak_ptr<const void> life;  ///< expires when the object does, or earlier
  const char* name;                ///< "an Ema that the training updates"
  const char* line;                ///< of the program, which adds it to a Checkpointer
};

/// A life for objects that call note_gone().
std::weak_ptr<const void> life_of_process();

/// Called each time the training changes the state.
void note_in_use(const StateInUse& state);
void note_optimizer_in_use(const void* optimizer, std::weak_ptr<const void> life);
/// Called for each batch that may train. The loader of the last one before a backward is in use.
void note_batch_given(const StateInUse& loader);
/// Called when a model's backward begins.
void note_backward();

/// Called when the state is taken, to be saved, or set: the program keeps it.
void note_kept(const void* object);
void note_optimizer_kept(const void* optimizer);
/// Called when an object ends whose `life` may be longer, or moves to another address.
void note_gone(const void* object);

/// The states in use that the program does not keep.
std::vector<StateInUse> forgotten_states();
/// Whether models were trained, and no optimizer has ever been noted.
bool optimizer_is_unknown();

}  // namespace lockstep
