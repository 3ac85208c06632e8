#include "collectives/gloo/tree_reduction.h"

#include <algorithm>
#include <vector>

#include <ATen/ATen.h>

#include "collectives/operand.h"
#include "rank_page/rank_board.h"

// Small operands go whole to every rank that needs the result, in one exchange. For larger ones rank r sums slice r, as
// in shared memory: it receives the others' slices, and sends them the sum. That is as many bytes as a ring sends.
//
// A slice is sent in pieces. All sends are posted at once, and wait at the sender until the receiver requests them; it
// requests the next few while it adds the last. A sum is sent as soon as it is complete. So a rank needs memory for a
// few pieces of each peer, and adding and sending overlap.
//
// A slice of the result may arrive before this rank has noticed that its operand was sent, and overwrite it: the sender
// of the sum has received the operand. A rank that sends its whole operand to others and adds in place waits until it
// was sent.

namespace lockstep::gloo_engine {
namespace {

using Kind = TreeReduction::Kind;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr int64_t kPieceBytes = 1 << 20;
/// Of a reduce_scatter, which models use that are too large for a machine: a few MiB count there.
constexpr int64_t kScatteredPieceBytes = 1 << 18;
/// Pieces of each peer that are requested at a time.
constexpr int64_t kAhead = 4;
/// Operands are sent whole if a rank then receives up to this many bytes. Measured (bench/all_reduce).
constexpr int64_t kDirectBytes = 1 << 20;

struct Range {
  int64_t begin = 0, end = 0;  ///< bytes

  int64_t pieces(int64_t size) const { return (end - begin + size - 1) / size; }
  Range piece(int64_t index, int64_t size) const {
    const int64_t first = begin + index * size;
    return {first, std::min(end, first + size)};
  }
  at::Tensor of(const at::Tensor& bytes) const { return bytes.narrow(0, begin, end - begin); }
};

void wait_for(std::vector<WorkPtr>& works) {
  for (const WorkPtr& work : works) {
    work->wait();
    own_page().beat();
  }
  works.clear();
}

class Run {
 public:
  Run(const TreeReduction& task, const Messages& messages)
      : task_(task),
        messages_(messages),
        input_(as_bytes(task.input)),
        output_(as_bytes(task.output)),
        piece_(std::clamp<int64_t>(bytes_of(task.input), 1,
                                   task.kind == Kind::kReduceScatter ? kScatteredPieceBytes : kPieceBytes)),
        direct_(task.kind != Kind::kReduceScatter && bytes_of(task.input) * (task.world_size - 1) <= kDirectBytes),
        mine_(summed_by(task.rank)),
        receives_(kAhead),
        staging_(staging(std::min(pieces_of(mine_), kAhead) * (task.world_size - 1) * piece_)) {}

  void carry_out() {
    for (int64_t piece = 0; piece < std::min(pieces_of(mine_), kAhead); ++piece) receive_operands(piece);
    receive_results();
    send_operands();
    for (int64_t piece = 0; piece < pieces_of(mine_); ++piece) {
      wait_for(receives_[static_cast<size_t>(piece % kAhead)]);
      if (direct_) wait_for(sends_[static_cast<size_t>(piece)]);
      add(piece);
      if (piece + kAhead < pieces_of(mine_)) receive_operands(piece + kAhead);
      send_result(piece);
    }
    for (auto& works : sends_) wait_for(works);
    wait_for(results_);
  }

 private:
  /// The part of the operands that rank `rank` sums.
  Range summed_by(int rank) const {
    const int64_t all = bytes_of(task_.input), size = task_.world_size;
    if (task_.kind == Kind::kReduceScatter) return {all / size * rank, all / size * (rank + 1)};
    if (direct_) return {0, task_.kind == Kind::kAllReduce || rank == task_.root ? all : 0};
    // Whole elements of any dtype, and whole cache lines.
    const int64_t slice = ((all + size - 1) / size + 63) / 64 * 64;
    return {std::min(all, slice * rank), std::min(all, slice * (rank + 1))};
  }

  int64_t pieces_of(const Range& range) const { return range.pieces(piece_); }
  bool wants_result(int rank) const { return task_.kind == Kind::kAllReduce || rank == task_.root; }
  bool exchanges_results() const { return !direct_ && task_.kind != Kind::kReduceScatter; }

  /// Visits every other rank; each rank begins with a different one.
  template <typename Use>
  void for_peers(const Use& use) const {
    for (int i = 1; i < task_.world_size; ++i) use((task_.rank + i) % task_.world_size);
  }

  /// The place of that piece of that rank's operand.
  at::Tensor operand(int rank, int64_t piece) const {
    const Range range = mine_.piece(piece, piece_);
    if (rank == task_.rank) return range.of(input_);
    const int64_t others = task_.world_size - 1, place = rank < task_.rank ? rank : rank - 1;
    return staging_.narrow(0, (piece % kAhead * others + place) * piece_, range.end - range.begin);
  }

  void receive_operands(int64_t piece) {
    auto& works = receives_[static_cast<size_t>(piece % kAhead)];
    for_peers([&](int peer) { works.push_back(messages_.receive(operand(peer, piece), peer, Stage::kOperands)); });
  }

  void receive_results() {
    if (!exchanges_results() || !wants_result(task_.rank)) return;
    for_peers([&](int peer) {
      const Range range = summed_by(peer);
      for (int64_t piece = 0; piece < pieces_of(range); ++piece)
        results_.push_back(messages_.receive(range.piece(piece, piece_).of(output_), peer, Stage::kResults));
    });
  }

  void send_operands() {
    // The first slice is the longest.
    sends_.resize(static_cast<size_t>(pieces_of(summed_by(direct_ ? task_.root : 0))));
    for (size_t piece = 0; piece < sends_.size(); ++piece)
      for_peers([&](int peer) {
        const Range range = summed_by(peer);
        if (static_cast<int64_t>(piece) >= pieces_of(range)) return;
        const at::Tensor bytes = range.piece(static_cast<int64_t>(piece), piece_).of(input_);
        sends_[piece].push_back(messages_.send(bytes, peer, Stage::kOperands));
      });
  }

  void add(int64_t piece) const {
    std::vector<const void*> inputs;
    for (int rank = 0; rank < task_.world_size; ++rank) inputs.push_back(operand(rank, piece).const_data_ptr());
    const at::Tensor sum = result(piece);
    void* output = sum.mutable_data_ptr();
    task_.kernel({.outputs = &output,
                  .output_count = 1,
                  .inputs = inputs.data(),
                  .input_count = task_.world_size,
                  .count = static_cast<size_t>(sum.numel()) / task_.input.element_size(),
                  .factors = nullptr});
  }

  at::Tensor result(int64_t piece) const {
    const Range range = mine_.piece(piece, piece_);
    if (task_.kind != Kind::kReduceScatter) return range.of(output_);
    return Range{range.begin - mine_.begin, range.end - mine_.begin}.of(output_);
  }

  void send_result(int64_t piece) {
    if (!exchanges_results()) return;
    for_peers([&](int peer) {
      if (wants_result(peer)) results_.push_back(messages_.send(result(piece), peer, Stage::kResults));
    });
  }

  /// This thread's memory for received data. A reduce_scatter has its own, which is free when it ends: models that are
  /// too large for a machine have no use for it then, nor for that of a second thread.
  at::Tensor staging(int64_t bytes) const {
    if (task_.kind == Kind::kReduceScatter) return at::empty({bytes}, at::kByte);
    thread_local at::Tensor memory;
    if (!memory.defined() || memory.numel() < bytes) memory = at::empty({bytes}, at::kByte);
    return memory;
  }

  const TreeReduction& task_;
  const Messages& messages_;
  const at::Tensor input_, output_;  ///< their bytes
  const int64_t piece_;              ///< bytes
  const bool direct_;
  const Range mine_;                            ///< the part of the operands that this rank sums
  std::vector<std::vector<WorkPtr>> receives_;  ///< of operands, by piece modulo kAhead
  std::vector<std::vector<WorkPtr>> sends_;     ///< of operands, by piece
  std::vector<WorkPtr> results_;
  const at::Tensor staging_;
};

}  // namespace

void run(const TreeReduction& task, const Messages& messages) { Run(task, messages).carry_out(); }

}  // namespace lockstep::gloo_engine
