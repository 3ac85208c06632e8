#include "collectives/shm/backend/backend_class.h"

// Point-to-point messages travel with their dtype (those that cannot be reduced as bytes); barriers carry nothing.

namespace lockstep::shm_engine {

using c10d::OpType;

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) {
  Task task(OpType::SEND, "lockstep:send", c10d::kUnsetTimeout);
  const at::Tensor& tensor = only("send", tensors);
  check_dense("send", tensor);
  task.inputs = {tensor};
  const void* data = task.input(tensor);
  shared_->bury();
  auto message = shared_->group().send(data, tensor.nbytes(), to, tag, shared_->keep(std::move(task.tensors)),
                                       data_type(tensor.scalar_type()).value_or(shm::DataType::kUInt8));
  return launch(std::move(task), {std::move(message)});
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) {
  return receive(Task(OpType::RECV, "lockstep:recv", c10d::kUnsetTimeout), only("recv", tensors), from, tag);
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive(Task(OpType::RECVANYSOURCE, "lockstep:recvAnySource", c10d::kUnsetTimeout), only("recv", tensors),
                 shm::kAnySource, tag);
}

ShmBackend::WorkPtr ShmBackend::receive(Task task, at::Tensor& tensor, int from, int tag) {
  check_dense("recv", tensor);
  task.inputs = task.result = {tensor};
  void* data = task.output(tensor, /*load=*/false);
  shared_->bury();
  auto message = shared_->group().receive(data, tensor.nbytes(), from, tag, shared_->keep(std::move(task.tensors)),
                                          data_type(tensor.scalar_type()).value_or(shm::DataType::kUInt8));
  return launch(std::move(task), {std::move(message)});
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  Task task(OpType::BARRIER, "lockstep:barrier", options.timeout);
  task.requests.emplace_back();
  return launch(std::move(task));
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  // The core's timeout names all missing ranks anyway.
  try {
    barrier(options)->wait();
  } catch (const std::exception& error) {
    C10_THROW_ERROR(DistBackendError, c10::str("monitored barrier failed on rank ", getRank(), ": ", error.what()));
  }
}

}  // namespace lockstep::shm_engine
