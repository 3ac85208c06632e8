#include "pipeline/neighbour.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <exception>
#include <utility>

#include <ATen/ATen.h>

#include "collectives/group_state.h"

namespace lockstep {
namespace {

enum Kind : int64_t { kAsBefore, kOther, kUndefined, kDone, kTrouble };
constexpr size_t kMaxDimensions = 8;
constexpr int kReadTag = 1, kCopiedTag = 2;  ///< for the messages that trouble was read, and that a box was copied
/// Indices in a header.
enum Place {
  kKind,
  kMark,
  kGiven,
  kAnswers,
  kMicroBatches,
  kLoss,
  kDtype,
  kDimensions,
  kLast,
  kSizes,
  kHeader = kSizes + static_cast<int>(kMaxDimensions)
};

MachineMemory* memory_with(const Group& group, int rank, const at::Device& device) {
  auto* const memory = machine_memory_of(group);
  return memory != nullptr && device.is_cpu() && memory->memory_of(rank, 0) != nullptr ? memory : nullptr;
}

}  // namespace

Neighbour::Neighbour(const Group& group, int rank, at::Device device)
    : group_(group), rank_(rank), device_(device), memory_(memory_with(group, rank, device)) {}

at::Tensor Neighbour::empty(const Layout& layout) const {
  return at::empty(layout.sizes, at::dtype(layout.dtype).device(device_));
}

void Neighbour::send_one(at::Tensor tensor) {
  while (!sending_.empty() && sending_.front().is_completed()) {
    sending_.front().wait();
    sending_.pop_front();
  }
  sending_.push_back(group_.send_async(tensor, rank_));
}

void Neighbour::send_header(int64_t kind, const Layout& layout, int64_t last) {
  std::array<int64_t, kHeader> header{};
  header[kKind] = kind;
  header[kMark] = words_.mark;
  header[kGiven] = words_.given;
  header[kAnswers] = words_.answers;
  header[kMicroBatches] = words_.count;
  header[kLoss] = std::bit_cast<int64_t>(words_.loss);
  header[kDtype] = static_cast<int64_t>(layout.dtype);
  header[kDimensions] = static_cast<int64_t>(layout.sizes.size());
  header[kLast] = last;
  for (size_t i = 0; i < layout.sizes.size(); ++i) header[kSizes + i] = layout.sizes[i];
  send_one(at::tensor(at::ArrayRef<int64_t>(header.data(), header.size())).to(device_));
}

int64_t Neighbour::put(const at::Tensor& tensor) {
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const auto is_free = [](const Box& box) { return !box.read || box.read->is_completed(); };
  auto box = std::find_if(boxes_.begin(), boxes_.end(), [&](const Box& one) {
    return is_free(one) && one.memory.numel() >= std::max<int64_t>(bytes, 1);
  });
  if (box == boxes_.end()) {
    std::erase_if(boxes_, is_free);  // too small
    box = boxes_.insert(boxes_.end(), {group_.allocate(std::max<int64_t>(bytes, 1), at::kByte), std::nullopt});
  }
  const auto place = memory_->place_of(box->memory);
  TORCH_INTERNAL_ASSERT(place, "the group's memory is not shared");
  std::memcpy(box->memory.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
  box->read = group_.recv_async(at::empty({1}, at::kByte), rank_, kCopiedTag);
  return static_cast<int64_t>(*place) + 1;
}

at::Tensor Neighbour::copy_of_box(const Layout& layout, int64_t place) const {
  const at::Tensor copy = empty(layout);
  std::memcpy(copy.mutable_data_ptr(), memory_->memory_of(rank_, static_cast<uint64_t>(place - 1)), copy.nbytes());
  (void)group_.send_async(at::zeros({1}, at::kByte), rank_, kCopiedTag);
  return copy;
}

void Neighbour::send_assumed(const at::Tensor& tensor) {
  if (sent_) send_one(tensor.defined() ? tensor : at::zeros(sent_->sizes, at::dtype(sent_->dtype).device(device_)));
}

void Neighbour::send(const at::Tensor& tensor, const Words& words) {
  words_ = words;
  if (!tensor.defined()) {
    send_header(kUndefined, {at::kFloat, {}});
    return send_assumed({});
  }
  TORCH_CHECK(static_cast<size_t>(tensor.dim()) <= kMaxDimensions, "Pipeline: a layer returned a tensor of ",
              tensor.dim(), " dimensions; at most ", kMaxDimensions, " can be sent to the next stage");
  const Layout layout{tensor.scalar_type(), tensor.sizes().vec()};
  const at::Tensor sent = tensor.detach().contiguous();
  if (memory_ != nullptr) return send_header(kOther, layout, put(sent));
  if (sent_ == layout) {
    send_header(kAsBefore, layout);
    return send_assumed(sent);
  }
  send_header(kOther, layout);
  send_assumed({});
  send_one(sent);
  sent_ = layout;
}

void Neighbour::expect() {
  UnderWay& coming = expected_.emplace();
  coming.header = at::empty({kHeader}, at::dtype(at::kLong).device(device_));
  coming.header_work = group_.recv_async(coming.header, rank_);
  if (!received_) return;
  coming.tensor = empty(*received_);
  coming.tensor_work = group_.recv_async(coming.tensor, rank_);
}

Neighbour::Received Neighbour::receive() {
  if (!expected_) expect();
  UnderWay coming = *std::exchange(expected_, std::nullopt);
  coming.header_work->wait();
  const at::Tensor header = coming.header.cpu();
  const auto* words = header.const_data_ptr<int64_t>();
  if (coming.tensor_work) coming.tensor_work->wait();
  if (words[kKind] == kTrouble) throw_told(words[kLast]);
  const Words told{.mark = words[kMark],
                   .given = words[kGiven],
                   .answers = words[kAnswers],
                   .count = words[kMicroBatches],
                   .loss = std::bit_cast<double>(words[kLoss])};
  if (words[kKind] == kUndefined) return {{}, told};
  if (words[kKind] == kAsBefore) return {coming.tensor, told};
  const Layout layout{static_cast<at::ScalarType>(words[kDtype]),
                      std::vector<int64_t>(words + kSizes, words + kSizes + words[kDimensions])};
  if (memory_ != nullptr) return {copy_of_box(layout, words[kLast]), told};
  received_ = layout;
  const at::Tensor tensor = empty(*received_);
  group_.recv(tensor, rank_);
  return {tensor, told};
}

void Neighbour::throw_told(int64_t bytes) {
  const at::Tensor text = at::empty({bytes}, at::dtype(at::kByte).device(device_));
  group_.recv(text, rank_);
  (void)group_.send_async(at::zeros({1}, at::dtype(at::kByte).device(device_)), rank_, kReadTag);
  const at::Tensor here = text.cpu();
  throw ToldTrouble(
      std::string(reinterpret_cast<const char*>(here.const_data_ptr<uint8_t>()), static_cast<size_t>(here.numel())));
}

void Neighbour::send_done() { send_header(kDone, {at::kByte, {}}); }

void Neighbour::wait_until_done() {
  const at::Tensor header = at::empty({kHeader}, at::dtype(at::kLong).device(device_));
  group_.recv(header, rank_);
  const at::Tensor here = header.cpu();
  const auto* words = here.const_data_ptr<int64_t>();
  if (words[kKind] == kDone) return;
  if (received_ && memory_ == nullptr) group_.recv(empty(*received_), rank_);  // the assumed one
  TORCH_INTERNAL_ASSERT(words[kKind] == kTrouble);
  throw_told(words[kLast]);
}

void Neighbour::tell(const std::string& trouble) noexcept {
  try {
    send_header(kTrouble, {at::kByte, {}}, static_cast<int64_t>(trouble.size()));
    send_assumed({});
    const at::Tensor text = at::empty({static_cast<int64_t>(trouble.size())}, at::kByte);
    std::copy(trouble.begin(), trouble.end(), reinterpret_cast<char*>(text.mutable_data_ptr<uint8_t>()));
    send_one(text.to(device_));
    reading_ = group_.recv_async(at::empty({1}, at::dtype(at::kByte).device(device_)), rank_, kReadTag);
  } catch (const std::exception&) {  // it is gone, which the engine reports
  }
}

bool Neighbour::has_read_trouble() const noexcept {
  try {
    return !reading_ || reading_->is_completed();
  } catch (const std::exception&) {
    return true;
  }
}

void Neighbour::finish() {
  for (const Work& work : sending_) work.wait();
  sending_.clear();
}

}  // namespace lockstep
