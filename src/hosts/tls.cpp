#include "hosts/tls.h"

#include <string_view>

#include "launch/launch_error.h"

namespace lockstep::hosts {
namespace {

constexpr const char* kCipher = "TLS_AES_256_GCM_SHA384";
constexpr unsigned char kCipherId[] = {0x13, 0x02};
constexpr std::string_view kIdentity = "lockstep-run";

const Key& key_of(SSL* ssl) { return static_cast<const Tls*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl)))->key(); }

/// The key in the form in which OpenSSL takes an external one; null if out of memory.
SSL_SESSION* session_with(SSL* ssl) {
  SSL_SESSION* session = SSL_SESSION_new();
  if (session == nullptr) return nullptr;
  const Key& key = key_of(ssl);
  const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl, kCipherId);
  if (cipher == nullptr || SSL_SESSION_set1_master_key(session, key.data(), Key::kBytes) != 1 ||
      SSL_SESSION_set_cipher(session, cipher) != 1 || SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) != 1) {
    SSL_SESSION_free(session);
    return nullptr;
  }
  return session;
}

int offer_key(SSL* ssl, const EVP_MD*, const unsigned char** identity, size_t* length, SSL_SESSION** session) {
  *session = session_with(ssl);
  *identity = reinterpret_cast<const unsigned char*>(kIdentity.data());
  *length = kIdentity.size();
  return *session != nullptr ? 1 : 0;
}

int find_key(SSL* ssl, const unsigned char* identity, size_t length, SSL_SESSION** session) {
  const bool known = std::string_view(reinterpret_cast<const char*>(identity), length) == kIdentity;
  *session = known ? session_with(ssl) : nullptr;
  return known && *session == nullptr ? 0 : 1;
}

}  // namespace

Tls::Tls(const Key& key, Side side) : key_(key), side_(side), context_(SSL_CTX_new(TLS_method())) {
  SSL_CTX* context = context_.get();
  if (context == nullptr || SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) != 1 || SSL_CTX_set_ciphersuites(context, kCipher) != 1)
    throw LaunchError(kExitResourceLimit, "OpenSSL offers no TLS 1.3 with " + std::string(kCipher));
  SSL_CTX_set_app_data(context, this);
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET);
  SSL_CTX_set_num_tickets(context, 0);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(context,
                   SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_RELEASE_BUFFERS);
  if (side == Side::kCoordinator) {
    SSL_CTX_set_psk_find_session_callback(context, find_key);
    return;
  }
  // A peer that shows a certificate instead of the key is refused, because no certificate is trusted.
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_psk_use_session_callback(context, offer_key);
}

Tls::Session Tls::connect(int socket) const {
  Session session(SSL_new(context_.get()));
  if (session == nullptr || SSL_set_fd(session.get(), socket) != 1)
    throw LaunchError(kExitResourceLimit, "OpenSSL has no memory for a connection");
  if (side_ == Side::kAgent)
    SSL_set_connect_state(session.get());
  else
    SSL_set_accept_state(session.get());
  return session;
}

}  // namespace lockstep::hosts
