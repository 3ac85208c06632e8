#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <string>

#include "hosts/key.h"

namespace lockstep::hosts {

enum class Side { kCoordinator, kAgent };

/// TLS 1.3 with a run's key as an external pre-shared key, and fresh Diffie-Hellman shares for each connection. There
/// are no certificates, tickets or early data: a peer without the key does not complete the handshake.
class Tls {
 public:
  Tls(const Key& key, Side side);
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  struct FreeSsl {
    void operator()(SSL* ssl) const { SSL_free(ssl); }
  };
  using Session = std::unique_ptr<SSL, FreeSsl>;
  /// For a connected, non-blocking socket.
  Session connect(int socket) const;
  const Key& key() const { return key_; }
  Side side() const { return side_; }

 private:
  struct FreeContext {
    void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  };

  const Key key_;
  const Side side_;
  std::unique_ptr<SSL_CTX, FreeContext> context_;
};

}  // namespace lockstep::hosts
