#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "rendezvous/key_value_client.h"
#include "rendezvous/key_value_server_thread.h"

namespace lockstep {

/// A KeyValueClient with the interface that c10d's engines expect. On the serving rank it owns the server.
class KeyValueStore final : public c10d::Store {
 public:
  KeyValueStore(std::unique_ptr<KeyValueServerThread> server, FileDescriptor socket, std::chrono::milliseconds timeout)
      : Store(timeout), shared_(std::make_shared<Shared>(std::move(server), std::move(socket))) {}

  c10::intrusive_ptr<Store> clone() override { return c10::make_intrusive<KeyValueStore>(*this); }

  using Store::compareSet;
  using Store::set;

  void set(const std::string& key, const std::vector<uint8_t>& value) override { client().set(key, value); }
  std::vector<uint8_t> get(const std::string& key) override { return client().get(key, timeout_); }
  int64_t add(const std::string& key, int64_t value) override { return client().add(key, value); }
  bool deleteKey(const std::string& key) override { return client().delete_key(key); }
  bool check(const std::vector<std::string>& keys) override { return client().check(keys); }
  int64_t getNumKeys() override { return client().num_keys(); }
  void wait(const std::vector<std::string>& keys) override { client().wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    client().wait(keys, timeout);
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    return client().compare_set(key, expected, desired);
  }
  void append(const std::string& key, const std::vector<uint8_t>& value) override { client().append(key, value); }

 private:
  struct Shared {
    Shared(std::unique_ptr<KeyValueServerThread> server_, FileDescriptor socket)
        : server(std::move(server_)), client(std::move(socket)) {}
    std::unique_ptr<KeyValueServerThread> server;
    KeyValueClient client;  ///< destroyed before the server
  };

  KeyValueClient& client() { return shared_->client; }

  std::shared_ptr<Shared> shared_;  ///< by all clones
};

}  // namespace lockstep
