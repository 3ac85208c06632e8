#pragma once

namespace lockstep {

/// Thrown from a wait when the program must stop waiting (Python's KeyboardInterrupt). Code that converts exceptions to
/// text lets it pass.
struct Interruption {};

/// Makes waits of the program's main thread interruptible. After SIGINT, whose handler in the program runs as usual,
/// `check` is soon called on that thread, with no lock of this library held. The wait throws what `check` throws, an
/// Interruption. Not called while SIGINT has no handler.
void let_waits_be_interrupted(void (*check)());

/// Whether this thread's waits can be interrupted. Such waits end from time to time to check.
bool can_be_interrupted();

/// Whether there was a SIGINT that no waiting main thread has noticed yet. Any thread may call.
bool interruption_is_pending();

/// Waits call it at least several times a second. Throws an Interruption if the program must stop waiting.
void check_for_interruption();

}  // namespace lockstep
