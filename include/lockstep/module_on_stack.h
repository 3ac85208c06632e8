#pragma once

#include <lockstep/cxx20.h>

#include <type_traits>

namespace torch::nn {
class Module;
}

/// For a static_assert.
#define LOCKSTEP_MODULE_ON_STACK                                                                             \
  "Lockstep keeps the module alive, so it cannot be an object on the stack or a bare pointer: make it with " \
  "std::make_shared<Net>(), or declare it with TORCH_MODULE(Net) and construct that"

namespace lockstep::detail {

/// An nn::Module itself, as in `Net model;`, or a bare pointer to one, instead of a std::shared_ptr or a module holder.
template <typename Module>
concept ModuleOnStack = std::is_class_v<std::remove_pointer_t<Module>> &&
    std::is_base_of_v<torch::nn::Module, std::remove_pointer_t<Module>>;

/// Returns a holder's shared pointer, null if the holder is empty, and any other argument unchanged.
template <typename Module>
auto pointer_of(const Module& module) {
  if constexpr (requires { module.ptr(); }) {
    using Pointer = std::remove_cvref_t<decltype(module.ptr())>;
    return module.is_empty() ? Pointer() : Pointer(module.ptr());
  } else {
    return module;
  }
}

}  // namespace lockstep::detail
