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

/// Calls `body` on rank 0 only and returns its result there (nothing if it is void); other ranks get nullopt. Does not
/// communicate: the other ranks continue at once.
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

/// Calls `body` on rank 0 only and returns its result on every rank. The result may be any IValue, such as a number, a
/// string, a list or a CPU tensor. A collective: every rank must call it, and waits for rank 0, at most for the group's
/// timeout. If `body` throws, rank 0 rethrows the exception, and the others throw an Error with its text.
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

/// Lets local rank 0 of each machine run the scope first, and the machine's other ranks after it. Use it for work that
/// one rank should do for all, such as unpacking a file that the others then find.
///
///     {
///       const auto order = lockstep::main_first(context);
///       if (!std::filesystem::exists(file)) download(file);
///     }
///
/// A collective: every rank must make one, without other collectives inside the scope. The others wait in the
/// constructor, at most for the context's collective_timeout. Raise it for a scope that takes longer, and call
/// heartbeat() in a scope that mostly waits (for a download, say), because `lockstep run` may otherwise take it for a
/// hang. If an exception leaves the scope of a machine's first rank, no other rank enters: their constructors throw an
/// Error that names it.
class MainFirst {
 public:
  explicit MainFirst(const Context& context);
  /// On a machine's first rank, releases the others. Throws Error if they are gone, unless an exception is being
  /// handled.
  ~MainFirst() noexcept(false);
  MainFirst(const MainFirst&) = delete;
  MainFirst& operator=(const MainFirst&) = delete;

 private:
  const Group group_;
  const bool is_first_;
  const int exceptions_;  ///< in flight when this was made
};
[[nodiscard]] inline MainFirst main_first(const Context& context) { return MainFirst(context); }

}  // namespace lockstep
