#pragma once

#include <lockstep/cxx20.h>

#include <memory>
#include <type_traits>

namespace torch::nn {
class Module;
}

/// For a static_assert.
#define LOCKSTEP_BARE_POINTER                                                                               \
  "a bare pointer does not say who keeps the module: give the object itself, *pointer, which must outlive " \
  "what is made of it, a std::shared_ptr<Net>, or a holder declared by TORCH_MODULE(Net)"
#define LOCKSTEP_MODULE_ON_STACK                                                                         \
  "this keeps the module alive, so it cannot be an object on the stack or a bare pointer: make it with " \
  "std::make_shared<Net>(), or declare it with TORCH_MODULE(Net) and construct that"

namespace lockstep::detail {

/// An nn::Module itself, as in `Net model;`, or a bare pointer to one, instead of a std::shared_ptr or a module holder.
template <typename Module>
concept ModuleOnStack = std::is_class_v<std::remove_pointer_t<Module>> &&
    std::is_base_of_v<torch::nn::Module, std::remove_pointer_t<Module>>;

template <typename Module>
concept PointerToModule = ModuleOnStack<Module> && std::is_pointer_v<Module>;

/// The type of an argument `Module&&`: an nn::Module itself or, for borrowed() to refuse, a bare pointer.
template <typename Argument>
concept ModuleItself = (std::is_lvalue_reference_v<Argument> && ModuleOnStack<std::remove_reference_t<Argument>>) ||
                       PointerToModule<std::remove_cvref_t<Argument>>;

/// A pointer that does not keep the module alive: its owner does.
template <typename Module>
std::shared_ptr<Module> borrowed(Module& module) {
  return std::shared_ptr<Module>(std::shared_ptr<void>(), &module);
}

/// Explains in one sentence how to pass such a module.
template <typename Base, PointerToModule Pointer>
std::shared_ptr<Base> borrowed(Pointer) {
  static_assert(!PointerToModule<Pointer>, LOCKSTEP_BARE_POINTER);
  return nullptr;
}

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
