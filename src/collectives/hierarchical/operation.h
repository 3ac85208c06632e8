#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "collectives/hierarchical/layout.h"
#include "collectives/hierarchical/links.h"
#include "collectives/hierarchical/machine.h"
#include "collectives/hierarchical/pieces.h"
#include "collectives/hierarchical/scratch.h"
#include "collectives/shm/protocol/request.h"
#include "collectives/split_table.h"

namespace lockstep::hierarchical_engine {

/// Resources that a group's operations use.
struct Equipment {
  const Layout layout;
  const SumOrder order;
  Machine machine;
  Links links;
  Scratch travelling, adding;
  std::optional<SplitTable> splits{};  ///< of the last uneven all_to_all: messages may outlive the operation
};

/// One collective, carried out by the thread that calls run(): through shared memory within the machine, by messages
/// between machines. Each rank sends to other machines data that no other rank of its machine sends.
class Operation {
 public:
  /// `tag` is equal on all ranks, and differs from the last operations' tags.
  Operation(Equipment& equipment, const shm::Request& request, uint32_t tag, std::chrono::milliseconds timeout)
      : layout_(equipment.layout),
        machine_(equipment.machine),
        links_(equipment.links),
        equipment_(equipment),
        request_(request),
        tag_(tag),
        timeout_(timeout) {}

  void run();

 private:
  // operation.cpp
  void barrier();
  void broadcast();
  void all_gather();
  void gather();
  void scatter();
  void all_to_all();
  void compare_splits();

  size_t block_bytes() const { return request_.count * shm::element_bytes(request_.type); }
  const std::byte* input(int rank) const;
  std::byte* output(int rank) const;
  const std::byte* input() const { return static_cast<const std::byte*>(request_.input); }
  std::byte* output() const { return static_cast<std::byte*>(request_.output); }
  int here() const { return layout_.here(); }
  bool is_here(int rank) const { return layout_.machine_of[static_cast<size_t>(rank)] == here(); }
  const std::vector<int>& mates() const { return layout_.ranks[static_cast<size_t>(here())]; }
  std::vector<Card> meet(const void* memory, size_t stride = 0, size_t rounds = 0) {
    return machine_.meet({tag_, machine_.place_of(memory), stride, rounds}, timeout_);
  }
  /// The last meeting. Its timeout is longer: the rank that waits for other machines reports their delay.
  void part_ways() { machine_.wait_for_all(timeout_ + kLonger); }
  void send(const void* data, size_t bytes, int to) {
    if (bytes > 0) transfers_.push_back(links_.send(data, bytes, to, tag_));
  }
  void receive(void* data, size_t bytes, int from) {
    if (bytes > 0) transfers_.push_back(links_.receive(data, bytes, from, tag_));
  }

  static constexpr std::chrono::seconds kLonger{4};

  const Layout& layout_;
  Machine& machine_;
  Links& links_;
  Equipment& equipment_;
  const shm::Request& request_;
  const uint32_t tag_;
  const std::chrono::milliseconds timeout_;
  std::vector<Transfer> transfers_;  ///< finished at the end
};

}  // namespace lockstep::hierarchical_engine
