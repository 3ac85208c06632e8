#pragma once

namespace lockstep {

inline constexpr const char* kTimeoutHint =
    ". If a rank works this long on purpose (an evaluation on rank 0, say), raise ContextOptions::collective_timeout "
    "(C: timeout_s of lockstep_options). Under lockstep run it must also "
    "compute or call lockstep::heartbeat() meanwhile, or --hang-timeout must be raised too.";
inline constexpr const char* kTimeoutHintOfPython =
    ". If a rank works this long on purpose (an evaluation on rank 0, say), raise the timeout (of init_process_group, "
    "new_group or lockstep.attach). Under lockstep run it must also compute meanwhile, or --hang-timeout must be "
    "raised "
    "too.";
/// Appended to the error of a collective that timed out. Set once, when Python loads the library.
inline const char* timeout_hint = kTimeoutHint;

}  // namespace lockstep
