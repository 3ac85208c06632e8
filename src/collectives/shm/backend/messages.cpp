#include "base/clock.h"
#include "collectives/cause.h"
#include "collectives/core_types.h"
#include "collectives/shm/backend/shm_backend.h"

// Point-to-point messages travel with their dtype; barriers carry nothing.

namespace lockstep::shm_engine {

using c10d::OpType;

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) {
  TensorRequest request(OpType::SEND, "lockstep:send");
  const at::Tensor& tensor = only("send", tensors);
  check_dense("send", tensor);
  request.inputs = {tensor};
  const void* data = request.input(tensor);
  state().free_released();
  auto message = state().core().send(data, tensor.nbytes(), to, tag, state().keep(std::move(request.tensors)),
                                     to_moved(tensor.scalar_type()));
  return launch(std::move(request), {std::move(message)});
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) {
  return receive(TensorRequest(OpType::RECV, "lockstep:recv"), only("recv", tensors), from, tag);
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive(TensorRequest(OpType::RECVANYSOURCE, "lockstep:recvAnySource"), only("recv", tensors), shm::kAnySource,
                 tag);
}

ShmBackend::WorkPtr ShmBackend::receive(TensorRequest request, at::Tensor& tensor, int from, int tag) {
  check_dense("recv", tensor);
  request.inputs = request.result = {tensor};
  void* data = request.output(tensor, /*load=*/false);
  state().free_released();
  auto message = state().core().receive(data, tensor.nbytes(), from, tag, state().keep(std::move(request.tensors)),
                                        to_moved(tensor.scalar_type()));
  return launch(std::move(request), {std::move(message)});
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  TensorRequest request(OpType::BARRIER, "lockstep:barrier", options);
  request.parts.emplace_back();
  return launch(std::move(request));
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  TensorRequest request(OpType::BARRIER, "lockstep:barrier", options);
  request.waits = true;
  request.parts.emplace_back();
  // A timeout of 0 is meant literally here: ranks that have not come yet are late.
  const bool none = options.timeout == kNoTimeout;
  const Deadline deadline(none ? options.timeout : bounded(options.timeout));
  if (none) request.timeout = std::chrono::milliseconds(1);
  try {
    launch(std::move(request));
  } catch (const std::exception& error) {
    // The core's timeout names all missing ranks, whether the caller wants all or the first; the wording is Gloo's.
    C10_THROW_ERROR(DistBackendError,
                    c10::str("Rank ", getRank(),
                             deadline.passed() ? " timed out in monitoredBarrier: " : " failed in monitoredBarrier: ",
                             cause_of(error)));
  }
}

}  // namespace lockstep::shm_engine
