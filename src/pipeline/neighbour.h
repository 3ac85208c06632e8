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

/// What a neighbour has told instead of a tensor.
class ToldTrouble : public Error {
 public:
  using Error::Error;
};

/// The rank that has the stage before or after this rank's: tensors to it and from it, each in the order in which the
/// other side sends.
///
/// A tensor arrives while its receiver computes. On one machine it lies in the sender's shared memory, and a small
/// message says where; the receiver copies it, and says so. Between machines the receiver begins to receive before it
/// knows what comes: both sides assume that a tensor has the dtype and shape of the one before, and a small message
/// ahead of it says whether that is so. If not, the assumed one is sent as zeros, and the true one follows.
class Neighbour {
 public:
  /// What travels ahead of a tensor, in the sender's words.
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

  /// `rank` of `group`; its tensors will be on `device`.
  Neighbour(const Group& group, int rank, at::Device device);

  /// Whether both sides are on one machine.
  bool shares_memory() const { return memory_ != nullptr; }

  /// Returns at once; the tensor must not change until finish(). It may be undefined.
  void send(const at::Tensor& tensor, const Words& words);
  /// The next tensor may come; at most one is expected at a time. Returns at once.
  void expect();
  /// The expected one. Throws ToldTrouble with what the other side has told.
  Received receive();
  /// A message without a tensor. Returns at once.
  void send_done();
  /// Returns when the other side has called that. Throws ToldTrouble with what it has told instead.
  void wait_until_done();
  /// Instead of the next tensor, why there will be none. Returns at once.
  void tell(const std::string& trouble) noexcept;
  /// Whether the other side has read that; true if it never will.
  bool has_read_trouble() const noexcept;
  /// All that was sent has been received.
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

  /// Shared memory that a tensor was put into for the other side.
  struct Box {
    at::Tensor memory;         ///< bytes
    std::optional<Work> read;  ///< the other side has copied it; none: it is free
  };

  void send_one(at::Tensor tensor);
  /// `last`: bytes of a trouble, or 1 + the place of a tensor that lies in a box.
  void send_header(int64_t kind, const Layout& layout, int64_t last = 0);
  /// Puts the tensor into a box, and returns 1 + its place; 0: there is no shared memory.
  int64_t put(const at::Tensor& tensor);
  /// What follows a header that tells trouble.
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
  std::optional<Work> reading_;  ///< of the trouble that was told
};

}  // namespace lockstep
