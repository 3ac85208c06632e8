// lockstep._C: groups, replicas and their guards. Every call that may wait gives up Python's lock.

#include <chrono>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "base/interruption.h"
#include "collectives/group_state.h"
#include "collectives/timeout_hint.h"
#include "data_parallel/replica_state.h"
#include "python_engine.h"
#include "python_module.h"
#include "python_names.h"
#include "python_replica.h"
#include "rank_page/operation_label.h"

namespace lockstep::python {
namespace {

namespace py = pybind11;

using Unlocked = py::call_guard<py::gil_scoped_release>;

EngineFactories factories_of(std::chrono::milliseconds timeout) {
  EngineFactories factories;
  factories.cpu = [timeout](const auto& shared, int number, int size) {
    return make_engine(shared, number, size, timeout, EngineUse::kGroup);
  };
  factories.device = [](c10::DeviceType device, const auto&, int, int) -> c10::intrusive_ptr<c10d::Backend> {
    TORCH_CHECK(false, "lockstep.attach() trains modules on the CPU, and a parameter is on ", device,
                "; use torch's DistributedDataParallel for such modules");
  };
  return factories;
}

/// For a group of torch.distributed with another engine.
Group make_python_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                        std::chrono::milliseconds timeout) {
  return make_group(store, rank, world_size, factories_of(timeout));
}

/// Over the engine of a group of torch.distributed, if it is one of ours: what the program calls in either is compared
/// as one sequence, and what that group knows of its ranks is known here. None if it is another's.
std::optional<Group> make_group_within(const c10::intrusive_ptr<c10d::Backend>& engine,
                                       const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                       std::chrono::milliseconds timeout, bool has_timeout_of_its_own) {
  auto shared = shared_engine(engine, has_timeout_of_its_own ? std::optional(timeout) : std::nullopt);
  if (!shared) return std::nullopt;
  return make_group_over(std::move(shared), store, rank, world_size, factories_of(timeout));
}

/// Throws on all ranks if they gave different timeouts, or some gave none.
/// REQUIRES: every rank calls it.
void check_same_timeout(const Group& group, std::optional<std::chrono::milliseconds> timeout) {
  const OperationLabel label("attach()");
  const int64_t own = timeout ? timeout->count() : 0;
  const at::Tensor all = group.all_gather(at::scalar_tensor(own, at::kLong));
  const auto* said = all.const_data_ptr<int64_t>();
  const auto text = [](int64_t one) { return one == 0 ? "none" : std::to_string(one) + " ms"; };
  for (int rank = 1; rank < group.world_size(); ++rank)
    if (said[rank] != said[0])
      throw Error("lockstep.attach(): timeout is " + text(said[0]) + " on rank 0 and " + text(said[rank]) +
                  " on rank " + std::to_string(rank) + "; give the same one on every rank");
}

DistributedDataParallelOptions options_of(const py::dict& from) {
  DistributedDataParallelOptions options;
  const auto take = [&](const char* name, auto& field) {
    field = from[name].cast<std::remove_reference_t<decltype(field)>>();
  };
  take("first_bucket_cap_mb", options.first_bucket_cap_mb);
  take("bucket_cap_mb", options.bucket_cap_mb);
  take("init_sync", options.init_sync);
  take("delay_all_reduce_named_params", options.delay_all_reduce_named_params);
  take("parameters_to_ignore", options.parameters_to_ignore);
  take("keep_freed_memory", options.keep_freed_memory);
  options.reduction = from["reduction"].cast<GradientReduction>();
  options.buffers = from["buffers"].cast<BufferPolicy>();
  return options;
}

void bind_enums(py::module_& module) {
  py::enum_<GradientReduction>(module, "GradientReduction")
      .value("mean", GradientReduction::kMean)
      .value("sum", GradientReduction::kSum)
      .value("weighted_mean", GradientReduction::kWeightedMean);
  py::enum_<BufferPolicy>(module, "BufferPolicy")
      .value("follow_rank_zero", BufferPolicy::kFollowRankZero)
      .value("mean", BufferPolicy::kMean)
      .value("none", BufferPolicy::kNone);
  py::enum_<NonFinitePolicy>(module, "NonFinitePolicy")
      .value("ignore", NonFinitePolicy::kIgnore)
      .value("skip", NonFinitePolicy::kSkip)
      .value("raise", NonFinitePolicy::kRaise);
}

void bind_stats(py::module_& module) {
  py::class_<BucketStats>(module, "BucketStats")
      .def_readonly("parameters", &BucketStats::parameters)
      .def_readonly("bytes", &BucketStats::bytes)
      .def_readonly("ready_ms", &BucketStats::ready_ms)
      .def_readonly("start_ms", &BucketStats::start_ms)
      .def_readonly("end_ms", &BucketStats::end_ms)
      .def_readonly("wait_ms", &BucketStats::wait_ms);
  py::class_<ReductionStats>(module, "ReductionStats")
      .def_readonly("reductions", &ReductionStats::reductions)
      .def_readonly("bytes", &ReductionStats::bytes)
      .def_readonly("backward_ms", &ReductionStats::backward_ms)
      .def_readonly("wait_ms", &ReductionStats::wait_ms)
      .def_readonly("overlap", &ReductionStats::overlap)
      .def_readonly("buckets", &ReductionStats::buckets)
      .def_readonly("wait_ms_by_rank", &ReductionStats::wait_ms_by_rank)
      .def_readonly("times_last_by_rank", &ReductionStats::times_last_by_rank)
      .def_readonly("reason", &ReductionStats::reason);
}

std::shared_ptr<PythonReplica> make_replica(const py::object& module, const Group& group, const py::dict& options) {
  auto source = std::make_unique<PythonModule>(module);
  DistributedDataParallelOptions with = options_of(options);
  // Waits for the other ranks without the lock, and is destroyed with it.
  std::shared_ptr<PythonReplica> replica;
  {
    const py::gil_scoped_release unlocked;
    replica = std::make_shared<PythonReplica>(std::move(source), group, std::move(with));
  }
  return replica;
}

void join(PythonReplica& replica, const std::function<void()>& body, bool divide_by_initial_world_size,
          bool throw_on_early_termination, const std::function<void()>& shadow) {
  JoinOptions options;
  options.divide_by_initial_world_size = divide_by_initial_world_size;
  options.throw_on_early_termination = throw_on_early_termination;
  options.shadow = shadow;
  replica.join(body, options);
}

/// Sets Python's error: Error, or for misuse what torch raises for it, without the C++ stack. For what is being
/// handled.
void set_error_of(const std::exception& error) {
  if (dynamic_cast<const Error*>(&error) != nullptr) {
    const py::object type = py::module_::import("lockstep._C").attr("Error");
    PyErr_SetString(type.ptr(), with_names_of_python(error.what()).c_str());
    return;
  }
  torch::translate_exception_to_python(std::current_exception());
  const py::error_already_set set;  // takes it
  const py::object text = py::reinterpret_steal<py::object>(PyObject_Str(set.value().ptr()));
  PyErr_SetString(set.type().ptr(), with_names_of_python(text.cast<std::string>()).c_str());
}

/// Exceptions of backward pass through torch's bindings, which know nothing of Error but forward Python's own.
void raise_in_python(const std::exception& error) {
  const py::gil_scoped_acquire lock;
  set_error_of(error);
  python_error raised;
  raised.persist();
  throw python_error(std::move(raised));
}

/// Called within Python's first Tensor.register_hook() on a tensor, which drops the hook of a replica: it is put back
/// by the main thread, before it goes on with the program.
void restore_hooks_soon() {
  Py_AddPendingCall(
      [](void*) {
        GradientHook::restore_dropped();
        return 0;
      },
      nullptr);
}

/// Whether a tensor's Python object is held by the tensor alone, as long as nobody else can reach the tensor: then none
/// can begin to hold it, so its count is looked at without Python's lock. Backward must not wait for that lock, and
/// without this answer it would copy every gradient that an optimizer of Python has looked at.
bool is_unused_wrapper(const c10::impl::PyObjectSlot& slot) {
  PyObject* const object = slot.load_pyobj();
  return object != nullptr && Py_REFCNT(object) == 1;
}

/// KeyboardInterrupt, or what else the program's handler of SIGINT has raised.
struct PythonInterruption final : python_error, Interruption {};

/// On the main thread, which waits.
void ask_program() {
  const py::gil_scoped_acquire lock;
  if (PyErr_Occurred() != nullptr || PyErr_CheckSignals() == 0) return;
  PythonInterruption raised;
  raised.persist();
  throw PythonInterruption(std::move(raised));
}

void bind_errors(py::module_& module) {
  // As the backend's: a RuntimeError, too.
  const py::object base = py::module_::import("torch.distributed").attr("DistBackendError");
  auto& error = py::register_local_exception<Error>(module, "Error", base);
  error.attr("__module__") = "lockstep";
  // Asked before the one that this has registered.
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Interruption&) {
      torch::translate_exception_to_python(thrown);
    } catch (const Error& error) {
      set_error_of(error);
    } catch (const c10::Error& error) {
      set_error_of(error);
    }
  });
  translate_errors_of_backward(raise_in_python);
  let_waits_be_interrupted(ask_program);
  timeout_hint = kTimeoutHintOfPython;
  tell_dropped_hooks(restore_hooks_soon);
  tell_unused_wrappers(
      [](const at::Tensor& tensor) { return is_unused_wrapper(*tensor.unsafeGetTensorImpl()->pyobj_slot()); });
}

}  // namespace

PythonReplica::PythonReplica(std::unique_ptr<PythonModule> source, const Group& group,
                             DistributedDataParallelOptions options)
    : PythonReplica([&] {
        PythonModule* kept = source.get();
        return std::pair(kept, std::make_unique<State>(std::move(source), group, std::move(options)));
      }()) {}

PythonReplica::PythonReplica(std::pair<PythonModule*, std::unique_ptr<State>> made)
    : Replica(std::move(made.second)), source_(made.first) {}

void PythonReplica::look() {
  (void)state_of(*this);
  GradientHook::restore_dropped();  // another thread than the main one may have dropped them
  source_->look();
}

void PythonReplica::expect(const std::vector<at::Tensor>& tensors) { state_of(*this).attached.expect(tensors); }

void bind_replica(py::module_& module) {
  bind_errors(module);
  bind_enums(module);
  bind_stats(module);
  py::class_<Group>(module, "Group")
      .def("rank", &Group::rank)
      .def("world_size", &Group::world_size)
      .def("is_open", &Group::is_open)
      .def(
          "close", [](const Group& group) { lockstep::close(group); }, Unlocked());
  module.def("make_group", &make_python_group, Unlocked());
  module.def("make_group_within", &make_group_within, Unlocked());
  module.def("check_same_timeout", &check_same_timeout, Unlocked());
  module.def(
      "make_single_group", [] { return make_group(nullptr, 0, 1, {}); }, Unlocked());
  py::class_<PythonGuard>(module, "Guard").def("end", &PythonGuard::end);

  py::class_<PythonReplica, std::shared_ptr<PythonReplica>>(module, "Replica")
      .def(py::init(&make_replica))
      .def("look", &PythonReplica::look)
      .def("expect", &PythonReplica::expect)
      .def("no_sync", [](PythonReplica& replica) { return PythonGuard(replica.no_sync()); })
      .def("accumulate", [](PythonReplica& replica, int n) { return PythonGuard(replica.accumulate(n)); })
      .def("step_complete", &PythonReplica::step_complete)
      .def("reduce_gradients", &PythonReplica::reduce_gradients, Unlocked())
      .def("skip_step", &PythonReplica::skip_step, Unlocked())
      .def("set_weight", &PythonReplica::set_weight, Unlocked())
      .def("join", &join, Unlocked())
      .def("broadcast_parameters", &PythonReplica::broadcast_parameters, Unlocked())
      .def("average_parameters", &PythonReplica::average_parameters, Unlocked())
      .def(
          "refresh", [](PythonReplica& replica) { replica.refresh(); }, Unlocked())
      .def("check_divergence", &PythonReplica::check_divergence, Unlocked())
      .def(
          "check_divergence_every",
          [](PythonReplica& replica, int every_n_steps, bool buffers_as_left) {
            replica.check_divergence_every(every_n_steps, {.buffers_as_left = buffers_as_left});
          },
          Unlocked())
      .def("clip_grad_norm", &PythonReplica::clip_grad_norm, Unlocked())
      .def("set_non_finite_policy", &PythonReplica::set_non_finite_policy, Unlocked())
      .def("skipped_steps", &PythonReplica::skipped_steps)
      .def("stats", &PythonReplica::stats)
      .def("set_rank_comparison", &PythonReplica::set_rank_comparison)
      .def("communication_seconds", &PythonReplica::communication_seconds)
      .def("bucket_parameters", &PythonReplica::bucket_parameters);
}

}  // namespace lockstep::python
