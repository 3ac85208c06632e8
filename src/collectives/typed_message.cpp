#include "collectives/typed_message.h"

#include <utility>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "collectives/core_types.h"
#include "collectives/operand.h"

namespace lockstep {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// [dtype, elements]
at::Tensor envelope_of(const at::Tensor& dense) {
  TORCH_CHECK(is_plain(dense), "messages are contiguous tensors on the CPU");
  const shm::DataType type = to_moved(dense.scalar_type());
  return at::tensor({static_cast<int64_t>(type), bytes_of(dense) / static_cast<int64_t>(shm::element_bytes(type))},
                    at::kLong);
}

std::string text_of(const at::Tensor& envelope) {
  const auto* numbers = envelope.const_data_ptr<int64_t>();
  const bool known = numbers[0] >= 0 && numbers[0] < shm::kMovedDataTypes;
  return std::to_string(numbers[1]) + " elements of " +
         (known ? shm::name(static_cast<shm::DataType>(numbers[0])) : "an unknown dtype");
}

class TypedWork final : public c10d::Work {
 public:
  TypedWork(WorkPtr envelope, WorkPtr data, at::Tensor content)
      : envelope_work_(std::move(envelope)), data_work_(std::move(data)), content_(std::move(content)) {}
  TypedWork(WorkPtr envelope, WorkPtr data, at::Tensor content, at::Tensor expected, MessageName name)
      : TypedWork(std::move(envelope), std::move(data), std::move(content)) {
    expected_ = std::move(expected);
    name_ = name;
  }

  bool isCompleted() override { return envelope_work_->isCompleted() && data_work_->isCompleted(); }
  bool isSuccess() const override { return envelope_work_->isSuccess() && data_work_->isSuccess(); }
  void abort() override {
    envelope_work_->abort();
    data_work_->abort();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    envelope_work_->wait(timeout);
    try {
      data_work_->wait(timeout);
    } catch (const std::exception&) {
      check();  // a message of another size may be an error of the engine's
      throw;
    }
    check();
    return true;
  }

 private:
  void check() const {
    if (!expected_.defined() || at::equal(content_, expected_)) return;
    throw Error("rank " + std::to_string(name_.to) + " received a message from rank " + std::to_string(name_.from) +
                " into a buffer of another dtype or size: " + text_of(content_) + " sent, " + text_of(expected_) +
                " expected (tag " + std::to_string(name_.tag) + ")");
  }

  const WorkPtr envelope_work_, data_work_;
  const at::Tensor content_;  ///< of the envelope
  at::Tensor expected_;       ///< undefined for a send
  MessageName name_{};
};

}  // namespace

WorkPtr send_typed(const at::Tensor& dense, const PostBytes& post) {
  const at::Tensor envelope = envelope_of(dense);
  auto first = post(as_bytes(envelope)), second = post(as_bytes(dense));
  return c10::make_intrusive<TypedWork>(std::move(first), std::move(second), envelope);
}

WorkPtr receive_typed(const at::Tensor& dense, MessageName name, const PostBytes& post) {
  const at::Tensor expected = envelope_of(dense), arriving = at::zeros_like(expected);
  auto first = post(as_bytes(arriving)), second = post(as_bytes(dense));
  return c10::make_intrusive<TypedWork>(std::move(first), std::move(second), arriving, expected, name);
}

}  // namespace lockstep
