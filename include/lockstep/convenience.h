#pragma once

#include <concepts>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <lockstep/context.h>
#include <lockstep/group.h>
#include <lockstep/named_tensors.h>

namespace torch {
namespace nn {
class Module;
}
namespace jit {
struct Module;
}
}  // namespace torch

namespace lockstep {

/// The device of this rank: with CUDA the one whose index is the local rank (modulo the devices this process sees, so
/// that ranks share where there are fewer), else the CPU. The local rank is that of the process's Context; before there
/// is one, what the launcher says. Throws Error if it is not known yet. Does not communicate.
at::Device device();

/// Says that this rank goes on with what the others wait for: in long work of one rank in which it mostly waits itself,
/// such as a download or a slow file system, call it as the work goes on (not from a thread of its own, which would
/// beat beside a hang). `lockstep run` ends ranks of which none computes, communicates or calls this for
/// `--hang-timeout`; a rank that computes need not call it. The others' wait is still bounded by
/// ContextOptions::collective_timeout. Costs nanoseconds, does not communicate; without such a launcher it does
/// nothing. From any thread, with or without a Context.
void heartbeat();

/// Calls `body` on rank 0 alone and returns there what it returned (nothing, if that is void); elsewhere nullopt. Does
/// not communicate: the other ranks go on at once.
template <std::invocable Body>
auto rank_zero_only(const Group& group, Body&& body) {
  using Result = std::invoke_result_t<Body>;
  if constexpr (std::is_void_v<Result>) {
    if (group.rank() == 0) std::forward<Body>(body)();
  } else {
    return group.rank() == 0 ? std::optional<Result>(std::forward<Body>(body)()) : std::nullopt;
  }
}

namespace detail {
c10::IValue from_rank_zero(const Group& group, const std::function<c10::IValue()>& body);
}  // namespace detail

/// Calls `body` on rank 0 alone and returns its result on every rank: whatever an IValue holds, such as a number, a
/// text, a list of them or a tensor on the CPU. A collective: every rank calls it and waits for rank 0, at most the
/// group's timeout. What `body` throws is thrown on rank 0; the others throw Error with its text.
template <std::invocable Body>
auto from_rank_zero(const Group& group, Body&& body) -> std::invoke_result_t<Body> {
  using Result = std::invoke_result_t<Body>;
  if constexpr (std::is_void_v<Result>) {
    detail::from_rank_zero(group, [&] {
      body();
      return c10::IValue();
    });
  } else {
    return detail::from_rank_zero(group, [&] { return c10::IValue(body()); }).template to<Result>();
  }
}

/// Lets rank 0 of each machine through its scope first, and the others of the machine after it: for what one of them
/// should do for all, such as unpacking a file that the others then find.
///
///     {
///       const auto order = lockstep::main_first(context);
///       if (!std::filesystem::exists(file)) download(file);
///     }
///
/// A collective: every rank makes one; inside the scope is no other. The others wait in the constructor, at most the
/// context's collective_timeout: raise that for a scope that takes longer, and call heartbeat() in one that mostly
/// waits (for a download, say), which `lockstep run` may else take for a hang. If an exception leaves the scope of a
/// machine's rank 0, no other rank enters: their constructors throw Error that names it.
class MainFirst {
 public:
  explicit MainFirst(const Context& context);
  /// On a machine's rank 0 lets the others go. Throws Error if they are gone, unless an exception is under way.
  ~MainFirst() noexcept(false);
  MainFirst(const MainFirst&) = delete;
  MainFirst& operator=(const MainFirst&) = delete;

 private:
  const Group group_;
  const bool is_first_;
  const int exceptions_;  ///< under way when this was made
};
[[nodiscard]] inline MainFirst main_first(const Context& context) { return MainFirst(context); }

/// Throws the same Error on all ranks unless every tensor has the same name, shape, dtype and bits on all of them; it
/// names the first tensor that has not, and the ranks that differ from most. Bits: NaN equals itself, 0 is not -0. An
/// undefined tensor, such as a gradient, equals an undefined one. A collective: every rank calls it. It sends names,
/// shapes and hashes, never the elements.
void assert_equal_across_ranks(const Group& group, const NamedTensors& tensors);
/// The same for one tensor; `name` is for the message.
void assert_equal_across_ranks(const Group& group, const std::string& name, const at::Tensor& tensor);
/// The same for all parameters and buffers.
void assert_equal_across_ranks(const Group& group, const torch::nn::Module& module);
void assert_equal_across_ranks(const Group& group, const torch::jit::Module& module);

}  // namespace lockstep
