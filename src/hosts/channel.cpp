#include "hosts/channel.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace lockstep::hosts {
namespace {

/// The pieces read in one turn, so that a side that never stops sending does not delay others.
constexpr int kPiecesInATurn = 64;
/// A key of AES-GCM must not encrypt more than about 2^24 records (RFC 8446, 5.5).
constexpr size_t kMostByAKey = 1 << 30;

std::string address_text(int socket, int (*name)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  std::array<char, NI_MAXHOST> text{};
  if (name(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&address), length, text.data(), text.size(), nullptr, 0,
                  NI_NUMERICHOST) != 0)
    return "?";
  return text.data();
}

}  // namespace

Channel::Channel(FileDescriptor socket, const Tls& tls)
    : socket_(std::move(socket)), side_(tls.side()), tls_(tls.connect(socket_.get())) {
  const int on = 1;
  const unsigned int silence = static_cast<unsigned int>(kSilence.count());
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &silence, sizeof silence);
}

short Channel::events() const {
  if (state_ == State::kClosed) return 0;
  return static_cast<short>(POLLIN | (wants_write_ || queued() > 0 ? POLLOUT : 0));
}

void Channel::act() {
  if (state_ == State::kHandshake) shake_hands();
  if (state_ == State::kOpen) receive();
  if (state_ == State::kOpen) flush();
}

void Channel::shake_hands() {
  ERR_clear_error();
  const int result = SSL_do_handshake(tls_.get());
  if (result != 1) {
    goes_on(result);
    return;
  }
  wants_write_ = false;
  if (SSL_session_reused(tls_.get()) != 1) return close("the other side did not use this run's key");
  state_ = State::kOpen;
  last_heard_ = Clock::now();
}

void Channel::receive() {
  std::array<char, 16 << 10> piece;
  for (int i = 0; i < kPiecesInATurn || SSL_pending(tls_.get()) > 0; ++i) {
    ERR_clear_error();
    const int count = SSL_read(tls_.get(), piece.data(), static_cast<int>(piece.size()));
    if (count <= 0) {
      goes_on(count);
      return;
    }
    inbox_.append(piece.data(), static_cast<size_t>(count));
    last_heard_ = Clock::now();
  }
}

void Channel::flush() {
  wants_write_ = false;
  while (queued() > 0) {
    ERR_clear_error();
    if (sent_by_key_ >= kMostByAKey && SSL_key_update(tls_.get(), SSL_KEY_UPDATE_NOT_REQUESTED) == 1) sent_by_key_ = 0;
    ERR_clear_error();
    const size_t size = std::min<size_t>(queued(), 1 << 20);
    const int count = SSL_write(tls_.get(), outbox_.data() + sent_, static_cast<int>(size));
    if (count <= 0) {
      goes_on(count);
      break;
    }
    sent_ += static_cast<size_t>(count);
    sent_by_key_ += static_cast<size_t>(count);
  }
  // Moves each byte once at most, however long the rest is.
  if (sent_ == outbox_.size() || sent_ > std::max<size_t>(outbox_.size() / 2, 1 << 20)) {
    outbox_.erase(0, sent_);
    sent_ = 0;
  }
}

bool Channel::goes_on(int result) {
  const int code = errno;
  switch (SSL_get_error(tls_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      return true;
    case SSL_ERROR_WANT_WRITE:
      wants_write_ = true;
      return true;
    case SSL_ERROR_SYSCALL:
      close(code != 0 ? std::strerror(code) : "the connection was closed");
      return false;
    case SSL_ERROR_ZERO_RETURN:
      close("the connection was closed");
      return false;
    default:
      break;
  }
  const unsigned long error = ERR_peek_error();
  const bool cut_off = ERR_GET_REASON(error) == SSL_R_UNEXPECTED_EOF_WHILE_READING;
  key_refused_ = state_ == State::kHandshake && !cut_off;
  const char* text = ERR_reason_error_string(error);
  close(cut_off ? "the connection was closed" : text != nullptr ? std::string("TLS: ") + text : "TLS failed");
  return false;
}

void Channel::beat(Clock::time_point now) {
  if (now < next_beat_) return;
  next_beat_ = now + kBeatEvery;
  send(Kind::kBeat);
}

void Channel::send_body(Kind kind, std::string_view body) {
  if (state_ != State::kOpen) return;
  append_frame(outbox_, static_cast<uint8_t>(kind), body);
  flush();
}

std::optional<Channel::Message> Channel::next(size_t limit) {
  if (read_ > 0 && (read_ == inbox_.size() || read_ > (1 << 20))) {
    inbox_.erase(0, read_);
    read_ = 0;
  }
  try {
    const auto frame = parse_frame(std::string_view(inbox_).substr(read_), limit);
    if (!frame) return std::nullopt;
    read_ += frame->bytes;
    return Message{static_cast<Kind>(frame->kind), frame->body};
  } catch (const ProtocolError& error) {
    read_ = inbox_.size();
    close(error.what());
    return std::nullopt;
  }
}

void Channel::close(const std::string& why) {
  if (state_ == State::kClosed) return;
  // Says goodbye, so that the other side knows the reason.
  if (state_ == State::kOpen) SSL_shutdown(tls_.get());
  state_ = State::kClosed;
  reason_ = why;
  ERR_clear_error();
}

Channel::Addresses Channel::addresses() const {
  return {.here = address_text(socket_.get(), &::getsockname), .there = address_text(socket_.get(), &::getpeername)};
}

}  // namespace lockstep::hosts
