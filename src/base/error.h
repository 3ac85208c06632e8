#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include <lockstep/error.h>

namespace lockstep {

/// The reason why a rank could not continue, as far as the rank itself knows.
enum class RankFailure : uint8_t {
  kNone,
  kOwn,       ///< an exception or error of its own
  kPeer,      ///< another rank has ended or left, or has ended the group
  kMismatch,  ///< its collective and another rank's do not match
  kMissing,   ///< another rank did not arrive in time
  kDiverged,  ///< the replicas differ, or a value is not finite: training must not continue
  kStorage,   ///< a file or folder cannot be written
  kInput,     ///< data or a checkpoint is missing, damaged or of the wrong kind
  kLimit,     ///< the system has no more memory, descriptors or processes
};

/// Records, on this rank's page, the error with which the rank is about to fail, for the launcher. `peer` is the rank
/// that caused it, or -1. Never throws. The page belongs to a higher layer: the definition is in
/// rank_page/rank_board.cpp.
void note_error(RankFailure kind, int peer, std::string_view text);

/// An Error whose kind the launcher reports if it ends this rank. The constructor records it on the rank's page
/// (RankPage::note_error). The launcher also reports the kind if the program catches the error and returns 1, but not
/// if the program continues.
class NotedError : public Error {
 public:
  NotedError(RankFailure kind, const std::string& text);
  /// Records the error again, for a rethrow after other work.
  void note() const;

 private:
  RankFailure kind_;
};

/// A file or folder cannot be written.
struct StorageError : NotedError {
  explicit StorageError(const std::string& text) : NotedError(RankFailure::kStorage, text) {}
};
/// A file is missing, damaged or of the wrong kind.
struct RefusedInput : NotedError {
  explicit RefusedInput(const std::string& text) : NotedError(RankFailure::kInput, text) {}
};
/// The system has no more memory, descriptors or processes.
struct LimitError : NotedError {
  explicit LimitError(const std::string& text) : NotedError(RankFailure::kLimit, text) {}
};

/// std::rethrow_exception for an exception caught on another thread or earlier. Records a NotedError again.
[[noreturn]] void rethrow(const std::exception_ptr& exception);

/// "<what>: <text of errno>".
std::string text_of_errno(const std::string& what);

/// Throws ErrorType(text_of_errno(what)).
template <typename ErrorType = Error>
[[noreturn]] void throw_errno(const std::string& what) {
  throw ErrorType(text_of_errno(what));
}

}  // namespace lockstep
