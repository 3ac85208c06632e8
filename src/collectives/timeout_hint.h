#pragma once

namespace lockstep {

/// Behind the words of a collective whose time was up.
inline constexpr const char* kTimeoutHint =
    ". If a rank works this long on purpose (an evaluation on rank 0, say), raise ContextOptions::collective_timeout "
    "(Python: the timeout of init_process_group); under lockstep run it must compute meanwhile or call "
    "lockstep::heartbeat(), or else --hang-timeout be raised too";

}  // namespace lockstep
