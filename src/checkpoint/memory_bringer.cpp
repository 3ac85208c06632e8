#include "checkpoint/memory_bringer.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include <ATen/ATen.h>

#include "base/error.h"
#include "base/state_memory.h"
#include "checkpoint/checkpoint_message.h"

namespace lockstep {
namespace {

constexpr uint64_t kBroughtPiece = 4 << 20;
constexpr int kBringTag = (1 << 24) - 14;  // of messages that no program sends by accident

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor() && value.toTensor().defined()) return visit(value.toTensor());
  if (value.isGenericDict())
    for (const auto& item : value.toGenericDict()) for_each_tensor(item.value(), visit);
  if (!value.isList() && !value.isTuple()) return;
  for (const c10::IValue& item : value.isList() ? value.toList().vec() : value.toTupleRef().elements().vec())
    for_each_tensor(item, visit);
}

const OpenSlot::Partial* partial_of(const OpenSlot& open, const at::Tensor& tensor) {
  for (const OpenSlot::Partial& partial : open.partial)
    if (tensor.storage().unsafeGetStorageImpl() == partial.bytes.storage().unsafeGetStorageImpl()) return &partial;
  return nullptr;
}

/// Sorted, without overlaps.
std::vector<ByteRange> merged(std::vector<ByteRange> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const ByteRange& a, const ByteRange& b) { return a.begin < b.begin; });
  std::vector<ByteRange> result;
  for (const ByteRange& range : ranges) {
    if (range.begin >= range.end) continue;
    if (!result.empty() && range.begin <= result.back().end)
      result.back().end = std::max(result.back().end, range.end);
    else
      result.push_back(range);
  }
  return result;
}

/// A range of the common image, and the rank that saved it in its slice; -1: it is plain.
struct HeldRange {
  ByteRange range;
  int holder = -1;
};

std::vector<HeldRange> divided(const std::vector<ByteRange>& ranges, const ImageSlices& slices) {
  std::vector<HeldRange> divided;
  for (const ByteRange& range : ranges) {
    uint64_t at = range.begin;
    for (const ImageSlices::Storage& storage : slices.storages()) {
      if (storage.end() <= at || storage.begin >= range.end || storage.slice_bytes == 0) continue;
      if (at < storage.begin) divided.push_back({{at, storage.begin}});
      at = std::max(at, storage.begin);
      while (at < std::min(range.end, storage.end())) {
        const size_t slice = (at - storage.begin) / storage.slice_bytes;
        const uint64_t end = std::min(range.end, storage.slice(slice).end);
        divided.push_back({{at, end}, storage.holders[slice]});
        at = end;
      }
    }
    if (at < range.end) divided.push_back({{at, range.end}});
  }
  return divided;
}

/// A rank's request to another.
struct SliceRequest {
  ByteRange range;
  int source = 0;
};

std::string encode(const std::vector<SliceRequest>& requests) {
  std::string text;
  for (const SliceRequest& request : requests)
    text += std::to_string(request.range.begin) + ' ' + std::to_string(request.range.end) + ' ' +
            std::to_string(request.source) + ' ';
  return text;
}

std::vector<SliceRequest> requests_in(const std::string& text) {
  std::istringstream stream(text);
  std::vector<SliceRequest> requests;
  for (SliceRequest one; stream >> one.range.begin >> one.range.end >> one.source;) requests.push_back(one);
  return requests;
}

class Bringer {
 public:
  Bringer(const Group& group, const SlotMemory& memory, const OpenSlot& open)
      : group_(group), memory_(memory), open_(open) {}

  void bring(const std::vector<ByteRange>& ranges, std::string problem);

 private:
  void agree(const std::string& problem) const;
  std::vector<SliceRequest> read_here(const std::vector<ByteRange>& ranges, const std::vector<std::string>& held) const;
  std::string exchange(const std::vector<SliceRequest>& mine) const;
  /// uint8, within a partial storage.
  at::Tensor place_of(const ByteRange& range) const;
  void read(const ByteRange& range, const at::Tensor& to) const {
    memory_.read(StateMemory::common_at(open_.slot.slot) + range.begin, to.mutable_data_ptr(), range.bytes());
  }

  const Group group_;
  const SlotMemory& memory_;
  const OpenSlot& open_;
};

void Bringer::agree(const std::string& problem) const {
  std::string text;
  const auto said = group_.all_gather_bytes(problem);
  for (size_t rank = 0; rank < said.size(); ++rank)
    if (!said[rank].empty()) text += "\n rank " + std::to_string(rank) + ": " + said[rank];
  if (!text.empty()) throw RefusedInput("cannot resume from the checkpoint in memory:" + text);
}

at::Tensor Bringer::place_of(const ByteRange& range) const {
  for (const OpenSlot::Partial& partial : open_.partial)
    if (range.begin >= partial.begin && range.end <= partial.begin + partial.bytes.nbytes())
      return partial.bytes.narrow(0, static_cast<int64_t>(range.begin - partial.begin),
                                  static_cast<int64_t>(range.bytes()));
  throw Error("the checkpoint in memory is damaged: a range lies in no storage");
}

/// Reads what this machine has, and returns the rest. `held`: by rank, a digit for each rank that saved.
std::vector<SliceRequest> Bringer::read_here(const std::vector<ByteRange>& ranges,
                                             const std::vector<std::string>& held) const {
  std::vector<SliceRequest> requests;
  for (const auto& [range, holder] : divided(ranges, open_.slices)) {
    const auto saved = static_cast<size_t>(std::max(holder, 0));
    if (holder < 0 || open_.slot.sliced.at(saved)) {
      read(range, place_of(range));
      continue;
    }
    std::vector<int> sources;
    for (size_t rank = 0; rank < held.size(); ++rank)
      if (held[rank].size() > saved && held[rank][saved] == '1') sources.push_back(static_cast<int>(rank));
    if (sources.empty())
      throw Error("no machine holds what rank " + std::to_string(holder) + " saved of the sharded parts");
    requests.push_back({range, sources[static_cast<size_t>(group_.rank()) % sources.size()]});
  }
  return requests;
}

/// All ranks go through all requests in the same order, so no two wait for each other. Returns what went wrong here.
std::string Bringer::exchange(const std::vector<SliceRequest>& mine) const {
  std::string problem;
  const auto all = group_.all_gather_bytes(encode(mine));
  at::Tensor buffer;
  for (size_t to = 0; to < all.size(); ++to)
    for (const SliceRequest& request : requests_in(all[to])) {
      const bool receives = static_cast<int>(to) == group_.rank(), sends = request.source == group_.rank();
      for (uint64_t at = request.range.begin; (receives || sends) && at < request.range.end; at += kBroughtPiece) {
        const ByteRange piece{at, std::min(at + kBroughtPiece, request.range.end)};
        if (receives) {
          group_.recv(place_of(piece), request.source, kBringTag);
          continue;
        }
        if (!buffer.defined()) buffer = at::empty({kBroughtPiece}, at::kByte);
        const at::Tensor bytes = buffer.narrow(0, 0, static_cast<int64_t>(piece.bytes()));
        const std::string failed = failure_of([&] { read(piece, bytes); });
        if (problem.empty()) problem = failed;
        group_.send(bytes, static_cast<int>(to), kBringTag);
      }
    }
  return problem;
}

void Bringer::bring(const std::vector<ByteRange>& ranges, std::string problem) {
  agree(problem);
  std::string mine;
  for (const bool sliced : open_.slot.sliced) mine += sliced ? '1' : '0';
  const auto held = group_.all_gather_bytes(mine);
  std::vector<SliceRequest> requests;
  problem = failure_of([&] { requests = read_here(ranges, held); });
  agree(problem);
  if (!open_.slices.empty()) agree(exchange(requests));
}

}  // namespace

std::vector<ByteRange> ranges_to_load(const std::vector<CheckpointPart>& parts, const OpenSlot& open) {
  std::vector<ByteRange> ranges;
  const auto add_all = [&](const at::Tensor& tensor) {
    if (const auto* partial = partial_of(open, tensor))
      ranges.push_back({partial->begin, partial->begin + partial->bytes.nbytes()});
  };
  for (const CheckpointPart& part : parts) {
    const auto found = open.image.whole.find(part.name);
    if (found == open.image.whole.end()) continue;
    if (!part.lies_in_slices() || !part.elements_to_load) {
      for_each_tensor(found->value(), add_all);
      continue;
    }
    for (const auto& [tensor, begin, end] : part.elements_to_load(found->value())) {
      const OpenSlot::Partial* partial = partial_of(open, tensor);
      if (partial == nullptr) continue;
      if (!tensor.is_non_overlapping_and_dense()) {
        add_all(tensor);
        continue;
      }
      const auto at = [&](int64_t element) {
        return partial->begin + static_cast<uint64_t>(tensor.storage_offset() + element) * tensor.itemsize();
      };
      ranges.push_back({at(begin), at(end)});
    }
  }
  return merged(std::move(ranges));
}

void bring_ranges(const Group& group, const SlotMemory& memory, const OpenSlot& open,
                  const std::vector<ByteRange>& ranges, std::string problem) {
  Bringer(group, memory, open).bring(ranges, std::move(problem));
}

}  // namespace lockstep
