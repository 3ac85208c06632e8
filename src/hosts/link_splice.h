#pragma once

#include <openssl/ssl.h>

#include <string>

#include "base/clock.h"

namespace lockstep::hosts {

/// Completes the handshake of a link. Returns false if the other side does not have the key or the time is over.
bool prove_key(SSL* tls, int wire, const Deadline& deadline);
/// Sends or receives exactly `size` bytes. Returns false if the link breaks or the time is over.
bool send_all(SSL* tls, int wire, const void* data, size_t size, const Deadline& deadline);
bool receive_all(SSL* tls, int wire, void* data, size_t size, const Deadline& deadline);

/// Moves bytes both ways between a connection of this machine and a link, until both directions have ended: an end on
/// one side becomes an end on the other. Returns the reason if the link broke; empty: it ended in order. `other` is
/// the machine at its other end.
std::string splice(int local, SSL* tls, int wire, const std::string& other);

}  // namespace lockstep::hosts
