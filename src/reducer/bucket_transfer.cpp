#include "reducer/bucket_transfer.h"

#include <functional>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "collectives/work.h"

namespace lockstep {
namespace {

/// The text of the exception that `body` throws, or an empty string.
std::string failure_text(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return std::string("failed: ") + error.what_without_backtrace();
  } catch (const std::exception& error) {
    return std::string("failed: ") + error.what();
  } catch (...) {
    return "failed: it threw an object that is not a std::exception";
  }
  return "";
}

}  // namespace

void BucketTransfer::start(const Group& group, ReduceOp op) {
  at::NoGradGuard no_grad;
  bucket_.write_flags();
  work_ = group.all_reduce_async(bucket_.flat(), op);
  if (bucket_.has_tail_apart()) tail_work_ = group.all_reduce_async(bucket_.tail(), op);
  bucket_.let_go_of_gradients();
}

std::string BucketTransfer::start_through(CommHook& hook, const Group& group, ReduceOp op, int64_t index, bool last) {
  at::NoGradGuard no_grad;
  bucket_.write_flags();
  bucket_.clear_gaps();  // a hook that threw has not been waited for
  handed_ = bucket_.gradients().view(bucket_.gradients().sizes());
  GradientBucket bucket{index, last, op, handed_, {}};
  for (size_t i = 0; i < bucket_.size(); ++i) bucket.parts.push_back(bucket_.slot(i).gradient().detach());
  handed_parts_ = bucket.parts;
  std::string problem = failure_text([&] { finish_ = hook.reduce(bucket, group); });
  if (problem.empty() && !finish_)
    problem =
        "returned no function, so nothing would wait for the operation that it started and put the result into "
        "`gradients`; return [] {} if nothing is left to do";
  tail_waits_ = last;
  if (!last) tail_work_ = group.all_reduce_async(bucket_.tail(), op);
  bucket_.let_go_of_gradients();
  return problem;
}

void BucketTransfer::reduce_tail(const Group& group, ReduceOp op) {
  tail_waits_ = false;
  group.all_reduce(bucket_.tail(), op);
}

std::string BucketTransfer::wait(bool waits_for_device) {
  at::NoGradGuard no_grad;
  for (std::optional<Work>* const work : {&tail_work_, &work_})
    if (*work)
      waits_for_device ? std::exchange(*work, std::nullopt)->wait() : order_after(*std::exchange(*work, std::nullopt));
  const auto finish = std::exchange(finish_, nullptr);
  const at::Tensor handed = std::exchange(handed_, at::Tensor());
  const std::vector<at::Tensor> parts = std::exchange(handed_parts_, {});
  if (!finish) return "";
  const at::Tensor& gradients = bucket_.gradients();
  std::string problem = failure_text(finish);
  bucket_.clear_gaps();  // the norm of all gradients is taken over the whole
  if (problem.empty() && (handed.sizes() != gradients.sizes() || handed.const_data_ptr() != gradients.const_data_ptr()))
    problem = "has given `gradients` another size or other memory, which nothing reads; copy_() the result into it";
  for (size_t i = 0; i < parts.size() && problem.empty(); ++i)
    if (const at::Tensor& known = bucket_.slot(i).gradient();
        parts[i].sizes() != known.sizes() || parts[i].const_data_ptr() != known.const_data_ptr())
      problem =
          "has given a tensor of `parts` another size or other memory, which nothing reads; copy_() the result into it";
  return problem;
}

void BucketTransfer::abandon() {
  if (is_under_way()) wait(/*waits_for_device=*/true);
  tail_waits_ = false;
}

}  // namespace lockstep
