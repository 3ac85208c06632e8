#include "hosts/relay_request.h"

#include <arpa/inet.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "base/socket.h"

namespace lockstep::hosts {
namespace {

constexpr std::chrono::milliseconds kRelayAnswerTime(2000);
constexpr size_t kRelayProofBytes = 32;
using RelayNonce = std::array<unsigned char, 16>;
using RelayProof = std::array<unsigned char, kRelayProofBytes>;

/// As it is sent; numbers in network byte order.
struct RelayMessage {
  std::array<char, 8> magic = {'R', 'e', 'l', 'a', 'y', ' ', '1', '\n'};  // TLS begins with another byte
  uint32_t kind = 0, start = 0, from = 0, to = 0;
  uint64_t token = 0;
};

/// The nonce is the relay's, so a proof that was seen on the wire is of no use again.
std::optional<RelayProof> proof_of(const Key& key, const RelayNonce& nonce, const RelayMessage& message) {
  std::array<unsigned char, sizeof(RelayNonce) + sizeof(RelayMessage)> text{};
  std::memcpy(text.data(), nonce.data(), sizeof nonce);
  std::memcpy(text.data() + sizeof nonce, &message, sizeof message);
  RelayProof proof{};
  unsigned int length = 0;
  if (::HMAC(EVP_sha256(), key.data(), Key::kBytes, text.data(), text.size(), proof.data(), &length) == nullptr ||
      length != kRelayProofBytes)
    return std::nullopt;
  return proof;
}

}  // namespace

bool ask_relay(int socket, const Key& key, const RelayRequest& request, const Deadline& deadline) try {
  const RelayMessage message{.kind = htonl(request.kind),
                             .start = htonl(request.start),
                             .from = htonl(request.from),
                             .to = htonl(request.to),
                             .token = request.token};
  send_all(socket, &message, sizeof message, deadline);
  RelayNonce nonce;
  receive_all(socket, nonce.data(), nonce.size(), deadline);
  const auto proof = proof_of(key, nonce, message);
  if (!proof) return false;
  send_all(socket, proof->data(), proof->size(), deadline);
  char answer = 0;
  receive_all(socket, &answer, 1, deadline);
  return answer == kRelayed;
} catch (const Error&) {
  return false;
}

bool asks_relay(int socket, const Deadline& deadline) {
  char first = 0;
  pollfd polled{.fd = socket, .events = POLLIN, .revents = 0};
  while (::poll(&polled, 1, deadline.remaining_ms()) < 0 && errno == EINTR) continue;
  return ::recv(socket, &first, 1, MSG_PEEK | MSG_DONTWAIT) == 1 && first == RelayMessage().magic[0];
}

std::optional<RelayRequest> hear_request(int socket, const Key& key, const Deadline& deadline) try {
  const RelayMessage known;
  RelayMessage message;
  receive_all(socket, &message, sizeof message, deadline);
  if (message.magic != known.magic) return std::nullopt;
  RelayNonce nonce;
  if (::RAND_bytes(nonce.data(), static_cast<int>(nonce.size())) != 1) return std::nullopt;
  send_all(socket, nonce.data(), nonce.size(), deadline);
  RelayProof proof;
  receive_all(socket, proof.data(), proof.size(), deadline);
  const auto expected = proof_of(key, nonce, message);
  if (!expected || ::CRYPTO_memcmp(proof.data(), expected->data(), kRelayProofBytes) != 0) return std::nullopt;
  return RelayRequest{.kind = ntohl(message.kind),
                      .start = ntohl(message.start),
                      .from = ntohl(message.from),
                      .to = ntohl(message.to),
                      .token = message.token};
} catch (const Error&) {
  return std::nullopt;
}

bool answer_request(int socket, char answer) try {
  send_all(socket, &answer, 1, Deadline(kRelayAnswerTime));
  return true;
} catch (const Error&) {
  return false;
}

}  // namespace lockstep::hosts
