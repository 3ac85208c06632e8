#pragma once

#include "base/file_descriptor.h"
#include "hosts/key.h"

namespace lockstep::hosts {

/// First letters of the messages between an agent and its link process.
constexpr char kLinkBegin = 'B', kLinkOpen = 'O';   ///< orders, each with one answer
constexpr char kLinkAnswer = 'A', kLinkNews = 'N';  ///< why it could not be carried out; what has happened
constexpr char kLinkFailure = 'F';                  ///< why ranks wait for a link that cannot be made

/// Carries connections between ranks of different machines, until `control` is closed. A rank connects to the loopback
/// address of the other machine; the relay here opens a link, TLS 1.3 by the run's key, to the port `listener` of the
/// relay there, which connects to the rank. So nothing that ranks send leaves a machine in the clear, and engines do
/// not know.
void run_link_carrier(FileDescriptor control, FileDescriptor listener, const Key& key);

}  // namespace lockstep::hosts
