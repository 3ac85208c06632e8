#pragma once

#include <cstdint>
#include <optional>

#include "base/clock.h"
#include "hosts/key.h"

// A connection to a relay begins in the clear, with a request that proves the run's key. The TLS of a link follows from
// end to end, so a relay sees what any other machine on the way sees. The requests are those of TURN for TCP (RFC
// 6062): a machine that cannot be reached keeps a registered connection, on which the relay tells it of connections to
// answer.

namespace lockstep::hosts {

struct RelayRequest {
  enum Kind : uint32_t { kRegister = 1, kConnect, kBind };

  uint32_t kind = 0;
  uint32_t start = 0;         ///< LinkPlan::start
  uint32_t from = 0, to = 0;  ///< machines
  uint64_t token = 0;         ///< kBind: of the connection that is answered
};

/// Answers to a request.
constexpr char kRelayed = 'W', kNotRelayed = 'N';

/// Sends the request with its proof, and returns whether the relay carries it out.
bool ask_relay(int socket, const Key& key, const RelayRequest& request, const Deadline& deadline);

/// Whether a connection begins with a request, and not with TLS. Waits for its first byte.
bool asks_relay(int socket, const Deadline& deadline);
/// Receives a request; empty without a proof. The answer is still to be sent.
std::optional<RelayRequest> hear_request(int socket, const Key& key, const Deadline& deadline);
/// Returns false if the connection is broken.
bool answer_request(int socket, char answer);

}  // namespace lockstep::hosts
