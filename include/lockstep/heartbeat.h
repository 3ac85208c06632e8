#pragma once

namespace lockstep {

/// Says that this rank goes on with what the others wait for: in long work of one rank in which it mostly waits itself,
/// such as a download or a slow file system, call it as the work goes on (not from a thread of its own, which would
/// beat beside a hang). `lockstep run` ends ranks of which none computes, communicates or calls this for
/// `--hang-timeout`; a rank that computes need not call it. The others' wait is still bounded by
/// ContextOptions::collective_timeout. Costs nanoseconds, does not communicate; without such a launcher it does
/// nothing. From any thread, with or without a Context.
void heartbeat();

}  // namespace lockstep
