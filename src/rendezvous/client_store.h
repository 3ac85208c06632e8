#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "rendezvous/key_value_client.h"
#include "rendezvous/key_value_server_thread.h"
#include "rendezvous/meeting_store.h"

namespace lockstep {

/// The connection to a store of LocalRendezvous or of the launcher, and the store itself on the rank that serves it.
class ClientStore final : public MeetingStore {
 public:
  /// `server` is null on ranks that do not serve the store.
  ClientStore(std::unique_ptr<KeyValueServerThread> server, FileDescriptor socket)
      : server_(std::move(server)), client_(std::move(socket)) {}

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t amount) override { return client_.add(key, amount); }
  bool check(const std::string& key) override { return client_.check({key}); }
  void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override {
    client_.wait(keys, timeout);
  }
  /// Whether the store answers.
  bool is_there();
  bool serves() const { return server_ != nullptr; }
  /// Every rank calls it when it has read what it needs. On the rank that serves the store it returns when all have, or
  /// after two seconds; elsewhere it does not wait.
  void leave(int world_size) noexcept;

 private:
  const std::unique_ptr<KeyValueServerThread> server_;
  KeyValueClient client_;  // destroyed before the server
};

}  // namespace lockstep
