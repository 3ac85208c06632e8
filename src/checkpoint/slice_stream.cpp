#include "checkpoint/slice_stream.h"

#include <algorithm>
#include <exception>

#include <ATen/ATen.h>

namespace lockstep {
namespace {

constexpr size_t kStreamedBytes = 4 << 20;
/// For messages that no program sends by accident.
constexpr int kStreamTag = (1 << 24) - 16;  // the most that Gloo takes is 2^24 - 1

}  // namespace

SliceStream::SliceStream(Group group, std::vector<Slices> storages)
    : group_(std::move(group)), storages_(std::move(storages)) {
  size_t most = 0;
  for (const Slices& slices : storages_) most = std::max(most, std::min(kStreamedBytes, slices.bytes));
  piece_ = at::empty({static_cast<int64_t>(most)}, at::kByte);
}

SliceStream::~SliceStream() {
  try {
    while (!ended())
      if (!skip_own()) receive();
  } catch (const std::exception&) {  // the group has ended, so no rank waits any longer
    storage_ = storages_.size();
  }
}

bool SliceStream::skip_own() {
  if (storages_[storage_].ranks > 1) return false;
  ++storage_;
  return true;
}

at::Tensor SliceStream::receive() {
  const Slices& slices = storages_[storage_];
  const size_t bytes = std::min(kStreamedBytes, slices.bytes - at_);
  const at::Tensor piece = piece_.narrow(0, 0, static_cast<int64_t>(bytes));
  const int from = slices.holder(slice_);
  at_ += bytes;
  if (at_ == slices.bytes) {
    at_ = 0;
    if (++slice_ == slices.ranks) slice_ = 1, ++storage_;
  }
  group_.recv(piece, from, kStreamTag);
  return piece;
}

void SliceStream::read(const std::byte* own, const Sink& sink) {
  const size_t storage = storage_;
  sink(own, storages_[storage].bytes);
  if (skip_own()) return;
  while (storage_ == storage) {
    const at::Tensor piece = receive();
    sink(piece.const_data_ptr(), piece.nbytes());
  }
}

void send_slices(const Group& group, const std::vector<c10::Storage>& storages) {
  for (const c10::Storage& storage : storages) {
    const Slices& slices = *slices_of(storage);
    at::Tensor bytes = at::empty({0}, at::kByte);
    bytes.set_(storage, static_cast<int64_t>(slices.begin()), {static_cast<int64_t>(slices.bytes)}, {1});
    for (const at::Tensor& piece : bytes.split(static_cast<int64_t>(kStreamedBytes))) group.send(piece, 0, kStreamTag);
  }
}

}  // namespace lockstep
