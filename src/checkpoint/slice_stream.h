#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <lockstep/group.h>

#include "checkpoint/sliced_memory.h"

namespace lockstep {

/// Streams to rank 0, piece by piece, its missing parts of memory that lies in slices on all ranks.
/// REQUIRES: the other ranks call send_slices() with the same memory in the same order.
class SliceStream {
 public:
  /// Called on rank 0.
  SliceStream(Group group, std::vector<Slices> storages);
  /// Receives the remaining pieces, so that no rank waits.
  ~SliceStream();
  SliceStream(const SliceStream&) = delete;
  SliceStream& operator=(const SliceStream&) = delete;

  using Sink = std::function<void(const void* data, size_t bytes)>;
  /// Reads the next storage, from begin to end. `own` is its address on this rank.
  void read(const std::byte* own, const Sink& sink);

 private:
  bool ended() const { return storage_ == storages_.size(); }
  /// Passes over a storage that is entirely on this rank.
  bool skip_own();
  /// The next piece, valid until the following call.
  at::Tensor receive();

  const Group group_;
  const std::vector<Slices> storages_;
  at::Tensor piece_;
  // The position of the next piece.
  size_t storage_ = 0, at_ = 0;
  int slice_ = 1;
};

/// Sends the slices. Called on the other ranks.
void send_slices(const Group& group, const std::vector<c10::Storage>& storages);

}  // namespace lockstep
