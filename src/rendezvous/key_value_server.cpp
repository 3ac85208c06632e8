#include "rendezvous/key_value_server.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "base/error.h"
#include "base/socket.h"

namespace lockstep {
namespace {

constexpr size_t kMaxStoredBytes = 256 << 20;
constexpr size_t kMaxParked = 1024;       // for each client
constexpr size_t kMaxOutbox = 128 << 20;  // for each client

/// A request that cannot be granted: its client gets the error and stays connected.
class Refusal : public Error {
 public:
  using Error::Error;
};

void reply(std::string& outbox, uint32_t id, KeyValueReply code, const std::vector<std::string_view>& fields = {}) {
  append_frame(outbox, id, static_cast<uint8_t>(code), fields);
}

int64_t parse_number(std::string_view key, std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size())
    throw Refusal("add: key '" + std::string(key) + "' or the amount is not a 64-bit decimal number");
  return number;
}

int64_t sum(std::string_view key, int64_t a, int64_t b) {
  int64_t total;
  if (__builtin_add_overflow(a, b, &total)) throw Refusal("add: key '" + std::string(key) + "' would leave 64 bits");
  return total;
}

}  // namespace

int KeyValueServer::add_client(FileDescriptor socket) {
  const int fd = socket.get();
  clients_.insert_or_assign(fd, Client{.number = next_client_, .socket = std::move(socket)});
  return next_client_++;
}

void KeyValueServer::append_polled(std::vector<pollfd>& polled) const {
  for (const auto& [fd, client] : clients_)
    polled.push_back({.fd = fd, .events = static_cast<short>(client.outbox.empty() ? POLLIN : POLLOUT), .revents = 0});
}

void KeyValueServer::handle(const pollfd& ready) {
  if (ready.revents == 0) return;
  const auto found = clients_.find(ready.fd);
  if (found == clients_.end()) return;
  try {
    Client& client = found->second;
    if (client.outbox.empty() && !receive(client))
      return drop(ready.fd, client.inbox.empty() ? "" : "closed inside a request");
    serve(client);
  } catch (const ConnectionClosed&) {
    drop(ready.fd, "");
  } catch (const Error& error) {
    drop(ready.fd, error.what());
  }
}

std::vector<KeyValueServer::Dropped> KeyValueServer::take_dropped() { return std::exchange(dropped_, {}); }

bool KeyValueServer::receive(Client& client) {
  // One piece per call, so that a client that never stops sending does not keep the others waiting.
  std::array<char, 64 << 10> piece;
  const ssize_t count = ::recv(client.socket.get(), piece.data(), piece.size(), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return true;
  if (count == 0 || (count < 0 && errno == ECONNRESET)) return false;
  if (count < 0) throw_errno("receiving");
  client.inbox.append(piece.data(), static_cast<size_t>(count));
  return true;
}

void KeyValueServer::serve(Client& client) {
  // A request is answered only when earlier replies have been sent, so a client's replies do not pile up.
  flush(client);
  size_t done = 0;
  while (client.outbox.empty()) {
    const auto frame = parse_frame(std::string_view(client.inbox).substr(done));
    if (!frame) break;
    answer_request(client, *frame);
    flush(client);
    done += frame->bytes;
  }
  client.inbox.erase(0, done);
}

void KeyValueServer::flush(Client& client) {
  if (client.outbox.size() > kMaxOutbox) throw Error("it does not read its answers");
  size_t done = 0;
  while (done < client.outbox.size()) {
    const ssize_t count = ::send(client.socket.get(), client.outbox.data() + done, client.outbox.size() - done,
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (count < 0 && (errno == EPIPE || errno == ECONNRESET)) throw ConnectionClosed("");
    if (count < 0) throw_errno("answering");
    done += static_cast<size_t>(count);
  }
  client.outbox.erase(0, done);
}

void KeyValueServer::answer_request(Client& client, const KeyValueFrame& frame) {
  check_request(frame);
  const auto& fields = frame.fields;
  const auto done = [&](const std::vector<std::string_view>& result = {}) {
    reply(client.outbox, frame.id, KeyValueReply::kDone, result);
  };
  const auto find = [&](std::string_view key) { return values_.find(std::string(key)); };
  try {
    switch (static_cast<KeyValueRequest>(frame.code)) {
      case KeyValueRequest::kSet:
        store(fields[0], std::string(fields[1]));
        return done();
      case KeyValueRequest::kAppend: {
        const auto old = find(fields[0]);
        store(fields[0], (old == values_.end() ? "" : old->second) + std::string(fields[1]));
        return done();
      }
      case KeyValueRequest::kAdd: {
        const auto old = find(fields[0]);
        const int64_t before = old == values_.end() ? 0 : parse_number(fields[0], old->second);
        const std::string total = std::to_string(sum(fields[0], before, parse_number(fields[0], fields[1])));
        store(fields[0], total);
        return done({total});
      }
      case KeyValueRequest::kCompareSet: {
        // As in c10d: a missing key equals an empty expected value; otherwise the expected value itself is returned.
        const auto old = find(fields[0]);
        const bool equal = old == values_.end() ? fields[1].empty() : old->second == fields[1];
        if (!equal) return done({old == values_.end() ? fields[1] : std::string_view(old->second)});
        store(fields[0], std::string(fields[2]));
        return done({fields[2]});
      }
      case KeyValueRequest::kDelete: {
        const auto old = find(fields[0]);
        if (old == values_.end()) return done({"0"});
        stored_bytes_ -= old->first.size() + old->second.size();
        values_.erase(old);
        return done({"1"});
      }
      case KeyValueRequest::kCheck:
        return done({std::all_of(fields.begin(), fields.end(), [&](auto key) { return find(key) != values_.end(); })
                         ? "1"
                         : "0"});
      case KeyValueRequest::kNumKeys:
        return done({std::to_string(values_.size())});
      case KeyValueRequest::kGet:
      case KeyValueRequest::kWait:
        return park(client, frame.id, static_cast<KeyValueRequest>(frame.code), fields);
      case KeyValueRequest::kCancel:
        return cancel(client, frame.id);
    }
  } catch (const Refusal& refusal) {
    reply(client.outbox, frame.id, KeyValueReply::kRefused, {refusal.what()});
  }
}

void KeyValueServer::park(Client& client, uint32_t id, KeyValueRequest request,
                          const std::vector<std::string_view>& keys) {
  Parked parked{.id = id, .request = request, .keys = {keys.begin(), keys.end()}};
  if (answer_if_complete(client, parked)) return;
  if (client.parked.size() >= kMaxParked) throw Error("more than " + std::to_string(kMaxParked) + " waiting requests");
  client.parked.push_back(std::move(parked));
}

void KeyValueServer::cancel(Client& client, uint32_t id) {
  const auto found =
      std::find_if(client.parked.begin(), client.parked.end(), [&](const Parked& p) { return p.id == id; });
  if (found == client.parked.end()) return;  // its reply was already sent
  std::vector<std::string_view> missing;
  for (const auto& key : found->keys)
    if (!values_.contains(key)) missing.push_back(key);
  reply(client.outbox, id, KeyValueReply::kMissing, missing);
  client.parked.erase(found);
}

void KeyValueServer::store(std::string_view key, std::string value) {
  if (value.size() > kMaxValueBytes)
    throw Refusal("key '" + std::string(key) + "' would grow over " + std::to_string(kMaxValueBytes) + " bytes");
  const auto found = values_.find(std::string(key));
  const bool is_new = found == values_.end();
  const size_t after = stored_bytes_ + value.size() + (is_new ? key.size() : 0) - (is_new ? 0 : found->second.size());
  if (after > kMaxStoredBytes) throw Refusal("the store is full (" + std::to_string(kMaxStoredBytes) + " bytes)");
  stored_bytes_ = after;
  values_[std::string(key)] = std::move(value);
  if (!is_new) return;
  for (auto& [fd, client] : clients_) {
    std::erase_if(client.parked,
                  [&, &owner = client](const Parked& parked) { return answer_if_complete(owner, parked); });
  }
}

bool KeyValueServer::answer_if_complete(Client& client, const Parked& parked) {
  for (const auto& key : parked.keys)
    if (!values_.contains(key)) return false;
  if (client.outbox.size() > kMaxOutbox) return true;  // flush() will drop the client
  if (parked.request == KeyValueRequest::kGet)
    reply(client.outbox, parked.id, KeyValueReply::kDone, {values_.at(parked.keys.front())});
  else
    reply(client.outbox, parked.id, KeyValueReply::kDone);
  return true;
}

void KeyValueServer::drop(int fd, std::string reason) {
  const auto found = clients_.find(fd);
  dropped_.push_back({found->second.number, std::move(reason)});
  clients_.erase(found);
}

}  // namespace lockstep
