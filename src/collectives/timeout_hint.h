#pragma once

namespace lockstep {

/// Appended to the error of a collective that timed out.
inline constexpr const char* kTimeoutHint =
    ". If a rank works this long on purpose (an evaluation on rank 0, say), raise ContextOptions::collective_timeout "
    "(Python: the timeout of init_process_group; C: timeout_s of lockstep_options). Under lockstep run it must also "
    "compute or call lockstep::heartbeat() meanwhile, or --hang-timeout must be raised too.";

}  // namespace lockstep
