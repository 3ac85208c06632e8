#pragma once

#include <exception>
#include <string>

#include <lockstep/error.h>

#include "base/rank_page.h"

namespace lockstep {

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
