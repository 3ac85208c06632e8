#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <lockstep/error.h>

namespace lockstep {

/// kMean divides the sum by the world size, for floating point and complex tensors only. kAnd and kOr are bitwise, for
/// integer and bool tensors only. On bool, kSum and kMax mean "any", kProduct and kMin mean "all".
enum class ReduceOp { kSum, kMean, kProduct, kMin, kMax, kAnd, kOr };

/// A collective in flight. Copies refer to the same operation. Keeps its tensors alive until it is done. If it is
/// dropped, the operation continues, but only wait() can throw its failure: a rank that leaves the group waits for it
/// for a few seconds, and writes a warning if it has failed or is not done.
class [[nodiscard]] Work {
 public:
  /// Blocks until the result is in place on this rank, for at most the group's timeout. Every call throws Error, naming
  /// rank, operation, bytes and cause, if a peer is gone, the timeout has passed or the ranks disagree.
  void wait() const;
  /// Whether it is done. Never blocks. Throws what wait() would, also if asked for longer than the group's timeout.
  [[nodiscard]] bool is_completed() const;

  struct State;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<State> state_;
};

/// A set of ranks that communicate. A copyable handle: copies are the same group.
///
/// REQUIRES: unless a comment says otherwise, every rank of the group calls each operation, in the same order, with
/// tensors of the same shape and dtype.
///
/// Blocking forms return when this rank's result is in place. If a peer is gone, the operation throws Error. `_async`
/// forms return at once: neither read nor write the tensors until wait() has returned. Tensors may be on any device
/// that the backend supports, and may be empty or non-contiguous. Operations are invisible to autograd. At world size 1
/// every operation is exact and sends nothing.
///
/// If input and output are two arguments, they must not share memory (c10::Error), except that the row of this rank
/// (gather, scatter: of the root) may be in place. Written tensors get a new version, so that autograd refuses a
/// backward that needs the old values.
///
/// An operation that fails because a peer is gone, the ranks disagree or it timed out ends the group: all pending and
/// later operations throw on every rank. Other groups are not affected, unless the ranks wait for each other in
/// different groups or layers: that ends all groups of these ranks.
///
/// Only one thread at a time may call a group, since operations are matched by their order: a call during another
/// thread's throws Error naming both, and does nothing. Threads that take turns must do so in the same order on every
/// rank. A child of fork() has no part in the group: every call there throws Error, and destroying its copies does no
/// harm.
class Group {
 public:
  [[nodiscard]] int rank() const;
  [[nodiscard]] int world_size() const;
  /// The name of the engine behind the group; "single" in a world of one.
  const std::string& backend() const;

  /// tensor := op over all ranks' tensors, elementwise, in place; the same bits on every rank.
  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum) const;
  Work all_reduce_async(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum) const;
  /// The mean of all ranks' numbers, such as losses; the same bits on every rank.
  [[nodiscard]] double mean(double value) const;

  /// tensor := rank `root`'s tensor, in place.
  void broadcast(const at::Tensor& tensor, int root = 0) const;
  Work broadcast_async(const at::Tensor& tensor, int root = 0) const;

  /// Like all_reduce, but only `root` gets the result; the other ranks' tensors are unchanged.
  void reduce(const at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::kSum) const {
    reduce_async(tensor, root, op).wait();
  }
  Work reduce_async(const at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::kSum) const;

  /// Returns [world_size, *input.sizes()]: row r is rank r's input.
  [[nodiscard]] at::Tensor all_gather(const at::Tensor& input) const;
  /// As above, into the caller's tensor.
  void all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input) const;
  Work all_gather_async(const at::Tensor& output, const at::Tensor& input) const;

  /// On `root` [world_size, *input.sizes()]; an undefined tensor elsewhere.
  at::Tensor gather(const at::Tensor& input, int root = 0) const;
  /// `output` is ignored on ranks other than `root`.
  Work gather_async(const at::Tensor& output, const at::Tensor& input, int root = 0) const;

  /// output := row `rank` of root's input [world_size, *output.sizes()]; `input` is ignored on the other ranks.
  void scatter(const at::Tensor& output, const at::Tensor& input, int root = 0) const {
    scatter_async(output, input, root).wait();
  }
  Work scatter_async(const at::Tensor& output, const at::Tensor& input, int root = 0) const;

  /// input is [world_size, ...]; returns row `rank` of the elementwise op over all ranks' inputs.
  [[nodiscard]] at::Tensor reduce_scatter(const at::Tensor& input, ReduceOp op = ReduceOp::kSum) const;
  /// As above, into the caller's tensor.
  void reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::kSum) const;
  Work reduce_scatter_async(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::kSum) const;

  /// input is [world_size, ...]; row r goes to rank r. Row r of the result came from rank r.
  [[nodiscard]] at::Tensor all_to_all(const at::Tensor& input) const;
  /// Uneven blocks: the first input_splits[0] rows go to rank 0, and so on; output_splits[r] rows come from rank r.
  /// Each list has world_size entries, which sum to the rows of its tensor. A rank's expected rows must equal the
  /// sender's. If they do not, nothing is moved, and the Error on all ranks names them.
  [[nodiscard]] at::Tensor all_to_all(const at::Tensor& input, std::vector<int64_t> input_splits,
                                      std::vector<int64_t> output_splits) const;
  /// Empty splits mean equal splits.
  Work all_to_all_async(const at::Tensor& output, const at::Tensor& input, std::vector<int64_t> input_splits = {},
                        std::vector<int64_t> output_splits = {}) const;

  /// Only the two ranks call these: one sends, the other receives a tensor with as many elements of the same dtype and
  /// the same tag. Tags are at least 0 and on some engines less than 2^24 - 16. send() may return before the message is
  /// received, or wait until it is. A dropped Work continues.
  void send(const at::Tensor& tensor, int destination, int tag = 0) const {
    send_async(tensor, destination, tag).wait();
  }
  Work send_async(const at::Tensor& tensor, int destination, int tag = 0) const;
  void recv(const at::Tensor& tensor, int source, int tag = 0) const { recv_async(tensor, source, tag).wait(); }
  Work recv_async(const at::Tensor& tensor, int source, int tag = 0) const;

  /// Returns once every rank has called it.
  void barrier() const;
  Work barrier_async() const;

  /// The root's byte string, on every rank. Where there are several byte strings, they may differ in length.
  std::string broadcast_bytes(std::string_view bytes, int root = 0) const;
  /// Element r is rank r's byte string.
  [[nodiscard]] std::vector<std::string> all_gather_bytes(std::string_view bytes) const;
  /// On `root` element r is rank r's; empty elsewhere.
  std::vector<std::string> gather_bytes(std::string_view bytes, int root = 0) const;
  /// Element `rank` of root's world_size byte strings; `bytes` is ignored on the other ranks.
  std::string scatter_bytes(const std::vector<std::string>& bytes, int root = 0) const;

  /// As above, for any IValue: tensors, lists, dictionaries, numbers, strings, None.
  c10::IValue broadcast_object(const c10::IValue& object, int root = 0) const;
  [[nodiscard]] std::vector<c10::IValue> all_gather_object(const c10::IValue& object) const;
  std::vector<c10::IValue> gather_object(const c10::IValue& object, int root = 0) const;
  c10::IValue scatter_object(const std::vector<c10::IValue>& objects, int root = 0) const;

  /// Returns an uninitialized tensor [elements] in the fastest memory for this group's operations: memory that the
  /// engine works on in place, if it has any. Not a collective; any thread may call it. The tensor may outlive the
  /// group. A child of fork() has a copy, whose unwritten pages show what the rank writes later.
  [[nodiscard]] at::Tensor allocate(int64_t elements, const at::TensorOptions& options = {}) const;

  /// Forms a group of some of this group's ranks, in the order of the list: a rank's new number is its position there.
  /// Every rank of this group must call it with the same list, in the same order of calls, and waits for the others. If
  /// the lists differ, all ranks throw an Error that names them. Ranks that are not in the list get nullopt.
  [[nodiscard]] std::optional<Group> subgroup(const std::vector<int>& ranks) const;
  /// Forms the group of the ranks that pass the same `color` as this rank, in the order of their numbers: `split(rank()
  /// % 2)` makes two groups. Every rank of this group must call it, and waits for the others.
  [[nodiscard]] Group split(int64_t color) const;
  /// Forms the group of the ranks on this rank's machine. Every rank of this group must call it.
  [[nodiscard]] Group on_this_machine() const;

  /// False once the group's Context has been destroyed: other ranks may then be gone.
  [[nodiscard]] bool is_open() const;

  struct State;
  explicit Group(std::shared_ptr<State> state) : state_(std::move(state)) {}

 private:
  friend void close(const Group& group);
  friend State& state_of(const Group& group);
  void check_peer(const char* operation, int peer) const;

  std::shared_ptr<State> state_;
};

}  // namespace lockstep
