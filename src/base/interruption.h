#pragma once

namespace lockstep {

/// Thrown from a wait when the program must stop waiting (Python's KeyboardInterrupt), whatever else the exception is.
/// Code that converts exceptions to text lets it pass.
struct Interruption {};

/// From now on the program's main thread can be interrupted while it waits. After SIGINT, whose handler of the program
/// runs as always, `check` is called on that thread, soon and without a lock of this library held; what it throws, an
/// Interruption, is what the wait throws. Not called while SIGINT has no handler.
void let_waits_be_interrupted(void (*check)());

/// Whether this thread's waits can be interrupted: if so, they end now and then to ask.
bool can_be_interrupted();

/// Whether there was a SIGINT of which no main thread that waits has heard yet. From any thread.
bool interruption_is_pending();

/// Called by waits, some times a second at least: throws an Interruption if the program is to stop waiting.
void check_for_interruption();

}  // namespace lockstep
