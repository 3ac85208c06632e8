#include "collectives/hierarchical/operation.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "base/error.h"
#include "collectives/hierarchical/reduction.h"
#include "collectives/split_table.h"

// Operations that only move data. Messages go straight from the sender's memory to the receiver's, and all are started
// at once. Data that several ranks of a machine need crosses the network once, to one of them, which puts it where the
// others read it. Between two meetings a rank's stage does not change.

namespace lockstep::hierarchical_engine {
namespace {

using shm::OperationKind;

/// Bytes put on the stage at once.
constexpr size_t kStageBytes = 8 << 20;
/// The other ranks copy a received piece of a broadcast of this size while the next one is in flight.
constexpr size_t kBroadcastBytes = 1 << 20;

void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

/// The parts of a block in the order in which they are staged. An empty block has one, so that ranks meet.
template <typename Body>
void in_rounds(size_t bytes, size_t most, const Body& body) {
  size_t begin = 0;
  do {
    const size_t size = std::min(most, bytes - begin);
    body(begin, size);
    begin += size;
  } while (begin < bytes);
}

}  // namespace

void Operation::run() {
  switch (request_.kind) {
    case OperationKind::kBarrier:
      barrier();
      break;
    case OperationKind::kAllReduce:
    case OperationKind::kReduce:
    case OperationKind::kReduceScatter:
      Reduction(equipment_, request_, tag_, timeout_).run();
      break;
    case OperationKind::kBroadcast:
      broadcast();
      break;
    case OperationKind::kAllGather:
      all_gather();
      break;
    case OperationKind::kGather:
      gather();
      break;
    case OperationKind::kScatter:
      scatter();
      break;
    case OperationKind::kAllToAll:
    case OperationKind::kAllToAllUneven:
      all_to_all();
      break;
  }
  links_.finish(transfers_, timeout_);
}

const std::byte* Operation::input(int rank) const {
  const auto& blocks = request_.pieces().inputs;
  const auto r = static_cast<size_t>(rank);
  return blocks.empty() ? input() + r * block_bytes() : static_cast<const std::byte*>(blocks[r]);
}

std::byte* Operation::output(int rank) const {
  const auto& blocks = request_.pieces().outputs;
  const auto r = static_cast<size_t>(rank);
  return blocks.empty() ? output() + r * block_bytes() : static_cast<std::byte*>(blocks[r]);
}

void Operation::barrier() {
  meet(nullptr);
  if (layout_.local() == 0) {
    std::vector<std::byte> sent(1), received(static_cast<size_t>(layout_.machines()));
    for (int machine = 0; machine < layout_.machines(); ++machine) {
      if (machine == here()) continue;
      receive(&received[static_cast<size_t>(machine)], 1, layout_.on_rail(machine, 0));
      send(sent.data(), 1, layout_.on_rail(machine, 0));
    }
    links_.finish(transfers_, timeout_);
  }
  part_ways();
}

void Operation::broadcast() {
  const size_t bytes = block_bytes();
  const bool is_root = request_.root == layout_.rank;
  const int source = is_here(request_.root) ? request_.root : mates().front();
  // The root may pass its data as input or output.
  auto* data = is_root && request_.input != nullptr ? const_cast<std::byte*>(input()) : output();
  std::deque<Transfer> arriving;
  in_rounds(bytes, kBroadcastBytes, [&](size_t begin, size_t size) {
    if (size == 0) return;
    if (is_root) {
      for (int machine = 0; machine < layout_.machines(); ++machine)
        if (machine != here()) send(data + begin, size, layout_.on_rail(machine, 0));
    } else if (source == layout_.rank) {
      arriving.push_back(links_.receive(data + begin, size, request_.root, tag_));
    }
  });
  const bool shows = source == layout_.rank && !machine_.reaches(data, bytes);
  const size_t part = std::min(bytes, kBroadcastBytes);
  std::byte* stage = shows ? machine_.stage(2 * part) : nullptr;
  size_t round = 0;
  in_rounds(bytes, kBroadcastBytes, [&](size_t begin, size_t size) {
    if (!arriving.empty()) {
      links_.finish(arriving.front(), timeout_);
      arriving.pop_front();
    }
    // Two places alternate: a rank that meets for the next part has copied the previous one.
    std::byte* place = shows ? stage + round++ % 2 * part : data + begin;
    if (shows) copy_bytes(place, data + begin, size);
    const auto cards = meet(source == layout_.rank ? place : nullptr);
    if (source == layout_.rank) return;
    const int local = layout_.local_of[static_cast<size_t>(source)];
    copy_bytes(data + begin, machine_.at(local, cards[static_cast<size_t>(local)].place), size);
  });
  part_ways();
  if (is_root && output() != nullptr) copy_bytes(output(), data, bytes);
}

void Operation::all_gather() {
  const size_t bytes = block_bytes();
  const auto world = static_cast<size_t>(layout_.world_size());
  const size_t most = std::min(bytes, std::max<size_t>(64 << 10, kStageBytes / world));
  /// The rank of this machine to which `rank`, of another machine, sends its row.
  const auto entry = [&](int rank) { return layout_.on_rail(here(), layout_.local_of[static_cast<size_t>(rank)]); };
  std::vector<int> mine;  // ranks whose rows arrive at this rank
  for (int rank = 0; rank < layout_.world_size(); ++rank)
    if (!is_here(rank) && entry(rank) == layout_.rank) mine.push_back(rank);
  std::deque<Transfer> arriving;
  in_rounds(bytes, most, [&](size_t begin, size_t size) {
    if (size == 0) return;
    for (const int rank : mine) arriving.push_back(links_.receive(output(rank) + begin, size, rank, tag_));
    for (int machine = 0; machine < layout_.machines(); ++machine)
      if (machine != here()) send(input() + begin, size, layout_.on_rail(machine, layout_.local()));
  });
  std::byte* stage = machine_.stage((1 + mine.size()) * most);
  /// The data on each rank's stage after its own row.
  std::vector<size_t> slots(static_cast<size_t>(machine_.size()), 1);
  std::vector<size_t> slot_of(world, 0);
  for (int rank = 0; rank < layout_.world_size(); ++rank)
    if (!is_here(rank)) {
      const auto at = static_cast<size_t>(layout_.local_of[static_cast<size_t>(entry(rank))]);
      slot_of[static_cast<size_t>(rank)] = slots[at]++;
    }
  in_rounds(bytes, most, [&](size_t begin, size_t size) {
    copy_bytes(stage, input() + begin, size);
    auto cards = meet(stage);
    const auto take = [&](int rank, int from, size_t slot) {
      const auto local = static_cast<size_t>(layout_.local_of[static_cast<size_t>(from)]);
      copy_bytes(output(rank) + begin, machine_.at(static_cast<int>(local), cards[local].place) + slot * most, size);
    };
    for (const int rank : mates()) take(rank, rank, 0);
    for (const int rank : mine) {
      if (size == 0) break;
      links_.finish(arriving.front(), timeout_);
      arriving.pop_front();
      if (machine_.size() > 1)
        copy_bytes(stage + slot_of[static_cast<size_t>(rank)] * most, output(rank) + begin, size);
    }
    if (machine_.size() == 1) return;
    cards = meet(stage);
    for (int rank = 0; rank < layout_.world_size(); ++rank)
      if (!is_here(rank) && entry(rank) != layout_.rank) take(rank, entry(rank), slot_of[static_cast<size_t>(rank)]);
  });
  part_ways();
}

void Operation::gather() {
  const size_t bytes = block_bytes();
  if (!is_here(request_.root)) return send(input(), bytes, request_.root);
  const bool is_root = request_.root == layout_.rank;
  if (is_root)
    for (int rank = 0; rank < layout_.world_size(); ++rank)
      if (!is_here(rank)) receive(output(rank), bytes, rank);
  std::byte* stage = machine_.stage(std::min(bytes, kStageBytes));
  in_rounds(bytes, kStageBytes, [&](size_t begin, size_t size) {
    copy_bytes(stage, input() + begin, size);
    const auto cards = meet(stage);
    for (const int rank : mates()) {
      const auto local = static_cast<size_t>(layout_.local_of[static_cast<size_t>(rank)]);
      if (is_root) copy_bytes(output(rank) + begin, machine_.at(static_cast<int>(local), cards[local].place), size);
    }
    part_ways();
  });
}

void Operation::scatter() {
  const size_t bytes = block_bytes();
  if (!is_here(request_.root)) return receive(output(), bytes, request_.root);
  const bool is_root = request_.root == layout_.rank;
  const auto root = static_cast<size_t>(layout_.local_of[static_cast<size_t>(request_.root)]);
  const auto count = static_cast<size_t>(machine_.size());
  const size_t most = std::min(bytes, kStageBytes / count);
  if (is_root)
    for (int rank = 0; rank < layout_.world_size(); ++rank)
      if (!is_here(rank)) send(input(rank), bytes, rank);
  std::byte* stage = is_root ? machine_.stage(count * most) : nullptr;
  in_rounds(bytes, kStageBytes / count, [&](size_t begin, size_t size) {
    for (size_t local = 0; is_root && local < count; ++local)
      copy_bytes(stage + local * most, input(mates()[local]) + begin, size);
    const auto cards = meet(stage);
    const auto mine = static_cast<size_t>(layout_.local()) * most;
    copy_bytes(output() + begin, machine_.at(static_cast<int>(root), cards[root].place) + mine, size);
    part_ways();
  });
}

/// Throws RanksDiffer on all ranks if a rank sends a number other than its receiver expects.
void Operation::compare_splits() {
  const shm::Pieces& pieces = request_.pieces();
  SplitTable& table = equipment_.splits.emplace(layout_.world_size());
  uint64_t* number = table.row(layout_.rank);
  for (const auto* counts : {&pieces.send_counts, &pieces.receive_counts})
    for (const size_t count : *counts) *number++ = count;
  const shm::Request rows{.kind = OperationKind::kAllGather,
                          .type = shm::DataType::kUInt8,
                          .count = table.numbers_in_row() * sizeof(uint64_t),
                          .input = table.row(layout_.rank),
                          .output = table.data()};
  Operation(equipment_, rows, tag_, timeout_).run();
  table.check();
}

void Operation::all_to_all() {
  const bool uneven = request_.kind == OperationKind::kAllToAllUneven;
  if (uneven) compare_splits();
  const size_t element = shm::element_bytes(request_.type);
  const auto world = static_cast<size_t>(layout_.world_size()), count = static_cast<size_t>(machine_.size());
  const shm::Pieces& pieces = request_.pieces();
  std::vector<const std::byte*> from(world);
  std::vector<std::byte*> to(world);
  std::vector<size_t> sends(world), receives(world);  // bytes
  for (size_t r = 0, sent = 0, received = 0; r < world; ++r) {
    sends[r] = (uneven ? pieces.send_counts[r] : request_.count) * element;
    receives[r] = (uneven ? pieces.receive_counts[r] : request_.count) * element;
    from[r] = pieces.inputs.empty() ? input() + sent : static_cast<const std::byte*>(pieces.inputs[r]);
    to[r] = pieces.outputs.empty() ? output() + received : static_cast<std::byte*>(pieces.outputs[r]);
    sent += sends[r];
    received += receives[r];
  }
  for (int rank = 0; rank < layout_.world_size(); ++rank)
    if (!is_here(rank)) receive(to[static_cast<size_t>(rank)], receives[static_cast<size_t>(rank)], rank);
  for (int rank = 0; rank < layout_.world_size(); ++rank)
    if (!is_here(rank)) send(from[static_cast<size_t>(rank)], sends[static_cast<size_t>(rank)], rank);
  const size_t most = kStageBytes / count;
  size_t rounds = 1;
  for (const int mate : mates()) rounds = std::max(rounds, (sends[static_cast<size_t>(mate)] + most - 1) / most);
  // The stage begins with the numbers of bytes that the rank sends to each of the others.
  const size_t head = (count * sizeof(uint64_t) + 63) / 64 * 64;
  std::byte* stage = machine_.stage(head + count * most);
  for (size_t round = 0; round < rounds; ++round) {
    const auto part_of = [&](size_t bytes) { return bytes <= round * most ? 0 : std::min(most, bytes - round * most); };
    for (size_t local = 0; local < count; ++local) {
      const auto mate = static_cast<size_t>(mates()[local]);
      const uint64_t bytes = sends[mate];
      std::memcpy(stage + local * sizeof bytes, &bytes, sizeof bytes);
      copy_bytes(stage + head + local * most, from[mate] + round * most, part_of(sends[mate]));
    }
    const auto cards = meet(stage, 0, rounds);
    for (const Card& card : cards) rounds = std::max(rounds, static_cast<size_t>(card.rounds));
    const auto me = static_cast<size_t>(layout_.local());
    for (size_t local = 0; local < count; ++local) {
      const auto mate = static_cast<size_t>(mates()[local]);
      const std::byte* theirs = machine_.at(static_cast<int>(local), cards[local].place);
      uint64_t bytes = 0;
      std::memcpy(&bytes, theirs + me * sizeof bytes, sizeof bytes);
      copy_bytes(to[mate] + round * most, theirs + head + me * most, part_of(bytes));
    }
    part_ways();
  }
}

}  // namespace lockstep::hierarchical_engine
