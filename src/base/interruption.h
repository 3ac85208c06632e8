#pragma once

namespace lockstep {

/// Thrown from a wait when the program must stop waiting (Python's KeyboardInterrupt), whatever else the exception is.
/// Code that converts exceptions to text lets it pass.
struct Interruption {};

/// Makes waits of the program's main thread interruptible. After SIGINT, whose handler in the program runs as usual,
/// `check` is soon called on that thread, without a lock of this library held. The wait throws what `check` throws, an
/// Interruption. Not called while SIGINT has no handler.
void let_waits_be_interrupted(void (*check)());

/// Whether this thread's waits can be interrupted: if so, they end from time to time to check.
bool can_be_interrupted();

/// Whether there was a SIGINT that no waiting main thread has noticed yet. From any thread.
bool interruption_is_pending();

/// Called by waits, several times a second at least: throws an Interruption if the program must stop waiting.
void check_for_interruption();

}  // namespace lockstep
