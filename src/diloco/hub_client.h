#pragma once

#include <chrono>
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
/// and send in the background.
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
  /// Connects, and returns the hub's kGive or kTake, kTakeFragments if there are several. `model`: lines that must be
  /// the same on all machines. Throws Error if the agent is not there, if the hub refuses the machine, if nothing comes
  /// within the collective timeout, and soon after the run has been asked to stop.
  Message join(int64_t round, const std::string& model, int64_t fragments = 1);
  /// Sends a kState in the background, before anything else that is sent later.
  void give(const std::string& body) { post(hub::Kind::kState, body); }
  enum class Sent { kYes, kLate, kLost };
  /// Sends `body` for a round in the background; kLate: a result tells that the round was closed without it, and the
  /// hub hears that this machine is there. `come`: the results that have come.
  Sent contribute(int64_t round, const std::string& body, std::deque<std::string>& come);
  /// The results that have come.
  std::deque<std::string> results();
  /// Waits for the results up to a round's, and adds all that have come to `come`. Returns false if the connection is
  /// lost before, or is_asked_to_stop(). Throws Error if the hub refuses the machine, or no result comes within the
  /// collective timeout.
  bool results_until(int64_t round, std::deque<std::string>& come);
  bool is_lost();
  /// To be called in each step: tells machines that wait for this one that it is no hang.
  void note_step();
  /// Whether a wait has ended because the run was asked to stop.
  bool is_asked_to_stop() const { return asked_to_stop_; }
  void leave();
  /// Tells the hub why this machine is about to end.
  void report(const std::string& problem);

 private:
  void connect();
  void disconnect();
  bool send(std::string_view frame);
  /// Sends it in the background, after what was posted before.
  void post(hub::Kind kind, const std::string& body);
  void receive();
  /// Empty: the connection is lost, or the run was asked to stop. `what`: what it waits for.
  std::optional<Message> next(const char* what);
  /// Waits until what was posted has been sent: the hub takes nothing before its state from a machine that gives the
  /// first one.
  void end_posting();

  const HubPlace place_;
  FileDescriptor socket_;
  std::mutex sending_, mutex_;
  std::condition_variable came_;
  std::deque<Message> received_;
  bool lost_ = true;
  bool asked_to_stop_ = false;
  std::chrono::steady_clock::time_point step_told_{};
  std::thread receiver_, poster_;
};

}  // namespace lockstep::diloco
