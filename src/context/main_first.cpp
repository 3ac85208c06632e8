#include <exception>

#include <ATen/ATen.h>

#include <lockstep/error.h>
#include <lockstep/rank_zero.h>

#include "base/error.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

/// A guard's only collective. Returns the highest rank that reports a failure, or -1.
int64_t meet(const Group& group, bool failed) {
  const at::Tensor word = at::full({1}, failed ? group.rank() : -1, at::kLong);
  const OperationLabel label("main_first()");
  group.all_reduce(word, ReduceOp::kMax);
  return word.item<int64_t>();
}

}  // namespace

MainFirst::MainFirst(const Context& context)
    : group_(context.group()), is_first_(context.local_rank() == 0), exceptions_(std::uncaught_exceptions()) {
  if (is_first_) return;
  const int64_t failed = meet(group_, false);
  if (failed >= 0) {
    const std::string text =
        "rank " + std::to_string(failed) +
        " failed in the scope of main_first(), which it enters before the others; see its output for the reason";
    note_error(RankFailure::kPeer, static_cast<int>(failed), text);
    throw Error(text);
  }
}

MainFirst::~MainFirst() noexcept(false) {
  if (!is_first_) return;
  if (std::uncaught_exceptions() == exceptions_) {
    meet(group_, false);
    return;
  }
  const bool noted = own_page().error_is_last();
  try {
    meet(group_, true);
  } catch (const std::exception&) {
    // The exception in flight is the one to report.
  }
  if (noted) own_page().renew_error();
}

namespace detail {

c10::IValue from_rank_zero(const Group& group, const std::function<c10::IValue()>& body) {
  c10::IValue answer;  // (value, "") or (None, the error)
  std::exception_ptr failure;
  const auto note = [&](const char* text) {
    failure = std::current_exception();
    answer = c10::ivalue::Tuple::create(c10::IValue(), std::string(*text != '\0' ? text : "an unknown failure"));
  };
  if (group.rank() == 0) {
    try {
      answer = c10::ivalue::Tuple::create(body(), std::string());
    } catch (const c10::Error& error) {
      note(error.what_without_backtrace());
    } catch (const std::exception& error) {
      note(error.what());
    }
  }
  answer = group.broadcast_object(answer);
  if (failure != nullptr) rethrow(failure);
  const auto& elements = answer.toTupleRef().elements();
  const std::string& problem = elements[1].toStringRef();
  if (!problem.empty()) {
    const std::string text = "rank 0 failed in the function that it runs for all ranks: " + problem;
    note_error(RankFailure::kPeer, -1, text);  // rank 0 of the group, whose number at the launcher may differ
    throw Error(text);
  }
  return elements[0];
}

}  // namespace detail
}  // namespace lockstep
