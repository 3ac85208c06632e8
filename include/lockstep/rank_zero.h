#pragma once

#include <concepts>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

#include <ATen/core/ivalue.h>

#include <lockstep/context.h>
#include <lockstep/group.h>

namespace lockstep {

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

}  // namespace lockstep
