#include "collectives/hierarchical/reduction.h"

#include <algorithm>
#include <cstring>

#include "collectives/hierarchical/halving.h"
#include "collectives/hierarchical/piece_sizes.h"

namespace lockstep::hierarchical_engine {
namespace {

/// Pieces under way at once.
constexpr size_t kFlights = 8;
constexpr std::chrono::seconds kLonger{4};

bool is_halved(const Equipment& equipment, const shm::Request& request) {
  const Layout& layout = equipment.layout;
  if (request.kind != shm::OperationKind::kAllReduce || !equipment.order.is_tree_over_machines) return false;
  const auto sum = [&](bool by_pairs) {
    return PieceSum(request.type, request.op, equipment.order, layout.world_size(), by_pairs);
  };
  const PieceSum direct = sum(false), halved = sum(true);
  return halving_is_faster(
      {.bytes = std::min(request.count, Segment::most_elements(layout, request)) * direct.element_bytes(),
       .element_bytes = direct.element_bytes(),
       .direct_bytes = direct.travelling_bytes(),
       .halving_bytes = halved.travelling_bytes(),
       .machines = layout.machines(),
       .rails = layout.rails()});
}

}  // namespace

Reduction::Reduction(Equipment& equipment, const shm::Request& request, uint32_t tag, std::chrono::milliseconds timeout)
    : layout_(equipment.layout),
      order_(equipment.order),
      links_(equipment.links),
      equipment_(equipment),
      request_(request),
      tag_(tag),
      total_tag_(tag ^ 0x40000000),
      timeout_(timeout),
      halves_(is_halved(equipment, request)),
      sum_(request.type, request.op, equipment.order, equipment.layout.world_size(), halves_) {}

void Reduction::run() {
  if (request_.kind == shm::OperationKind::kAllReduce && request_.input != nullptr && request_.input != request_.output)
    std::memcpy(request_.output, request_.input, request_.count * sum_.element_bytes());
  const size_t most = Segment::most_elements(layout_, request_);
  for (size_t begin = 0; begin < request_.count; begin += most) {
    const Segment segment(layout_, equipment_.machine, request_, begin, std::min(most, request_.count - begin), tag_,
                          timeout_);
    halves_ ? halve(segment) : fly(segment);
    equipment_.machine.wait_for_all(timeout_ + kLonger);
    links_.finish(totals_sent_, timeout_);
    segment.take_result();
  }
}

void Reduction::halve(const Segment& segment) {
  const size_t slices = slices_of(segment.count() * sum_.element_bytes(), layout_.rails());
  const auto rail = static_cast<size_t>(layout_.local());
  if (rail >= slices) return;
  const size_t from = segment.count() * rail / slices, to = segment.count() * (rail + 1) / slices;
  Halving(layout_, order_, links_, sum_, segment, {from, to - from, layout_.local()}, {tag_, total_tag_}, timeout_)
      .run(equipment_.travelling, equipment_.adding);
}

void Reduction::fly(const Segment& segment) {
  std::vector<Piece> mine;
  size_t largest = 0;
  for (const Piece& piece :
       pieces_of(request_, segment.count(), layout_, sum_.element_bytes(), sum_.travelling_bytes())) {
    if (layout_.on_rail(layout_.here(), piece.rail) != layout_.rank) continue;
    mine.push_back(piece);
    largest = std::max(largest, piece.count);
  }
  const size_t partial = (largest * sum_.travelling_bytes() + 63) / 64 * 64;
  std::byte* buffers = equipment_.travelling.get(std::min(kFlights, mine.size()) * order_.partials.size() * partial);
  std::vector<Flight> flights(std::min(kFlights, mine.size()));
  for (Flight& flight : flights) {
    // One buffer for each machine's partial sums, because they arrive in one message.
    flight.theirs.resize(static_cast<size_t>(layout_.machines()));
    for (int machine = 0; machine < layout_.machines(); ++machine) {
      (machine == layout_.here() ? flight.own : flight.theirs[static_cast<size_t>(machine)]) = buffers;
      buffers += static_cast<size_t>(order_.partials_of[static_cast<size_t>(machine)]) * partial;
    }
  }
  for (size_t i = 0; i < mine.size() + flights.size(); ++i) {
    Flight& flight = flights[i % flights.size()];
    if (i >= flights.size()) finish(segment, flight);
    if (i >= mine.size()) continue;
    flight.piece = mine[i];
    start(segment, flight);
  }
}

void Reduction::start(const Segment& segment, Flight& flight) {
  const Piece& piece = flight.piece;
  const auto bytes_of = [&](int machine) {
    return static_cast<size_t>(order_.partials_of[static_cast<size_t>(machine)]) * piece.count *
           sum_.travelling_bytes();
  };
  for (int machine = 0; adds(piece) && machine < layout_.machines(); ++machine)
    if (machine != layout_.here())
      flight.received.push_back(links_.receive(flight.theirs[static_cast<size_t>(machine)], bytes_of(machine),
                                               layout_.on_rail(machine, piece.rail), tag_));
  add_partials(segment, flight);
  for (int machine = 0; machine < layout_.machines(); ++machine)
    if (machine != layout_.here() && (piece.home == Piece::kEverywhere || piece.home == machine))
      flight.sent.push_back(
          links_.send(flight.own, bytes_of(layout_.here()), layout_.on_rail(machine, piece.rail), tag_));
  // This rank's own memory may take the total, because its contents have been added.
  if (piece.is_forwarded && !adds(piece))
    flight.total = links_.receive(segment.place(layout_.local(), piece), piece.count * sum_.element_bytes(),
                                  layout_.on_rail(piece.home, piece.rail), total_tag_);
}

void Reduction::finish(const Segment& segment, Flight& flight) {
  const Piece& piece = flight.piece;
  links_.finish(flight.received, timeout_);
  links_.finish(flight.sent, timeout_);
  if (adds(piece)) {
    sum_.add_total(partials_of(flight), segment.targets(piece), piece.count);
    for (int machine = 0; piece.is_forwarded && machine < layout_.machines(); ++machine)
      if (machine != layout_.here())
        totals_sent_.push_back(links_.send(segment.place(layout_.local(), piece), piece.count * sum_.element_bytes(),
                                           layout_.on_rail(machine, piece.rail), total_tag_));
  } else if (piece.is_forwarded) {
    links_.finish(flight.total, timeout_);
    const auto all = segment.targets(piece);
    for (void* target : all)
      if (target != all.front()) std::memcpy(target, all.front(), piece.count * sum_.element_bytes());
  }
}

void Reduction::add_partials(const Segment& segment, const Flight& flight) {
  const Piece& piece = flight.piece;
  for (const SumOrder::Partial& partial : order_.partials) {
    if (partial.machine != layout_.here()) continue;
    std::byte* result = flight.own + static_cast<size_t>(partial.slot) * piece.count * sum_.travelling_bytes();
    std::vector<const void*> inputs;
    for (int rank = partial.first; rank < partial.last; ++rank)
      inputs.push_back(segment.place(layout_.local_of[static_cast<size_t>(rank)], piece));
    sum_.add_partial(std::move(inputs), result, piece.count, equipment_.adding);
  }
}

std::vector<std::byte*> Reduction::partials_of(const Flight& flight) const {
  std::vector<std::byte*> sums;
  for (const SumOrder::Partial& partial : order_.partials)
    sums.push_back(
        (partial.machine == layout_.here() ? flight.own : flight.theirs[static_cast<size_t>(partial.machine)]) +
        static_cast<size_t>(partial.slot) * flight.piece.count * sum_.travelling_bytes());
  return sums;
}

}  // namespace lockstep::hierarchical_engine
