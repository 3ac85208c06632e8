#include "rendezvous/key_value_client.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "base/error.h"
#include "base/socket.h"

// Any number of threads may wait for a reply at once, on one socket. The first of them receives, without the mutex, and
// stores every reply under its request's id; the others sleep on `changed_`. When the receiving thread has its own
// reply, it stops, and wakes the others so that one of them takes over.

namespace lockstep {
namespace {

/// The time limit for a server's answer to a request that need not wait. It answers in microseconds; seconds mean that
/// it is stopped or gone.
constexpr std::chrono::seconds kAnswerTimeout(30);
constexpr std::chrono::hours kLongestPoll(24 * 20);  // poll() counts milliseconds in an int

std::string_view view(const KeyValueClient::Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

KeyValueClient::Bytes to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

int64_t to_number(const std::string& text) {
  int64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

std::string list_keys(const std::vector<std::string>& keys) {
  constexpr size_t kListed = 8;
  std::string text;
  for (size_t i = 0; i < std::min(keys.size(), kListed); ++i) text += (i == 0 ? "'" : ", '") + keys[i] + "'";
  if (keys.size() > kListed) text += " and " + std::to_string(keys.size() - kListed) + " more";
  return text;
}

}  // namespace

KeyValueClient::KeyValueClient(FileDescriptor socket) : socket_(std::move(socket)) {
  ::fcntl(socket_.get(), F_SETFD, FD_CLOEXEC);
}

void KeyValueClient::set(const std::string& key, const Bytes& value) {
  ask_now(KeyValueRequest::kSet, {key, view(value)});
}

KeyValueClient::Bytes KeyValueClient::get(const std::string& key, Timeout timeout) {
  return to_bytes(ask_keys(KeyValueRequest::kGet, {key}, timeout).fields.at(0));
}

int64_t KeyValueClient::add(const std::string& key, int64_t amount) {
  return to_number(ask_now(KeyValueRequest::kAdd, {key, std::to_string(amount)}));
}

KeyValueClient::Bytes KeyValueClient::compare_set(const std::string& key, const Bytes& expected, const Bytes& desired) {
  return to_bytes(ask_now(KeyValueRequest::kCompareSet, {key, view(expected), view(desired)}));
}

bool KeyValueClient::delete_key(const std::string& key) { return ask_now(KeyValueRequest::kDelete, {key}) == "1"; }

bool KeyValueClient::check(const std::vector<std::string>& keys) {
  return ask_now(KeyValueRequest::kCheck, {keys.begin(), keys.end()}) == "1";
}

void KeyValueClient::wait(const std::vector<std::string>& keys, Timeout timeout) {
  ask_keys(KeyValueRequest::kWait, {keys.begin(), keys.end()}, timeout);
}

int64_t KeyValueClient::num_keys() { return to_number(ask_now(KeyValueRequest::kNumKeys, {})); }

void KeyValueClient::append(const std::string& key, const Bytes& value) {
  ask_now(KeyValueRequest::kAppend, {key, view(value)});
}

std::string KeyValueClient::ask_now(KeyValueRequest request, const Fields& fields) {
  Reply reply = ask(request, fields, kAnswerTimeout);
  return reply.fields.empty() ? "" : std::move(reply.fields[0]);
}

KeyValueClient::Reply KeyValueClient::ask_keys(KeyValueRequest request, const Fields& keys, Timeout timeout) {
  Reply reply = ask(request, keys, std::clamp<Timeout>(timeout, Timeout(0), kLongestPoll));
  if (reply.code == KeyValueReply::kMissing)
    throw Error("key-value store: no rank has set " + list_keys(reply.fields) + " within " +
                std::to_string(timeout.count()) + " ms");
  return reply;
}

KeyValueClient::Reply KeyValueClient::ask(KeyValueRequest request, const Fields& fields, Timeout timeout) {
  // A child of fork() would write into the middle of its parent's messages on the same connection.
  if (fork_generation_ != fork_generation())
    throw Error("key-value store: this connection belongs to the process that opened it, not to a child it forked");
  check_request({.code = static_cast<uint8_t>(request), .fields = fields});
  uint32_t id;
  {
    const MutexLock lock(mutex_);
    if (!broken_.empty()) throw Error(broken_);
    id = next_id_++;
    awaited_.emplace(id, std::nullopt);
  }
  send(id, request, fields);
  auto reply = await(id, Deadline(timeout));
  if (!reply && (request == KeyValueRequest::kGet || request == KeyValueRequest::kWait)) {
    send(id, KeyValueRequest::kCancel, {});
    reply = await(id, Deadline(kAnswerTimeout));
  }
  if (!reply) fail("it does not answer");
  if (reply->code == KeyValueReply::kRefused)
    throw Error("key-value store: " + (reply->fields.empty() ? "refused" : reply->fields[0]));
  return std::move(*reply);
}

void KeyValueClient::send(uint32_t id, KeyValueRequest request, const Fields& fields) {
  std::string frame;
  append_frame(frame, id, static_cast<uint8_t>(request), fields);
  std::string failure;
  {
    const MutexLock lock(send_mutex_);
    try {
      send_all(socket_.get(), frame.data(), frame.size(), Deadline(kAnswerTimeout));
      return;
    } catch (const Error& error) {
      failure = error.what();
    }
  }
  fail(failure);
}

std::optional<KeyValueClient::Reply> KeyValueClient::await(uint32_t id, const Deadline& deadline) {
  MutexLock lock(mutex_);
  for (;;) {
    const auto found = awaited_.find(id);
    if (found->second) {
      Reply reply = std::move(*found->second);
      awaited_.erase(found);
      return reply;
    }
    if (!broken_.empty()) throw Error(broken_);
    if (deadline.passed()) return std::nullopt;
    if (receiving_)
      changed_.wait_for(lock.native(), std::chrono::milliseconds(deadline.remaining_ms()));
    else
      receive(lock, deadline);
  }
}

void KeyValueClient::receive(MutexLock& lock, const Deadline& deadline) {
  receiving_ = true;
  lock.unlock();
  std::string failure;
  std::vector<std::pair<uint32_t, Reply>> replies;
  try {
    std::array<char, 64 << 10> piece;
    inbox_.append(piece.data(), receive_some(socket_.get(), piece.data(), piece.size(), deadline));
    size_t done = 0;
    while (const auto frame = parse_frame(std::string_view(inbox_).substr(done))) {
      replies.emplace_back(frame->id, Reply{.code = static_cast<KeyValueReply>(frame->code),
                                            .fields = {frame->fields.begin(), frame->fields.end()}});
      done += frame->bytes;
    }
    inbox_.erase(0, done);
  } catch (const Error& error) {
    failure = error.what();
  }
  lock.lock();
  receiving_ = false;
  for (auto& [id, reply] : replies)
    if (const auto found = awaited_.find(id); found != awaited_.end()) found->second = std::move(reply);
  changed_.notify_all();
  if (failure.empty()) return;
  lock.unlock();
  fail(failure);
}

void KeyValueClient::fail(const std::string& reason) {
  const MutexLock lock(mutex_);
  if (broken_.empty())
    broken_ = "key-value store: the server is gone (" + reason + "); under `lockstep run` the server is the launcher";
  changed_.notify_all();
  throw Error(broken_);
}

}  // namespace lockstep
