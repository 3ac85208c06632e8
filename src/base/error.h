#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include <lockstep/error.h>

namespace lockstep {

/// Why a rank could not go on, as the rank itself knows it.
enum class RankFailure : uint8_t {
  kNone,
  kOwn,       ///< an exception or error of its own
  kPeer,      ///< another rank had ended or left, or ended the group
  kMismatch,  ///< its collective and another rank's do not match
  kMissing,   ///< another rank did not come in time
  kDiverged,  ///< the replicas differ, or a value is not finite: training must not go on
  kStorage,   ///< a file or folder cannot be written
  kInput,     ///< data or a checkpoint is missing, damaged or of another kind
  kLimit,     ///< the system gives no more memory, descriptors or processes
};

/// Notes on this rank's page, where the launcher reads it, what the rank is about to fail by. `peer`: the rank it comes
/// from, or -1. Never throws. The page is a layer above: rank_page/rank_board.cpp has the definition.
void note_error(RankFailure kind, int peer, std::string_view text);

/// An Error whose kind the launcher is to know if this rank ends by it: the constructor notes it on the rank's page
/// (RankPage::note_error). So a program that catches it and returns 1 is told by its kind as well, and one that goes on
/// is not.
class NotedError : public Error {
 public:
  NotedError(RankFailure kind, const std::string& text);
  /// Anew, for one that is thrown on after something was done.
  void note() const;

 private:
  RankFailure kind_;
};

/// A file or folder cannot be written.
struct StorageError : NotedError {
  explicit StorageError(const std::string& text) : NotedError(RankFailure::kStorage, text) {}
};
/// A file is missing, damaged or of another kind.
struct RefusedInput : NotedError {
  explicit RefusedInput(const std::string& text) : NotedError(RankFailure::kInput, text) {}
};
/// The system gives no more memory, descriptors or processes.
struct LimitError : NotedError {
  explicit LimitError(const std::string& text) : NotedError(RankFailure::kLimit, text) {}
};

/// std::rethrow_exception, for one that was caught on another thread or before something was done: noted anew.
[[noreturn]] void rethrow(const std::exception_ptr& exception);

/// "<what>: <text of errno>".
std::string text_of_errno(const std::string& what);

/// Throws ErrorType(text_of_errno(what)).
template <typename ErrorType = Error>
[[noreturn]] void throw_errno(const std::string& what) {
  throw ErrorType(text_of_errno(what));
}

}  // namespace lockstep
