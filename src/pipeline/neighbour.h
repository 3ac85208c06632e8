#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/error.h>
#include <lockstep/group.h>

#include "collectives/machine_memory.h"

namespace lockstep {

/// Trouble that a neighbour has sent instead of a tensor.
class ToldTrouble : public Error {
 public:
  using Error::Error;
};

/// The rank with the stage before or after this rank's. Exchanges tensors with it, which arrive in the order of
/// sending.
///
/// A tensor arrives while its receiver computes. On one machine it lies in the sender's shared memory, and a small
/// message gives its place; the receiver copies it, and confirms that. Between machines the receiver begins to receive
/// before it knows the tensor: both sides assume the dtype and shape of the previous one, and a small message ahead of
/// the tensor says whether this is right. If not, zeros are sent for the assumed tensor, and the true one follows.
class Neighbour {
 public:
  /// Numbers that precede a tensor, from its sender.
  struct Words {
    int64_t mark = 0;     ///< of the batch
    int64_t given = 0;    ///< a sample of the first stage's input
    int64_t answers = 0;  ///< Stage::answers()
    int64_t count = 0;    ///< of micro-batches
    double loss = 0;
  };
  struct Received {
    at::Tensor tensor;  ///< undefined if that was sent
    Words words;
  };

  /// The neighbour is `rank` of `group`, and its tensors are put on `device`.
  Neighbour(const Group& group, int rank, at::Device device);

  /// Whether both sides are on one machine.
  bool shares_memory() const { return memory_ != nullptr; }

  /// Returns at once. The tensor, which may be undefined, must not change until finish().
  void send(const at::Tensor& tensor, const Words& words);
  /// Allows the next tensor to arrive; at most one is expected at a time. Returns at once.
  void expect();
  /// Returns the expected tensor. Throws ToldTrouble with the other side's trouble.
  Received receive();
  /// Sends a message without a tensor. Returns at once.
  void send_done();
  /// Returns when the other side has called send_done(). Throws ToldTrouble with the other side's trouble.
  void wait_until_done();
  /// Sends, instead of the next tensor, the reason why there is none. Returns at once.
  void tell(const std::string& trouble) noexcept;
  /// Whether the other side has read the trouble; true if it never will.
  bool has_read_trouble() const noexcept;
  /// Returns when all sent tensors have been received.
  void finish();

 private:
  struct Layout {
    at::ScalarType dtype;
    std::vector<int64_t> sizes;
    bool operator==(const Layout&) const = default;
  };
  struct UnderWay {
    at::Tensor header, tensor;  ///< tensor: undefined if none is assumed
    std::optional<Work> header_work, tensor_work;
  };

  /// Shared memory for a tensor to the other side.
  struct Box {
    at::Tensor memory;         ///< bytes
    std::optional<Work> read;  ///< the other side has copied it; none: it is free
  };

  void send_one(at::Tensor tensor);
  /// `last`: the bytes of a trouble, or 1 + the place of a tensor in a box.
  void send_header(int64_t kind, const Layout& layout, int64_t last = 0);
  /// Puts the tensor into a box, and returns 1 + its place; 0: no shared memory.
  int64_t put(const at::Tensor& tensor);
  /// Receives the trouble that follows a header, and throws it.
  [[noreturn]] void throw_told(int64_t bytes);
  at::Tensor copy_of_box(const Layout& layout, int64_t place) const;
  void send_assumed(const at::Tensor& tensor);
  at::Tensor empty(const Layout& layout) const;

  const Group group_;
  const int rank_;
  const at::Device device_;
  MachineMemory* const memory_;  ///< of both sides; null: they share none
  std::deque<Box> boxes_;
  std::optional<Layout> sent_, received_;  ///< the last
  std::optional<UnderWay> expected_;
  Words words_;  ///< of the next header
  std::deque<Work> sending_;
  std::optional<Work> reading_;  ///< the other side's reading of the trouble
};

}  // namespace lockstep
