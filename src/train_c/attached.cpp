#include "train_c/attached.h"

#include <string>
#include <utility>

#include <ATen/core/Tensor.h>

#include <lockstep/named_tensors.h>

#include "train_c/arrays.h"
#include "train_c/guarded.h"

namespace lockstep::train_c {
namespace {

constexpr int64_t kMostParameters = 1 << 24;

NamedTensors named(const char* function, void* const* parameters, const char* const* names, int64_t count) {
  if (parameters == nullptr) refuse(function, "parameters is null");
  if (count < 1 || count > kMostParameters)
    refuse(function, "count is " + std::to_string(count) + "; give 1 to " + std::to_string(kMostParameters));
  NamedTensors result;
  for (int64_t i = 0; i < count; ++i) {
    const std::string place = "parameters[" + std::to_string(i) + "]";
    if (parameters[i] == nullptr) refuse(function, place + " is null; give pointers to at::Tensor");
    const auto& tensor = *static_cast<const at::Tensor*>(parameters[i]);
    if (!tensor.defined()) refuse(function, place + " is an undefined tensor");
    if (!tensor.requires_grad() || !tensor.is_leaf())
      refuse(function, place + " is " + text_of(tensor) + ", not a leaf that requires a gradient; give parameters");
    if (names != nullptr && names[i] == nullptr) refuse(function, "names[" + std::to_string(i) + "] is null");
    result.emplace_back(names == nullptr ? "parameter " + std::to_string(i) : names[i], tensor);
  }
  return result;
}

std::string settings_of(const NamedTensors& parameters, int32_t when) {
  std::string lines = "when " + std::to_string(when) + "\n";
  for (const auto& [name, tensor] : parameters) lines += name + " " + text_of(tensor) + "\n";
  return lines;
}

std::string call_of(const char* function, const Attached& attached) {
  return std::string(function) + " of replica " + std::to_string(attached.number);
}

}  // namespace

Handles<Attached, lockstep_train_replica>& replicas() {
  static auto* const all = new Handles<Attached, lockstep_train_replica>("replica");
  return *all;
}

}  // namespace lockstep::train_c

using namespace lockstep::train_c;

lockstep_status lockstep_train_attach(lockstep_train_world* handle, void* const* parameters, const char* const* names,
                                      int64_t count, int32_t when, lockstep_train_replica** replica) {
  return guarded(LOCKSTEP_RANK_GONE, [&] {
    constexpr const char* kName = "lockstep_train_attach";
    const std::shared_ptr<World> world = find_on_all(kName, worlds(), handle);
    const Call call(kName, *world);
    lockstep::NamedTensors tensors;
    agree(world->all, {.call = kName}, [&](Report& report) {
      if (replica == nullptr) refuse(kName, "replica is null; give a pointer for the handle");
      *replica = nullptr;
      if (when != LOCKSTEP_TRAIN_IN_BACKWARD && when != LOCKSTEP_TRAIN_WHEN_CALLED)
        refuse(kName,
               "when is " + std::to_string(when) + "; give LOCKSTEP_TRAIN_IN_BACKWARD or LOCKSTEP_TRAIN_WHEN_CALLED");
      tensors = named(kName, parameters, names, count);
      report.settings = settings_of(tensors, when);
    });
    auto attached = std::make_shared<Attached>(Attached{.world = world, .number = ++world->made});
    attached->replica = std::make_unique<lockstep::Replica>(std::move(tensors), world->context.group());
    if (when == LOCKSTEP_TRAIN_WHEN_CALLED) attached->when_called.emplace(attached->replica->no_sync());
    *replica = replicas().add(std::move(attached));
  });
}

lockstep_status lockstep_train_average(lockstep_train_replica* replica) {
  return guarded(LOCKSTEP_RANK_GONE, [&] {
    constexpr const char* kName = "lockstep_train_average";
    const std::shared_ptr<Attached> attached = find_on_all(kName, replicas(), replica);
    const Call call(kName, *attached->world);
    agree(attached->world->all, {.call = call_of(kName, *attached)}, [&](Report&) {
      if (!attached->when_called)
        refuse(kName, "this replica averages in backward; to call this, attach with LOCKSTEP_TRAIN_WHEN_CALLED");
    });
    attached->replica->reduce_gradients();
  });
}

lockstep_status lockstep_train_check_equal(lockstep_train_replica* replica) {
  return guarded(LOCKSTEP_RANK_GONE, [&] {
    constexpr const char* kName = "lockstep_train_check_equal";
    const std::shared_ptr<Attached> attached = find_on_all(kName, replicas(), replica);
    const Call call(kName, *attached->world);
    agree(attached->world->all, {.call = call_of(kName, *attached)}, [](Report&) {});
    attached->replica->check_divergence();
  });
}

lockstep_status lockstep_train_detach(lockstep_train_replica* replica) {
  return guarded(LOCKSTEP_INVALID_ARGUMENT, [&] {
    if (replica == nullptr) return;
    std::shared_ptr<Attached> attached = replicas().find("lockstep_train_detach", replica);
    const std::shared_ptr<World> world = attached->world;
    const Call call("lockstep_train_detach", *world);
    replicas().remove(replica);
    attached = nullptr;  // during the call
  });
}
