#include <lockstep/running_statistics.h>

#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/accumulate.h>

#include <lockstep/error.h>

#include "base/hash.h"
#include "base/rank_names.h"
#include "base/state_in_use.h"
#include "base/text.h"
#include "rank_page/operation_label.h"

namespace lockstep {
namespace {

/// The number of samples, their mean, and the sum of squared differences from it.
struct Moments {
  double count = 0;
  at::Tensor mean, squares;

  /// samples: [n, features] in double.
  static Moments of(const at::Tensor& samples) {
    if (samples.size(0) == 0)
      return {0, at::zeros({samples.size(1)}, at::kDouble), at::zeros({samples.size(1)}, at::kDouble)};
    const at::Tensor mean = samples.mean(0);
    return {static_cast<double>(samples.size(0)), mean, (samples - mean).square().sum(0)};
  }
  void add(const Moments& other) {
    if (other.count == 0) return;
    const double all = count + other.count;
    const at::Tensor apart = other.mean - mean;
    mean = mean + apart * (other.count / all);
    squares = squares + other.squares + apart.square() * (count * other.count / all);
    count = all;
  }
};

/// The words that a rank sends ahead of its moments.
enum Word : int64_t {
  kCount,  ///< of its samples, or a Trouble
  kCall,   ///< hash of the function and the shape of a sample
  kEpsilon,
  kLimit,
  kNumber,  ///< RunningStatistics: which one of this shape this process has made
  kHeld,    ///< the samples seen so far
  kState,   ///< hash of the mean and the squares so far
  kWords
};

/// A defect of a rank's samples.
enum Trouble : int64_t {
  kNone = 0,
  kUndefined = -1,
  kOtherShape = -2,
  kOtherKind = -3,
  kNotFinite = -4,
  kTooLarge = -5,
  kBrokenState = -6
};

struct TroubleText {
  Trouble trouble;
  const char* text;
};
constexpr TroubleText kTroubles[] = {{kUndefined, " gave an undefined tensor"},
                                     {kOtherShape, " gave samples of another shape"},
                                     {kOtherKind, " gave a tensor that is complex, sparse, quantized or without data"},
                                     {kNotFinite, " gave infinity or NaN"},
                                     {kTooLarge, " gave numbers beyond 1e140, whose squares a double cannot hold"},
                                     {kBrokenState, " holds a state that no samples give"}};

/// The square of a difference of two such numbers, times 2^63 samples, is finite.
constexpr double kLargest = 1e140;

Trouble trouble_of_kind(const at::Tensor& tensor) {
  if (!tensor.defined()) return kUndefined;
  const bool has_numbers =
      tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_meta() && !tensor.is_complex();
  return has_numbers ? kNone : kOtherKind;
}

Trouble trouble_of_values(const at::Tensor& samples) {
  if (!at::isfinite(samples).all().item<bool>()) return kNotFinite;
  return (samples.abs() > kLargest).any().item<bool>() ? kTooLarge : kNone;
}

/// Whether samples can have such moments.
bool is_state_of_samples(const at::Tensor& count, const at::Tensor& mean, const at::Tensor& squares) {
  return count.item<int64_t>() >= 0 && at::isfinite(mean).all().item<bool>() &&
         at::isfinite(squares).all().item<bool>() && squares.ge(0).all().item<bool>();
}

/// The high bits of a hash, as many as a double holds.
double exact(const Hash& hash) { return static_cast<double>(hash.value() >> 12); }

/// The values that must be equal on every rank.
struct Call {
  std::string name;  ///< of the function, and the shape of a sample
  double epsilon = 0, limit = 0;
  int64_t number = 0;
  Moments held = {};

  at::Tensor words(double count) const {
    const at::Tensor words = at::empty({kWords}, at::kDouble);
    auto* word = words.data_ptr<double>();
    Hash call, state;
    call.add(name);
    for (const at::Tensor& one : {held.mean, held.squares}) {
      if (!one.defined()) continue;
      const at::Tensor numbers = one.contiguous();
      state.add(numbers.data_ptr(), numbers.nbytes());
    }
    word[kCount] = count;
    word[kCall] = exact(call);
    word[kEpsilon] = epsilon;
    word[kLimit] = limit;
    word[kNumber] = static_cast<double>(number);
    word[kHeld] = held.count;
    word[kState] = exact(state);
    return words;
  }
};

/// Throws on all ranks, from the rows that all have, unless they make the same call of the same object.
class CallAgreement {
 public:
  CallAgreement(std::string name, at::Tensor rows, int rank)
      : name_(std::move(name)), rows_(std::move(rows)), rank_(rank) {}

  void check() const {
    // Each rank's text begins with its own call.
    if (const auto others = that_differ(kCall, rank_); !others.empty())
      throw Error(name_ + ": " + rank_names(others) +
                  " called it for samples of another shape, or called the other one of standardize() and "
                  "RunningStatistics::update(). Make the same calls on every rank, in the same order");
    const std::string options = ". Give the same number on every rank";
    refuse_different(kEpsilon, "the ranks have different values of epsilon: ", "with ", options);
    refuse_different(kLimit, "the ranks have different limits: ", "with ", options);
    refuse_different(kNumber,
                     "the ranks update different objects, numbered in the order in which each rank made those of this "
                     "shape: ",
                     "number ", ". Make and update them in the same order on every rank");
    const std::string load = ". Load the same state on every rank, and update with the same group from the start";
    refuse_different(kHeld, "the ranks hold statistics of different numbers of samples: ", "of ", load);
    if (const auto others = that_differ(kState, 0); !others.empty())
      throw Error(name_ + ": " + rank_names(others) + " and rank 0 hold different means or variances" + load);
  }
  void check_samples() const {
    for (const TroubleText& one : kTroubles) {
      std::vector<int> ranks;
      for (int rank = 0; rank < rows_.size(0); ++rank)
        if (word_of(rank, kCount) == static_cast<double>(one.trouble)) ranks.push_back(rank);
      if (!ranks.empty()) throw Error(name_ + ": " + rank_names(ranks) + one.text);
    }
  }

 private:
  double word_of(int rank, Word word) const { return rows_.const_data_ptr<double>()[rank * rows_.size(1) + word]; }
  std::string text_of(int rank, Word word) const {
    const double value = word_of(rank, word);
    constexpr double kExact = 1LL << 53;
    const bool whole = std::abs(value) < kExact && value == std::trunc(value);
    return whole ? decimal(static_cast<int64_t>(value)) : decimal(value);
  }
  std::vector<int> that_differ(Word word, int from) const {
    const double expected = word_of(from, word);
    std::vector<int> ranks;
    for (int rank = 0; rank < rows_.size(0); ++rank) {
      const double value = word_of(rank, word);
      if (value != expected && !(std::isnan(value) && std::isnan(expected))) ranks.push_back(rank);
    }
    return ranks;
  }
  void refuse_different(Word word, const std::string& what, const std::string& before,
                        const std::string& advice) const {
    if (that_differ(word, 0).empty()) return;
    std::vector<std::string> values;
    for (int rank = 0; rank < rows_.size(0); ++rank) values.push_back(text_of(rank, word));
    throw Error(name_ + ": " + what + ranks_of_each(values, before) + advice);
  }

  const std::string name_;
  const at::Tensor rows_;
  const int rank_;
};

/// The moments of all ranks' samples, [n, features] in double, or undefined if this rank has a `trouble`. Throws on all
/// ranks if one has a trouble, or if their calls differ.
Moments of_all_ranks(const at::Tensor& samples, Trouble trouble, int64_t features, const Group& group,
                     const Call& call) {
  if (trouble == kNone) trouble = trouble_of_values(samples);
  const at::Tensor none = at::zeros({0, features}, at::kDouble);
  const Moments own = Moments::of(trouble == kNone ? samples : none);
  const double count = trouble == kNone ? own.count : static_cast<double>(trouble);
  const at::Tensor rows = group.all_gather(at::cat({call.words(count), own.mean, own.squares}));
  const CallAgreement agreement(call.name, rows, group.rank());
  agreement.check();
  agreement.check_samples();
  Moments sum = Moments::of(none);
  for (int64_t rank = 0; rank < rows.size(0); ++rank) {
    const at::Tensor row = rows[rank];
    sum.add({row[kCount].item<double>(), row.narrow(0, kWords, features), row.narrow(0, kWords + features, features)});
  }
  return sum;
}

std::string shape_text(at::IntArrayRef shape, const std::string& first) {
  std::string text = first;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

/// Counts the RunningStatistics of a shape that this process makes, from 1.
int64_t next_number(const std::vector<int64_t>& shape) {
  static std::mutex mutex;
  static std::map<std::vector<int64_t>, int64_t> made;
  const std::scoped_lock lock(mutex);
  return ++made[shape];
}

/// Integers as double, in which differences are exact; floating point as it is.
at::Tensor to_floating(const at::Tensor& x) { return x.is_floating_point() ? x : x.to(at::kDouble); }

at::ScalarType result_type(const at::Tensor& x) {
  return x.is_floating_point() ? x.scalar_type() : c10::get_default_dtype_as_scalartype();
}

void check_input(const char* function, const at::Tensor& x, at::IntArrayRef shape) {
  const std::string begin = std::string("RunningStatistics::") + function + "(): ";
  TORCH_CHECK(trouble_of_kind(x) == kNone, begin,
              "the tensor is undefined, complex, sparse, quantized or without data");
  const auto dimensions = static_cast<int64_t>(shape.size());
  TORCH_CHECK(x.dim() >= dimensions && x.sizes().slice(static_cast<size_t>(x.dim() - dimensions)) == shape, begin,
              "the tensor has the shape ", shape_text(x.sizes(), ""), ", which must be ", shape_text(shape, "..."));
}

void check_number(const char* of, const char* name, double value) {
  TORCH_CHECK(std::isfinite(value) && value >= 0, of, ": ", name, " is ", value, "; it must be finite and at least 0");
}

}  // namespace

RunningStatisticsImpl::RunningStatisticsImpl(std::vector<int64_t> shape, RunningStatisticsOptions options)
    : shape_(std::move(shape)), number_(next_number(shape_)), options_(options) {
  check_number("RunningStatistics", "epsilon", options_.epsilon);
  check_number("RunningStatistics", "limit", options_.limit);
  reset();
}

void RunningStatisticsImpl::reset() {
  if (named_buffers(/*recurse=*/false).contains("mean")) {
    const at::NoGradGuard no_grad;
    for (at::Tensor* buffer : {&mean_, &squares_, &count_}) buffer->zero_();
    return;
  }
  mean_ = register_buffer("mean", at::zeros(shape_, at::kDouble));
  squares_ = register_buffer("squares", at::zeros(shape_, at::kDouble));
  count_ = register_buffer("count", at::zeros({}, at::kLong));
}

void RunningStatisticsImpl::to(torch::Device device, torch::Dtype /*dtype*/, bool non_blocking) {
  to(device, non_blocking);
}

void RunningStatisticsImpl::to(torch::Dtype /*dtype*/, bool /*non_blocking*/) {}

void RunningStatisticsImpl::to(torch::Device device, bool non_blocking) { Module::to(device, non_blocking); }

void RunningStatisticsImpl::check_held(const char* function) const {
  const uint64_t versions = 1 + static_cast<uint64_t>(mean_._version()) + static_cast<uint64_t>(squares_._version()) +
                            static_cast<uint64_t>(count_._version());
  if (checked_ == versions) return;
  TORCH_CHECK(is_state_of_samples(count_, mean_, squares_), "RunningStatistics::", function,
              "(): it holds a state that no samples give: a negative count or variance, infinity or NaN; load one that "
              "was saved, or call reset() on every rank");
  checked_ = versions;
}

void RunningStatisticsImpl::update(const at::Tensor& samples, const Group& group) {
  const at::NoGradGuard no_grad;
  const OperationLabel label("RunningStatistics::update()");
  const int64_t features = c10::multiply_integers(shape_);
  const auto held = [&](const at::Tensor& buffer) { return buffer.to(at::kCPU, at::kDouble).reshape({features}); };
  Moments sum{static_cast<double>(count()), held(mean_), held(squares_)};
  const bool fits = samples.defined() && samples.dim() == static_cast<int64_t>(shape_.size()) + 1 &&
                    samples.sizes().slice(1) == shape_;
  const Trouble trouble = !is_state_of_samples(count_, mean_, squares_) ? kBrokenState
                          : fits                                        ? trouble_of_kind(samples)
                                                                        : kOtherShape;
  const at::Tensor rows =
      trouble == kNone ? samples.to(at::kCPU, at::kDouble).reshape({samples.size(0), features}) : at::Tensor();
  sum.add(of_all_ranks(rows, trouble, features, group,
                       {.name = "RunningStatistics::update(), of " + shape_text(shape_, "n"),
                        .epsilon = options_.epsilon,
                        .limit = options_.limit,
                        .number = number_,
                        .held = sum}));
  mean_.copy_(sum.mean.view(shape_));
  squares_.copy_(sum.squares.view(shape_));
  count_.fill_(static_cast<int64_t>(sum.count));
  note_in_use({.object = static_cast<const torch::nn::Module*>(this),
               .life = weak_from_this(),
               .name = "a RunningStatistics that the training updates",
               .line = "checkpointer.add(\"statistics\", *statistics)"});
}

int64_t RunningStatisticsImpl::count() const { return count_.item<int64_t>(); }

at::Tensor RunningStatisticsImpl::variance() const {
  const int64_t samples = count();
  return samples == 0 ? at::ones_like(squares_) : squares_ / static_cast<double>(samples);
}

at::Tensor RunningStatisticsImpl::forward(const at::Tensor& x) {
  check_input("forward", x, shape_);
  check_held("forward");
  const at::Tensor normal =
      (to_floating(x) - mean_.to(x.device())) / (variance() + options_.epsilon).sqrt().to(x.device());
  return (options_.limit > 0 ? normal.clamp(-options_.limit, options_.limit) : normal).to(result_type(x));
}

at::Tensor RunningStatisticsImpl::denormalized(const at::Tensor& x) const {
  check_input("denormalized", x, shape_);
  check_held("denormalized");
  const at::Tensor deviation = (variance() + options_.epsilon).sqrt().to(x.device());
  return (to_floating(x) * deviation + mean_.to(x.device())).to(result_type(x));
}

at::Tensor standardize(const at::Tensor& values, const Group& group, double epsilon) {
  const OperationLabel label("standardize()");
  const Trouble trouble = trouble_of_kind(values);
  const at::Tensor rows = trouble == kNone ? values.detach().to(at::kCPU, at::kDouble).reshape({-1, 1}) : at::Tensor();
  const Moments all = of_all_ranks(rows, trouble, 1, group, {.name = "standardize()", .epsilon = epsilon});
  check_number("standardize()", "epsilon", epsilon);  // all ranks' are the same
  const double deviation = all.count < 2 ? 0 : std::sqrt(all.squares.item<double>() / (all.count - 1));
  return ((to_floating(values) - all.mean.item<double>()) / (deviation + epsilon)).to(result_type(values));
}

}  // namespace lockstep
