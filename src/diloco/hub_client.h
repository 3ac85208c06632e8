#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "base/file_descriptor.h"
#include "base/hub_frame.h"

namespace lockstep::diloco {

/// Where a machine finds the hub of its run's rounds: LOCKSTEP_ISLAND is "number/of@name", the name of the socket of
/// its agent.
struct HubPlace {
  int island = 0, islands = 1;
  std::string agent;

  /// Empty if the run was not started with --islands. Throws Error if the variable cannot be read.
  static std::optional<HubPlace> of_environment();
};

/// A machine's connection to the hub (hosts/round_hub.h), by its agent. Used by one thread; its own threads receive,
/// and send a state in the background.
class HubClient {
 public:
  explicit HubClient(HubPlace place) : place_(std::move(place)) {}
  ~HubClient() { disconnect(); }
  HubClient(const HubClient&) = delete;
  HubClient& operator=(const HubClient&) = delete;

  struct Message {
    hub::Kind kind;
    std::string body;
  };
  /// Connects, and returns the hub's kGive or kTake. Throws Error if the agent is not there, or the hub refuses the
  /// machine.
  Message join(int64_t round, uint64_t model);
  /// Sends a kState in the background.
  void give(const std::string& body);
  /// The results that have come, or else that of the round to which it contributes `body`. Empty: the connection is
  /// lost. Throws Error if the hub refuses the machine.
  std::deque<std::string> contribute(const std::string& body);
  /// The results that have come.
  std::deque<std::string> results();
  bool is_lost();
  void leave();

 private:
  void connect();
  void disconnect();
  bool send(std::string_view frame);
  void receive();
  /// Empty: the connection is lost.
  std::optional<Message> next();

  const HubPlace place_;
  FileDescriptor socket_;
  std::mutex sending_, mutex_;
  std::condition_variable came_;
  std::deque<Message> received_;
  bool lost_ = true;
  std::thread receiver_, giver_;
};

}  // namespace lockstep::diloco
