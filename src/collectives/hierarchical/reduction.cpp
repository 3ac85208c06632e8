#include "collectives/hierarchical/reduction.h"

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>

#include "collectives/shm/kernels/reduce.h"

namespace lockstep::hierarchical_engine {
namespace {

using shm::DataType;
using shm::OperationKind;
using shm::ReduceOp;

/// Between two meetings; buffers that the others cannot reach are copied to memory of this size.
constexpr size_t kSegmentBytes = 32 << 20;
/// Pieces under way at once.
constexpr size_t kFlights = 8;
constexpr std::chrono::seconds kLonger{4};

bool is_narrow(DataType type) { return type == DataType::kFloat16 || type == DataType::kBFloat16; }

at::ScalarType to_torch(DataType type) {
  switch (type) {
    case DataType::kFloat16:
      return at::kHalf;
    case DataType::kBFloat16:
      return at::kBFloat16;
    case DataType::kFloat64:
    case DataType::kComplex128:
      return at::kDouble;
    default:
      return at::kFloat;  // kComplex64 too, as pairs
  }
}

/// Converts or divides in steps below the size from which ATen would start threads.
constexpr size_t kQuietly = 16 << 10;

void convert(const void* from, at::ScalarType from_type, void* to, at::ScalarType to_type, size_t count) {
  for (size_t begin = 0; begin < count; begin += kQuietly) {
    const auto n = static_cast<int64_t>(std::min(kQuietly, count - begin));
    auto* source = static_cast<std::byte*>(const_cast<void*>(from)) + begin * c10::elementSize(from_type);
    auto* target = static_cast<std::byte*>(to) + begin * c10::elementSize(to_type);
    at::from_blob(target, {n}, to_type).copy_(at::from_blob(source, {n}, from_type));
  }
}

void divide(void* data, at::ScalarType type, size_t count, int divisor) {
  for (size_t begin = 0; begin < count; begin += kQuietly) {
    const auto n = static_cast<int64_t>(std::min(kQuietly, count - begin));
    at::from_blob(static_cast<std::byte*>(data) + begin * c10::elementSize(type), {n}, type).div_(divisor);
  }
}

void combine(DataType type, ReduceOp op, const std::vector<void*>& outputs, const std::vector<const void*>& inputs,
             size_t count) {
  if (inputs.size() == 1) {
    for (void* output : outputs)
      if (output != inputs[0]) std::memcpy(output, inputs[0], count * shm::element_bytes(type));
    return;
  }
  const auto run = shm::find_reduce(type, op, static_cast<int>(inputs.size()));
  run({outputs.data(), static_cast<int>(outputs.size()), inputs.data(), static_cast<int>(inputs.size()), count,
       nullptr});
}

}  // namespace

Reduction::Reduction(Equipment& equipment, const shm::Request& request, uint32_t tag, std::chrono::milliseconds timeout)
    : layout_(equipment.layout),
      order_(equipment.order),
      machine_(equipment.machine),
      links_(equipment.links),
      equipment_(equipment),
      request_(request),
      tag_(tag),
      total_tag_(tag ^ 0x40000000),
      timeout_(timeout),
      element_(shm::element_bytes(request.type)),
      widened_(is_narrow(request.type) && request.op != ReduceOp::kMin && request.op != ReduceOp::kMax &&
               !order_.adds_nothing_within_machines()),
      travelling_type_(widened_ ? DataType::kFloat32 : request.type),
      travelling_(shm::element_bytes(travelling_type_)),
      op_(request.op == ReduceOp::kMean ? ReduceOp::kSum : request.op) {}

void Reduction::run() {
  if (is_for_all() && request_.input != nullptr && request_.input != request_.output)
    std::memcpy(request_.output, request_.input, request_.count * element_);
  const size_t most = std::max<size_t>(1, kSegmentBytes / (rows() * element_));
  for (size_t begin = 0; begin < request_.count; begin += most)
    run_segment(begin, std::min(most, request_.count - begin));
}

void Reduction::run_segment(size_t begin, size_t count) {
  begin_ = begin;
  lay_out_inputs(begin, count);
  cards_ = machine_.meet({tag_, machine_.place_of(mine_), stride_, 0}, timeout_);
  fly(pieces_of(request_, count, layout_, element_, travelling_));
  machine_.wait_for_all(timeout_ + kLonger);
  links_.finish(totals_sent_, timeout_);
  take_result(begin, count);
}

void Reduction::lay_out_inputs(size_t begin, size_t count) {
  const auto& blocks = request_.pieces().inputs;
  auto* data = static_cast<std::byte*>(is_for_all() ? request_.output : const_cast<void*>(request_.input));
  staged_ = !blocks.empty() || !machine_.reaches(data, rows() * request_.count * element_);
  if (!staged_) {
    mine_ = data + begin * element_;
    stride_ = request_.count * element_;
    return;
  }
  stride_ = count * element_;
  mine_ = machine_.stage(rows() * stride_);
  for (size_t row = 0; row < rows(); ++row) {
    const std::byte* block =
        blocks.empty() ? data + row * request_.count * element_ : static_cast<const std::byte*>(blocks[row]);
    std::memcpy(mine_ + row * stride_, block + begin * element_, stride_);
  }
}

void Reduction::take_result(size_t begin, size_t count) {
  const bool is_mine = is_for_all() || (request_.kind == OperationKind::kReduce && request_.root == layout_.rank);
  auto* target = static_cast<std::byte*>(request_.output) + begin * element_;
  if (is_mine && target != mine_) std::memcpy(target, mine_, count * element_);
}

std::byte* Reduction::place(int local, const Piece& piece) const {
  const Card& card = cards_[static_cast<size_t>(local)];
  return machine_.at(local, card.place) + static_cast<size_t>(piece.row) * card.stride + piece.begin * element_;
}

std::vector<void*> Reduction::targets(const Piece& piece) const {
  if (is_scattered()) return {static_cast<std::byte*>(request_.output) + (begin_ + piece.begin) * element_};
  if (!is_for_all()) return {place(layout_.local_of[static_cast<size_t>(request_.root)], piece)};
  std::vector<void*> all{place(layout_.local(), piece)};
  for (int local = 0; local < machine_.size(); ++local)
    if (local != layout_.local()) all.push_back(place(local, piece));
  return all;
}

void Reduction::fly(const std::vector<Piece>& pieces) {
  std::vector<Piece> mine;
  size_t largest = 0;
  for (const Piece& piece : pieces) {
    if (layout_.on_rail(layout_.here(), piece.rail) != layout_.rank) continue;
    mine.push_back(piece);
    largest = std::max(largest, piece.count);
  }
  const size_t partial = (largest * travelling_ + 63) / 64 * 64;
  std::byte* buffers = equipment_.travelling.get(std::min(kFlights, mine.size()) * order_.partials.size() * partial);
  std::vector<Flight> flights(std::min(kFlights, mine.size()));
  for (Flight& flight : flights) {
    // One buffer for each machine's partial sums: they travel in one message.
    flight.theirs.resize(static_cast<size_t>(layout_.machines()));
    for (int machine = 0; machine < layout_.machines(); ++machine) {
      (machine == layout_.here() ? flight.own : flight.theirs[static_cast<size_t>(machine)]) = buffers;
      buffers += static_cast<size_t>(order_.partials_of[static_cast<size_t>(machine)]) * partial;
    }
  }
  for (size_t i = 0; i < mine.size() + flights.size(); ++i) {
    Flight& flight = flights[i % flights.size()];
    if (i >= flights.size()) finish(flight);
    if (i >= mine.size()) continue;
    flight.piece = mine[i];
    start(flight);
  }
}

void Reduction::start(Flight& flight) {
  const Piece& piece = flight.piece;
  const auto bytes_of = [&](int machine) {
    return static_cast<size_t>(order_.partials_of[static_cast<size_t>(machine)]) * piece.count * travelling_;
  };
  for (int machine = 0; adds(piece) && machine < layout_.machines(); ++machine)
    if (machine != layout_.here())
      flight.received.push_back(links_.receive(flight.theirs[static_cast<size_t>(machine)], bytes_of(machine),
                                               layout_.on_rail(machine, piece.rail), tag_));
  add_partials(flight);
  for (int machine = 0; machine < layout_.machines(); ++machine)
    if (machine != layout_.here() && (piece.home == Piece::kEverywhere || piece.home == machine))
      flight.sent.push_back(
          links_.send(flight.own, bytes_of(layout_.here()), layout_.on_rail(machine, piece.rail), tag_));
  // This rank's own memory may take the total: what was there has been added.
  if (piece.is_forwarded && !adds(piece))
    flight.total = links_.receive(place(layout_.local(), piece), piece.count * element_,
                                  layout_.on_rail(piece.home, piece.rail), total_tag_);
}

void Reduction::finish(Flight& flight) {
  const Piece& piece = flight.piece;
  links_.finish(flight.received, timeout_);
  links_.finish(flight.sent, timeout_);
  if (adds(piece)) {
    add_total(flight);
    for (int machine = 0; piece.is_forwarded && machine < layout_.machines(); ++machine)
      if (machine != layout_.here())
        totals_sent_.push_back(links_.send(place(layout_.local(), piece), piece.count * element_,
                                           layout_.on_rail(machine, piece.rail), total_tag_));
  } else if (piece.is_forwarded) {
    links_.finish(flight.total, timeout_);
    const auto all = targets(piece);
    for (void* target : all)
      if (target != all.front()) std::memcpy(target, all.front(), piece.count * element_);
  }
}

void Reduction::add_partials(const Flight& flight) {
  const Piece& piece = flight.piece;
  for (const SumOrder::Partial& partial : order_.partials) {
    if (partial.machine != layout_.here()) continue;
    std::byte* result = flight.own + static_cast<size_t>(partial.slot) * piece.count * travelling_;
    std::vector<const void*> inputs;
    std::byte* wide =
        widened_ ? equipment_.adding.get(static_cast<size_t>(partial.last - partial.first) * piece.count * travelling_)
                 : nullptr;
    for (int rank = partial.first; rank < partial.last; ++rank) {
      const std::byte* data = place(layout_.local_of[static_cast<size_t>(rank)], piece);
      if (widened_) {
        convert(data, to_torch(request_.type), wide, at::kFloat, piece.count);
        data = wide;
        wide += piece.count * travelling_;
      }
      inputs.push_back(data);
    }
    combine(travelling_type_, op_, {result}, inputs, piece.count);
  }
}

void Reduction::add_total(const Flight& flight) {
  const Piece& piece = flight.piece;
  std::vector<std::byte*> sums;
  for (const SumOrder::Partial& partial : order_.partials)
    sums.push_back(
        (partial.machine == layout_.here() ? flight.own : flight.theirs[static_cast<size_t>(partial.machine)]) +
        static_cast<size_t>(partial.slot) * piece.count * travelling_);
  const bool is_ready = !widened_ && request_.op != ReduceOp::kMean;
  // fp16 and bf16 that travel as they are: one kernel adds them all, and rounds once.
  if (is_narrow(request_.type) && !widened_ && op_ != ReduceOp::kMin && op_ != ReduceOp::kMax)
    return combine(request_.type, request_.op, targets(piece), {sums.begin(), sums.end()}, piece.count);
  for (const SumOrder::Step& step : order_.steps) {
    std::byte* left = sums[static_cast<size_t>(step.left)];
    const bool is_last = &step == &order_.steps.back();
    combine(travelling_type_, op_, is_last && is_ready ? targets(piece) : std::vector<void*>{left},
            {left, sums[static_cast<size_t>(step.right)]}, piece.count);
    sums.push_back(left);
  }
  if (!is_ready) write_total(sums.back(), piece);
}

void Reduction::write_total(const std::byte* sum, const Piece& piece) const {
  const bool is_complex = request_.type == DataType::kComplex64 || request_.type == DataType::kComplex128;
  const size_t numbers = piece.count * (is_complex ? 2 : 1);
  if (request_.op == ReduceOp::kMean)
    divide(const_cast<std::byte*>(sum), to_torch(travelling_type_), numbers, layout_.world_size());
  const auto all = targets(piece);
  if (widened_)
    convert(sum, at::kFloat, all.front(), to_torch(request_.type), piece.count);
  else
    std::memcpy(all.front(), sum, piece.count * element_);
  for (void* target : all)
    if (target != all.front()) std::memcpy(target, all.front(), piece.count * element_);
}

}  // namespace lockstep::hierarchical_engine
