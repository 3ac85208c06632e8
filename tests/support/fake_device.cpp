#include "support/fake_device.h"

#include <sys/mman.h>

#include <atomic>
#include <mutex>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>
#include <torch/torch.h>

namespace lockstep::testing {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

thread_local int current_stream = 0;
thread_local bool is_in_kernel = false;  // of the device, which the CPU computes
std::mutex mutex;
std::vector<std::pair<int, int>> waits;  // guarded by mutex
FakeTraffic traffic;                     // guarded by mutex
std::atomic<int> host_waits{0};

void count(int64_t FakeTraffic::*what, const at::Tensor& tensor) {
  std::lock_guard lock(mutex);
  traffic.*what += static_cast<int64_t>(tensor.nbytes());
}

c10::Stream stream_of(int id) { return c10::Stream(c10::Stream::UNSAFE, {kType, 0}, id); }

struct FakeGuard final : c10::impl::NoOpDeviceGuardImpl<kType> {
  c10::Device exchangeDevice(c10::Device) const override { return {kType, 0}; }
  c10::Device getDevice() const override { return {kType, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream_of(current_stream); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return stream_of(std::exchange(current_stream, static_cast<int>(stream.id())));
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(static_cast<intptr_t>(stream.id() + 1));
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard lock(mutex);
    waits.emplace_back(static_cast<int>(reinterpret_cast<intptr_t>(event)) - 1, static_cast<int>(stream.id()));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuard)

/// Without this, autograd assumes that the device has no streams.
struct FakeHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};
/// Once, when a test uses the device: from then on autograd takes it for the process's accelerator, in place of a GPU.
void register_device() {
  static FakeHooks hooks;
  static const bool done = [] {
    at::RegisterPrivateUse1HooksInterface(&hooks);
    c10::register_privateuse1_backend("fake");
    return true;
  }();
  (void)done;
}

/// The CPU must not touch the addresses of the device's tensors; their data is elsewhere.
struct Block {
  explicit Block(size_t size)
      : bytes(size), address(map(size, PROT_NONE)), content(map(size, PROT_READ | PROT_WRITE)) {}
  ~Block() {
    ::munmap(address, bytes);
    ::munmap(content, bytes);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  static char* map(size_t bytes, int access) {
    void* memory = ::mmap(nullptr, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "mmap of ", bytes, " bytes failed");
    return static_cast<char*>(memory);
  }
  static void free(void* block) { delete static_cast<Block*>(block); }

  const size_t bytes;
  char* const address;
  char* const content;
};

struct FakeAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, {kType, 0}};
    auto* block = new Block(bytes);
    return {block->address, block, &Block::free, {kType, 0}};
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "a copy of raw memory of the device");
  }
};
FakeAllocator allocator;

/// The tensor's data, as the CPU sees it.
at::Tensor seen(const at::Tensor& tensor) {
  if (tensor.device().type() != kType) return tensor;
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  const auto* block = static_cast<const Block*>(tensor.storage().data_ptr().get_context());
  char* content = block->content + (static_cast<char*>(tensor.data_ptr()) - block->address);
  return at::from_blob(
      content, tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      sizes, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (to.is_cpu() != from.is_cpu() && !is_in_kernel) ++host_waits;
  seen(to).copy_(seen(from));
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) {
    const at::Tensor room = at::empty(from.sizes(), to.options());
    to.unsafeGetTensorImpl()->set_storage_keep_dtype(room.storage());
    to.unsafeGetTensorImpl()->set_sizes_contiguous(from.sizes());
  }
  return copy_from(from, to, false);
}
at::Scalar item(const at::Tensor& tensor) {
  ++host_waits;
  return seen(tensor).item();
}

/// On the CPU, if all tensors but single numbers are on the device.
void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto check = [&](const at::Tensor& tensor) {
    TORCH_CHECK(!tensor.defined() || tensor.dim() == 0 || tensor.device().type() == kType, op.schema().name(),
                " mixes tensors on the device and on the CPU");
  };
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) check(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) check(tensor);
  }
  is_in_kernel = true;
  const auto left = c10::make_scope_exit([] { is_in_kernel = false; });
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("set_.source_Storage_storage_offset",
               static_cast<at::Tensor& (*)(at::Tensor&, at::Storage, int64_t, at::IntArrayRef, at::IntArrayRef)>(
                   &at::cpu::set_));
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

/// The host may wait for the device, or order a stream after the work, which takes its results as a device would.
class FakeWork final : public c10d::Work {
 public:
  explicit FakeWork(WorkPointer inner) : inner_(std::move(inner)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  bool wait(std::chrono::milliseconds timeout) override {
    ++host_waits;
    return inner_->wait(timeout);
  }
  void synchronize() override { inner_->wait(); }

 private:
  const WorkPointer inner_;
};
WorkPointer on_device(WorkPointer work) { return c10::make_intrusive<FakeWork>(std::move(work)); }

class FakeDeviceBackend final : public c10d::Backend {
 public:
  explicit FakeDeviceBackend(c10::intrusive_ptr<c10d::Backend> cpu)
      : Backend(cpu->getRank(), cpu->getSize()), cpu_(std::move(cpu)) {}
  const std::string getBackendName() const override { return "fake device"; }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Tensors here = all_seen(tensors);
    for (const at::Tensor& tensor : here) count(&FakeTraffic::all_reduced, tensor);
    return on_device(cpu_->allreduce(here, options));
  }
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensors here = all_seen(tensors);
    return on_device(cpu_->broadcast(here, options));
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Tensors here = all_seen(tensors);
    return on_device(cpu_->reduce(here, options));
  }
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    std::vector<Tensors> to;
    for (const Tensors& rows : outputs) to.push_back(all_seen(rows));
    Tensors from = all_seen(inputs);
    return on_device(cpu_->gather(to, from, options));
  }
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    std::vector<Tensors> from;
    for (const Tensors& rows : inputs) from.push_back(all_seen(rows));
    Tensors to = all_seen(outputs);
    return on_device(cpu_->scatter(to, from, options));
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    at::Tensor to = seen(output), from = seen(input);
    count(&FakeTraffic::all_gathered, to);
    return on_device(cpu_->_allgather_base(to, from, options));
  }
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override {
    at::Tensor to = seen(output), from = seen(input);
    count(&FakeTraffic::reduce_scattered, from);
    return on_device(cpu_->_reduce_scatter_base(to, from, options));
  }
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    at::Tensor to = seen(output), from = seen(input);
    return on_device(cpu_->alltoall_base(to, from, output_splits, input_splits, options));
  }

 private:
  static Tensors all_seen(const Tensors& tensors) {
    Tensors all;
    for (const at::Tensor& tensor : tensors) {
      TORCH_CHECK(tensor.device().type() == kType, "the engine of a device got a tensor on ", tensor.device());
      all.push_back(seen(tensor));
    }
    return all;
  }

  const c10::intrusive_ptr<c10d::Backend> cpu_;
};

}  // namespace

c10::Device fake_device() {
  register_device();
  return {kType, 0};
}

c10::intrusive_ptr<c10d::Backend> make_fake_device_backend(c10::intrusive_ptr<c10d::Backend> cpu) {
  return c10::make_intrusive<FakeDeviceBackend>(std::move(cpu));
}

FakeTraffic take_fake_traffic() {
  std::lock_guard lock(mutex);
  return std::exchange(traffic, {});
}

int take_host_waits() { return host_waits.exchange(0); }

void set_fake_stream(int stream) { current_stream = stream; }

std::vector<std::pair<int, int>> take_fake_waits() {
  std::lock_guard lock(mutex);
  return std::exchange(waits, {});
}

}  // namespace lockstep::testing
