#include "hosts/link_splice.h"

#include <openssl/err.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "hosts/link_flow.h"
#include "hosts/link_sockets.h"

namespace lockstep::hosts {
namespace {

/// A key of AES-GCM must not encrypt more than about 2^24 records (RFC 8446, 5.5), which are 400 GB. OpenSSL does not
/// count, and a change costs some microseconds.
constexpr size_t kBytesOfAKey = 32 << 20;
constexpr int kLookMs = 1000;

class Splice {
 public:
  Splice(int local, SSL* tls, int wire, const std::string& other)
      : local_(local), tls_(tls), wire_(wire), other_(other) {}

  std::string run() {
    while (goes_on() && wait()) continue;
    return reason_;
  }

 private:
  /// Moves what can be moved. Returns false once the link has ended.
  bool goes_on() {
    reads_wait_for_write_ = writes_wait_ = false;
    return fill_outgoing() && send_outgoing() && fill_incoming() && send_incoming() &&
           !(out_.sink_ended && in_.sink_ended);
  }

  bool fill_outgoing() {
    if (out_.source_ended || !out_.is_empty()) return true;
    const ssize_t count = ::recv(local_, out_.buffer.data(), out_.buffer.size(), MSG_DONTWAIT);
    if (count > 0) out_.end = static_cast<size_t>(count);
    // A rank that was killed is told like one that has closed its connection.
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) out_.source_ended = true;
    return true;
  }

  bool send_outgoing() {
    while (!out_.is_empty()) {
      ERR_clear_error();
      // It is refused in the middle of a record, and tried again with the next.
      if (sent_by_key_ >= kBytesOfAKey && SSL_key_update(tls_, SSL_KEY_UPDATE_NOT_REQUESTED) == 1) sent_by_key_ = 0;
      ERR_clear_error();
      const int count = SSL_write(tls_, out_.data(), static_cast<int>(out_.size()));
      if (count <= 0) return can_wait(count, writes_wait_);
      out_.take(static_cast<size_t>(count));
      sent_by_key_ += static_cast<size_t>(count);
    }
    if (!out_.has_to_end()) return true;
    ERR_clear_error();
    // The socket may have no room for the end.
    if (const int result = SSL_shutdown(tls_); result < 0) return can_wait(result, writes_wait_);
    out_.sink_ended = true;
    return true;
  }

  bool fill_incoming() {
    if (!in_.is_empty()) return true;
    has_more_ = true;
    while (!in_.source_ended && in_.end < in_.buffer.size()) {
      ERR_clear_error();
      const int count = SSL_read(tls_, in_.buffer.data() + in_.end, static_cast<int>(in_.buffer.size() - in_.end));
      if (count > 0) {
        in_.end += static_cast<size_t>(count);
        continue;
      }
      if (SSL_get_error(tls_, count) == SSL_ERROR_ZERO_RETURN) {
        in_.source_ended = true;
        return true;
      }
      has_more_ = false;
      return can_wait(count, reads_wait_for_write_);
    }
    return true;
  }

  bool send_incoming() {
    if (is_rank_gone_) in_.take(in_.size());
    while (!in_.is_empty()) {
      const ssize_t count = ::send(local_, in_.data(), in_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && errno == EAGAIN) return true;
      if (count < 0) {
        // Its end is told to the other side, whose data is nobody's until it has ended as well: the link is not broken.
        is_rank_gone_ = out_.source_ended = true;
        in_.take(in_.size());
        return send_outgoing();
      }
      in_.take(static_cast<size_t>(count));
    }
    if (!in_.has_to_end()) return true;
    in_.sink_ended = true;
    ::shutdown(local_, SHUT_WR);
    return true;
  }

  /// After a call of OpenSSL that did not succeed. Returns false, with the reason, if the link is over.
  bool can_wait(int result, bool& needs_write) {
    const int code = errno;
    switch (SSL_get_error(tls_, result)) {
      case SSL_ERROR_WANT_READ:
        return true;
      case SSL_ERROR_WANT_WRITE:
        needs_write = true;
        return true;
      case SSL_ERROR_SYSCALL:
        reason_ = code != 0 ? std::strerror(code) : "the connection was closed";
        return false;
      default:
        break;
    }
    const unsigned long error = ERR_peek_error();
    const int number = ERR_GET_REASON(error);
    if (number == SSL_R_UNEXPECTED_EOF_WHILE_READING) {
      reason_ = "the connection was closed";
    } else {
      const char* const text = ERR_reason_error_string(error);
      const std::string tls = std::string(" (TLS: ") + (text != nullptr ? text : "unknown") + ")";
      reason_ = number > SSL_AD_REASON_OFFSET ? other_ + " refused what arrived there" + tls
                                              : "what arrived from " + other_ + " is not what it sent" + tls +
                                                    ", so something between the machines changes it";
    }
    return false;
  }

  /// Returns false, with the reason, if the other machine no longer answers.
  bool wait() {
    // OpenSSL may hold what did not fit into the buffer, of which the socket does not tell.
    if (in_.is_empty() && !in_.source_ended && has_more_) return true;
    short local = 0, wire = 0;
    if (out_.is_empty() && !out_.source_ended) local |= POLLIN;
    if (!in_.is_empty()) local |= POLLOUT;
    if (in_.is_empty() && !in_.source_ended) wire |= POLLIN;
    if (writes_wait_ || reads_wait_for_write_) wire |= POLLOUT;
    // A socket of which nothing is awaited must not wake this thread by its end.
    pollfd polled[] = {{.fd = local != 0 ? local_ : -1, .events = local, .revents = 0},
                       {.fd = wire != 0 ? wire_ : -1, .events = wire, .revents = 0}};
    if (::poll(polled, 2, kLookMs) != 0 || !is_unanswered(wire_)) return true;
    reason_ = other_ + " does not answer";
    return false;
  }

  const int local_;
  SSL* const tls_;
  const int wire_;
  const std::string& other_;
  Flow out_, in_;
  bool writes_wait_ = false, reads_wait_for_write_ = false;
  bool is_rank_gone_ = false;
  bool has_more_ = false;  ///< the buffer was full before OpenSSL was empty
  size_t sent_by_key_ = 0;
  std::string reason_;
};

/// Repeats `call` until it succeeds.
template <typename Call>
bool within(SSL* tls, int wire, const Deadline& deadline, const Call& call) {
  for (;;) {
    ERR_clear_error();
    const int result = call();
    if (result > 0) return true;
    const int error = SSL_get_error(tls, result);
    if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) return false;
    pollfd polled{
        .fd = wire, .events = static_cast<short>(error == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT), .revents = 0};
    if (deadline.passed() || ::poll(&polled, 1, deadline.remaining_ms()) == 0) return false;
  }
}

}  // namespace

bool prove_key(SSL* tls, int wire, const Deadline& deadline) {
  return within(tls, wire, deadline, [&] { return SSL_do_handshake(tls); }) && SSL_session_reused(tls) == 1;
}

bool send_all(SSL* tls, int wire, const void* data, size_t size, const Deadline& deadline) {
  return within(tls, wire, deadline,
                [&] { return SSL_write(tls, data, static_cast<int>(size)); });  // less than a record
}

bool receive_all(SSL* tls, int wire, void* data, size_t size, const Deadline& deadline) {
  for (size_t received = 0; received < size;) {
    size_t count = 0;
    if (!within(tls, wire, deadline,
                [&] { return SSL_read_ex(tls, static_cast<char*>(data) + received, size - received, &count); }))
      return false;
    received += count;
  }
  return true;
}

std::string splice(int local, SSL* tls, int wire, const std::string& other) {
  return Splice(local, tls, wire, other).run();
}

}  // namespace lockstep::hosts
