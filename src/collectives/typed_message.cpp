#include "collectives/typed_message.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "collectives/core_types.h"
#include "collectives/operand.h"

namespace lockstep {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr int kFirstPart = 10;
constexpr int64_t kHeadBytes = int64_t{1} << kFirstPart;  ///< the envelope holds fewer bytes than this

struct Description {
  int64_t dtype = 0, elements = 0;
  bool operator==(const Description&) const = default;

  std::string text() const {
    const bool known = dtype >= 0 && dtype < shm::kMovedDataTypes;
    return std::to_string(elements) + " elements of " +
           (known ? shm::name(static_cast<shm::DataType>(dtype)) : "an unknown dtype");
  }
};
constexpr int64_t kEnvelopeBytes = static_cast<int64_t>(sizeof(Description)) + kHeadBytes;

Description description_of(const at::Tensor& dense) {
  TORCH_CHECK(is_plain(dense), "messages are contiguous tensors on the CPU");
  const shm::DataType type = to_moved(dense.scalar_type());
  return {static_cast<int64_t>(type), bytes_of(dense) / static_cast<int64_t>(shm::element_bytes(type))};
}

/// Posts all bytes that are not in the envelope.
void post_parts(const at::Tensor& bytes, const PostBytes& post, std::vector<WorkPtr>& works) {
  int64_t begin = 0;
  for (int part = 62; part >= kFirstPart; --part) {
    const int64_t size = int64_t{1} << part;
    if ((bytes.numel() & size) == 0) continue;
    works.push_back(post(bytes.narrow(0, begin, size), part));
    begin += size;
  }
}

int64_t head_bytes(const at::Tensor& bytes) { return bytes.numel() % kHeadBytes; }
char* head_of(const at::Tensor& envelope) {
  return static_cast<char*>(envelope.mutable_data_ptr()) + sizeof(Description);
}
char* end_of(const at::Tensor& bytes) {
  return static_cast<char*>(bytes.mutable_data_ptr()) + bytes.numel() - head_bytes(bytes);
}

class TypedWork final : public c10d::Work {
 public:
  TypedWork(std::vector<WorkPtr> works, at::Tensor envelope)
      : works_(std::move(works)), envelope_(std::move(envelope)) {}
  TypedWork(std::vector<WorkPtr> works, at::Tensor envelope, at::Tensor bytes, Description expected, MessageName name)
      : TypedWork(std::move(works), std::move(envelope)) {
    bytes_ = std::move(bytes);
    expected_ = expected;
    name_ = name;
  }

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const WorkPtr& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const WorkPtr& work) { return work->isSuccess(); });
  }
  void abort() override {
    for (const WorkPtr& work : works_) work->abort();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    bool all = true;
    for (size_t i = 0; i < works_.size() && all; ++i) {
      all = works_[i]->wait(timeout);
      if (i == 0 && all && bytes_.defined()) check();
    }
    if (all && bytes_.defined() && head_bytes(bytes_) > 0)
      std::memcpy(end_of(bytes_), head_of(envelope_), static_cast<size_t>(head_bytes(bytes_)));
    return all;
  }

 private:
  void check() const {
    Description sent;
    std::memcpy(&sent, envelope_.const_data_ptr(), sizeof sent);
    if (sent == expected_) return;
    // Messages posted for other parts are never received, and an engine may not tolerate their destruction.
    static auto* const left = new std::vector<std::vector<WorkPtr>>;
    left->push_back(works_);
    throw WrongMessage("rank " + std::to_string(name_.to) + " received a message from rank " +
                       std::to_string(name_.from) + " into a buffer of another dtype or size: " + sent.text() +
                       " sent, " + expected_.text() + " expected (tag " + std::to_string(name_.tag) + ")");
  }

  const std::vector<WorkPtr> works_;  ///< the first is the envelope's
  const at::Tensor envelope_;
  at::Tensor bytes_;  ///< to receive; undefined for a send
  Description expected_;
  MessageName name_{};
};

}  // namespace

WorkPtr send_typed(const at::Tensor& dense, const PostBytes& post) {
  const Description description = description_of(dense);
  const at::Tensor bytes = as_bytes(dense), envelope = at::zeros({kEnvelopeBytes}, at::kByte);
  std::memcpy(envelope.mutable_data_ptr(), &description, sizeof description);
  if (head_bytes(bytes) > 0) std::memcpy(head_of(envelope), end_of(bytes), static_cast<size_t>(head_bytes(bytes)));
  std::vector<WorkPtr> works{post(envelope, 0)};
  post_parts(bytes, post, works);
  return c10::make_intrusive<TypedWork>(std::move(works), envelope);
}

WorkPtr receive_typed(const at::Tensor& dense, MessageName name, const PostBytes& post) {
  const Description expected = description_of(dense);
  const at::Tensor bytes = as_bytes(dense), arriving = at::zeros({kEnvelopeBytes}, at::kByte);
  std::vector<WorkPtr> works{post(arriving, 0)};
  post_parts(bytes, post, works);
  return c10::make_intrusive<TypedWork>(std::move(works), arriving, bytes, expected, name);
}

}  // namespace lockstep
