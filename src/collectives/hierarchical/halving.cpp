#include "collectives/hierarchical/halving.h"

#include <algorithm>
#include <cstring>

namespace lockstep::hierarchical_engine {
namespace {

/// Chunks under way at once.
constexpr size_t kChunks = 4;

}  // namespace

Halving::Halving(const Layout& layout, const SumOrder& order, Links& links, const PieceSum& sum, const Segment& segment,
                 const Slice& slice, Tags tags, std::chrono::milliseconds timeout)
    : layout_(layout),
      order_(order),
      links_(links),
      sum_(sum),
      segment_(segment),
      slice_(slice),
      tags_(tags),
      timeout_(timeout),
      plan_(HalvingPlan::of(layout.here(), layout.machines())) {}

void Halving::run(Scratch& travelling, Scratch& adding) {
  const size_t most = std::max<size_t>(1, kHalvingBytes / sum_.element_bytes());
  const size_t chunks = (slice_.count + most - 1) / most, at_once = std::min(kChunks, chunks);
  // What is received at all levels is one element more than what is given, for each level at most.
  const size_t elements = std::min(most, slice_.count) + plan_.levels.size() + 1;
  buffer_ = (elements * sum_.travelling_bytes() + 63) / 64 * 64;
  std::byte* memory = travelling.get(2 * at_once * buffer_);
  std::vector<Chunk> places(at_once);
  for (Chunk& chunk : places) {
    chunk.own = memory;
    memory += 2 * buffer_;
  }
  // Every rank goes through the chunks in this order, in which a stage needs only earlier ones of the others.
  size_t begun = 0, ended = 0;
  while (ended < chunks) {
    if (begun < chunks && begun - ended < at_once) {
      Chunk& chunk = places[begun % at_once];
      const size_t from = slice_.count * begun / chunks, to = slice_.count * (begun + 1) / chunks;
      chunk.piece = {0, slice_.begin + from, to - from, slice_.rail, Piece::kEverywhere, false};
      begin(chunk, adding);
      ++begun;
    }
    for (size_t i = ended, last = begun; i < last; ++i)
      if (advance(places[i % at_once])) ++ended;
  }
}

void Halving::begin(Chunk& chunk, Scratch& adding) {
  chunk.stage = 0;
  chunk.received = chunk.own + buffer_;
  chunk.theirs.clear();
  const SumOrder::Partial& partial = order_.partials[static_cast<size_t>(layout_.here())];
  std::vector<const void*> inputs;
  for (int rank = partial.first; rank < partial.last; ++rank)
    inputs.push_back(segment_.place(layout_.local_of[static_cast<size_t>(rank)], chunk.piece));
  sum_.add_partial(std::move(inputs), chunk.own, chunk.piece.count, adding);
  // From here on totals may replace the operands.
  for (const HalvingPlan::Level& level : plan_.levels) request_sum(chunk, level.given.machine, level.first, level.last);
  for (const Move& move : plan_.borrowed) request_sum(chunk, move.machine, move.first, move.last);
  for (const Move& move : plan_.lent) request_total(chunk, chunk.lent, move);
  for (const HalvingPlan::Level& level : plan_.levels) request_total(chunk, chunk.totals, level.given);
  if (!plan_.levels.empty()) send_sum(chunk, plan_.levels.front().given);
}

bool Halving::advance(Chunk& chunk) {
  const size_t levels = plan_.levels.size(), stage = chunk.stage++;
  if (stage < levels) {
    halve(chunk, stage);
  } else if (stage == levels) {
    turn(chunk);
  } else {
    double_up(chunk, 2 * levels - stage);
  }
  if (chunk.stage <= 2 * levels) return false;
  end(chunk);
  return true;
}

void Halving::halve(Chunk& chunk, size_t level) {
  const HalvingPlan::Level& here = plan_.levels[level];
  wait(chunk.sums[level]);
  std::byte* own = sum_at(chunk.own, chunk, here.first);
  const std::byte* theirs = chunk.theirs[level];
  if (const size_t count = elements(chunk, here.first, here.last); count > 0)
    sum_.add_pair(here.is_right ? theirs : own, here.is_right ? own : theirs, own, count);
  if (level + 1 < plan_.levels.size()) send_sum(chunk, plan_.levels[level + 1].given);
}

void Halving::turn(Chunk& chunk) {
  const size_t count = elements(chunk, plan_.first, plan_.last);
  std::byte* own = sum_at(chunk.own, chunk, plan_.first);
  if (!plan_.borrowed.empty()) {
    wait(chunk.sums.back());
    if (count > 0) sum_.add_pair(own, chunk.theirs.back(), own, count);
  }
  if (plan_.lent.empty()) {
    if (count > 0) sum_.write_total(own, {total_at(chunk, plan_.first)}, count);
  } else {
    for (const Move& move : plan_.lent) send_sum(chunk, move);
    for (Transfer& transfer : chunk.lent) wait(transfer);
  }
  for (const Move& move : plan_.borrowed) send_total(chunk, move.machine, move.first, move.last);
  if (!plan_.levels.empty()) send_total(chunk, plan_.levels.back().given.machine, plan_.first, plan_.last);
}

void Halving::double_up(Chunk& chunk, size_t level) {
  wait(chunk.totals[level]);
  if (level == 0) return;
  // What this machine went on with at that level is complete: all of it goes to the next one's partner.
  const HalvingPlan::Level& next = plan_.levels[level - 1];
  send_total(chunk, next.given.machine, next.first, next.last);
}

void Halving::end(Chunk& chunk) {
  for (Transfer& transfer : chunk.sent) wait(transfer);
  const auto all = segment_.targets(chunk.piece);
  for (void* target : all)
    if (target != all.front()) std::memcpy(target, all.front(), chunk.piece.count * sum_.element_bytes());
  for (auto* transfers : {&chunk.sums, &chunk.lent, &chunk.totals, &chunk.sent}) transfers->clear();
}

void Halving::send_sum(Chunk& chunk, const Move& move) {
  const size_t bytes = elements(chunk, move.first, move.last) * sum_.travelling_bytes();
  if (bytes > 0)
    chunk.sent.push_back(links_.send(sum_at(chunk.own, chunk, move.first), bytes, rank_of(move.machine), tags_.sums));
}

void Halving::request_sum(Chunk& chunk, int machine, size_t first, size_t last) {
  const size_t bytes = elements(chunk, first, last) * sum_.travelling_bytes();
  std::byte* place = chunk.received;
  chunk.theirs.push_back(place);
  chunk.received += bytes;
  chunk.sums.push_back(bytes == 0 ? Transfer{} : links_.receive(place, bytes, rank_of(machine), tags_.sums));
}

void Halving::send_total(Chunk& chunk, int machine, size_t first, size_t last) {
  const size_t bytes = elements(chunk, first, last) * sum_.element_bytes();
  if (bytes > 0) chunk.sent.push_back(links_.send(total_at(chunk, first), bytes, rank_of(machine), tags_.totals));
}

void Halving::request_total(Chunk& chunk, std::vector<Transfer>& requested, const Move& move) {
  const size_t bytes = elements(chunk, move.first, move.last) * sum_.element_bytes();
  requested.push_back(bytes == 0
                          ? Transfer{}
                          : links_.receive(total_at(chunk, move.first), bytes, rank_of(move.machine), tags_.totals));
}

}  // namespace lockstep::hierarchical_engine
