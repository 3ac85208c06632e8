#include "fully_sharded/use_check.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "base/rank_names.h"
#include "rank_page/operation_label.h"

namespace lockstep::fully_sharded {
namespace {

constexpr int64_t kKinds = 3, kWords = 3;

}  // namespace

UseCheck::Sent UseCheck::send(const Group& group, size_t unit, What what) {
  const OperationLabel label("which unit is used");
  const auto units = static_cast<int64_t>(units_.size());
  const int64_t word = (uses_++ * units + static_cast<int64_t>(unit)) * kKinds + static_cast<int64_t>(what);
  const at::Tensor mine = at::tensor({word, static_cast<int64_t>(rank_), static_cast<int64_t>(model_)}, at::kLong);
  const at::Tensor all = at::empty({group.world_size(), kWords}, at::kLong);
  return {mine, all, group.all_gather_async(all, mine)};
}

void UseCheck::finish(const Sent& sent) const {
  sent.work.wait();
  const auto* words = sent.all.const_data_ptr<int64_t>();
  const int64_t mine = sent.mine.const_data_ptr<int64_t>()[0];
  for (int64_t i = 0; i < sent.all.size(0); ++i) {
    const int64_t* theirs = words + kWords * i;
    const std::string me = "rank " + std::to_string(rank_), other = "rank " + std::to_string(theirs[1]);
    if (theirs[2] != model_)
      throw Error("the ranks use different models: " + me + " its FullyShardedDataParallel number " +
                  std::to_string(model_) + ", " + other + " number " + std::to_string(theirs[2]) +
                  ", counted in the order in which they were made. Every rank must use them in the same order");
    if (theirs[0] != mine)
      throw Error("the ranks use different units of a FullyShardedDataParallel: " + me + " is at " + text_of(mine) +
                  ", " + other + " at " + text_of(theirs[0]) +
                  ". Every rank must call the same units in the same order");
  }
}

void UseCheck::finish_before(const Sent& sent, const Work& work) const {
  try {
    finish(sent);
  } catch (const std::exception&) {
    try {  // no transfer may write into memory that is being freed
      work.wait();
    } catch (const std::exception&) {  // a consequence of the first error
    }
    throw;
  }
  work.wait();
}

std::string UseCheck::text_of(int64_t word) const {
  const auto units = static_cast<int64_t>(units_.size());
  const std::string& unit = units_[static_cast<size_t>(word / kKinds % units)];
  const char* const what[] = {"the forward of `", "the backward of `", "the gradients of `"};
  return what[word % kKinds] + unit + "` (use " + std::to_string(word / kKinds / units) + ")";
}

}  // namespace lockstep::fully_sharded
