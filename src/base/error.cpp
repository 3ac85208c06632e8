#include "base/error.h"

#include <cerrno>
#include <cstring>

namespace lockstep {

NotedError::NotedError(RankFailure kind, const std::string& text) : Error(text), kind_(kind) { note(); }

void NotedError::note() const { note_error(kind_, -1, what()); }

void rethrow(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const NotedError& error) {
    error.note();
    throw;
  }
}

std::string text_of_errno(const std::string& what) { return what + ": " + std::strerror(errno); }

}  // namespace lockstep
