#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "c/guarded.h"
#include "collectives/shm/reduce.h"
#include "collectives/shm/stream_copy.h"
#include "optim/kernels/step_constants.h"
#include "rank_page/rank_board.h"

// A step has two meetings. In the first, ranks tell each other what they are about to do and where their arrays lie, so
// nobody computes with the parameters any longer; after the second, everybody has all of them. In between each takes
// its slice of the mean, a block at a time while that is in the cache, and steps it.

namespace lockstep::c {
namespace {

using State = std::shared_ptr<GroupState>;
using optim::Algorithm;

constexpr size_t kBlock = 512;        ///< elements
constexpr size_t kSliceAligned = 64;  ///< elements: ranks write no cache line in common where arrays are page aligned
constexpr int kStates = 3;

/// What a rank gives: all but the arrays' places must be the same on all ranks.
struct Step {
  const char* function;
  Algorithm algorithm;
  optim::StepConstants constants;
  float* parameters;
  const float* gradients;
  std::array<float*, kStates> states;
  size_t count;
};

/// What ranks tell each other: bytes that are compared, and offsets in resident memory.
struct Announced {
  uint64_t count, algorithm;
  optim::StepConstants constants;
  uint64_t together;  ///< whether the parameters lie once for all ranks
  std::array<uint64_t, kStates> states;
  uint64_t parameters, gradients;
};
static_assert(sizeof(Announced) == 17 * sizeof(uint64_t), "there is no padding, so bytes may be compared");

double checked(const char* function, const char* name, double value, double end) {
  if (!std::isfinite(value) || value < 0 || value >= end)
    refuse(function, std::string(name) + " is " + std::to_string(value) + "; it must be a number of at least 0" +
                         (std::isfinite(end) ? ", and below " + std::to_string(static_cast<int>(end)) : ""));
  return value;
}

size_t checked_count(const char* function, int64_t count, int64_t step) {
  if (count < 0 || static_cast<uint64_t>(count) > shm::kMaxCount)
    refuse(function, "the count is " + std::to_string(count) + "; it must be 0 to " + std::to_string(shm::kMaxCount));
  if (step < 1) refuse(function, "the step is " + std::to_string(step) + "; the first one is 1");
  return static_cast<size_t>(count);
}

/// The array's offset in this rank's memory, or in rank 0's where it is together.
uint64_t place_of(const shm::Group& group, const void* array, HandedOut::Kind kind) {
  const auto* owner = group.memory_of(kind == HandedOut::Kind::kTogether ? 0 : group.rank(), 0);
  return static_cast<uint64_t>(static_cast<const std::byte*>(array) - owner);
}

HandedOut::Kind checked_array(const Step& step, GroupState& state, const char* role, const float* array, bool own,
                              bool together) {
  const std::string wanted = own && together ? "lockstep_allocate() or lockstep_allocate_together()"
                             : own           ? "lockstep_allocate()"
                                             : "lockstep_allocate_together()";
  if (array == nullptr) refuse(step.function, std::string("the ") + role + " array is null; take it from " + wanted);
  const auto kind = state.handed_out.holder_of(array, step.count * sizeof(float));
  if (!kind || (*kind == HandedOut::Kind::kOwn ? !own : !together))
    refuse(step.function, std::string("the ") + role + " array of " + std::to_string(step.count) +
                              " floats does not lie in memory from " + wanted +
                              " of this group, or that has been freed");
  return *kind;
}

void check_apart(const Step& step) {
  std::vector<const float*> arrays{step.parameters, step.gradients};
  for (int s = 0; s < optim::state_arrays(step.algorithm); ++s) arrays.push_back(step.states[static_cast<size_t>(s)]);
  std::sort(arrays.begin(), arrays.end());
  for (size_t i = 1; i < arrays.size(); ++i)
    if (static_cast<size_t>(arrays[i] - arrays[i - 1]) < step.count)
      refuse(step.function, "two of the arrays overlap; each needs memory of its own");
}

Announced announced(const Step& step, GroupState& state) {
  constexpr const char* kNames[2][kStates] = {{"momentum", "", ""}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}};
  const bool adam = step.algorithm >= Algorithm::kAdam;
  Announced mine{};
  mine.count = step.count;
  mine.algorithm = static_cast<uint64_t>(step.algorithm);
  mine.constants = step.constants;
  if (step.count == 0) return mine;
  const shm::Group& group = state.group;
  const auto parameters = checked_array(step, state, "parameters", step.parameters, /*own=*/true, /*together=*/true);
  const auto gradients = checked_array(step, state, "gradients", step.gradients, /*own=*/true, /*together=*/false);
  mine.together = parameters == HandedOut::Kind::kTogether ? 1 : 0;
  mine.parameters = place_of(group, step.parameters, parameters);
  mine.gradients = place_of(group, step.gradients, gradients);
  for (size_t s = 0; s < static_cast<size_t>(optim::state_arrays(step.algorithm)); ++s)
    mine.states[s] = place_of(
        group, step.states[s],
        checked_array(step, state, kNames[adam ? 1 : 0][s], step.states[s], /*own=*/false, /*together=*/true));
  check_apart(step);
  return mine;
}

std::string text_of(const char* what, uint64_t rank_has, uint64_t zero_has, size_t rank) {
  return "rank " + std::to_string(rank) + " steps " + std::to_string(rank_has) + what + ", and rank 0 " +
         std::to_string(zero_has);
}

/// What a rank is about to do otherwise than rank 0; empty if nothing.
std::string difference(const Announced& zero, const Announced& other, size_t rank) {
  const std::string who = "rank " + std::to_string(rank);
  if (other.count != zero.count) return text_of(" parameters", other.count, zero.count, rank);
  if (other.algorithm != zero.algorithm) return who + " steps by another formula than rank 0";
  if (std::memcmp(&other.constants, &zero.constants, sizeof zero.constants) != 0)
    return who + " has other options, or is at another step, than rank 0";
  if (other.together != zero.together)
    return "the parameters lie once for all ranks on rank " + std::to_string(zero.together != 0 ? 0 : rank) +
           ", and in a copy of its own on rank " + std::to_string(zero.together != 0 ? rank : 0);
  if (other.states != zero.states || (zero.together != 0 && other.parameters != zero.parameters))
    return who + " gives another place of the memory that is together than rank 0";
  return "";
}

void agree(const Step& step, const std::vector<Announced>& all) {
  for (size_t rank = 1; rank < all.size(); ++rank)
    if (const std::string text = difference(all[0], all[rank], rank); !text.empty())
      throw StatusError(LOCKSTEP_MISMATCH, std::string(step.function) + ": " + text +
                                               "; every rank gives the same, and nothing was stepped");
}

void step_slice(const Step& step, const shm::Group& group, const std::vector<Announced>& all) {
  const auto ranks = static_cast<size_t>(group.size()), rank = static_cast<size_t>(group.rank());
  const size_t slice = shm::Geometry::round_up((step.count + ranks - 1) / ranks, kSliceAligned);
  const size_t begin = std::min(step.count, rank * slice), end = std::min(step.count, begin + slice);
  const auto sum = shm::find_reduce(shm::DataType::kFloat32, shm::ReduceOp::kMean, group.size());
  const auto formula = optim::find_step(shm::DataType::kFloat32, step.algorithm);
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t count = std::min(kBlock, end - at), bytes = count * sizeof(float), offset = at * sizeof(float);
    alignas(64) float mean[kBlock];
    void* output = mean;
    std::array<const void*, shm::kMaxRanks> parts;
    for (size_t r = 0; r < ranks; ++r)
      parts[r] = group.memory_of(static_cast<int>(r), all[r].gradients) + offset;
    sum({&output, 1, parts.data(), group.size(), count, nullptr});
    optim::StepTask task{mean, step.parameters + at, nullptr, {}, count, &step.constants};
    for (size_t s = 0; s < static_cast<size_t>(optim::state_arrays(step.algorithm)); ++s)
      task.state[s] = step.states[s] + at;
    formula(task);
    for (size_t r = 0; all[0].together == 0 && r < ranks; ++r)
      if (r != rank)
        shm::stream_copy(group.memory_of(static_cast<int>(r), all[r].parameters) + offset,
                         reinterpret_cast<const std::byte*>(step.parameters + at), bytes);
  }
}

void run(const Step& step, const State& state) {
  shm::Group& group = state->group;
  const Announced mine = announced(step, *state);
  const uint64_t number = note_start(step.function, LOCKSTEP_FLOAT32, static_cast<int64_t>(step.count));
  std::vector<Announced> all(static_cast<size_t>(group.size()));
  group.run({.kind = shm::OperationKind::kAllGather,
             .type = shm::DataType::kUInt8,
             .called_as = shm::CalledAs::kShardedStep,
             .count = sizeof mine,
             .input = &mine,
             .output = all.data()},
            state->timeout);
  agree(step, all);
  step_slice(step, group, all);
  group.run({.kind = shm::OperationKind::kBarrier}, state->timeout);
  own_page().finish_operation(number);
}

}  // namespace
}  // namespace lockstep::c

using namespace lockstep::c;

lockstep_status lockstep_sharded_sgd(lockstep_group* group, const lockstep_sgd* options, int64_t step,
                                     float* parameters, const float* gradients, float* momentum, int64_t count) {
  const char* function = "lockstep_sharded_sgd";
  return guarded(function, group, [&](const State& state) {
    if (options == nullptr) refuse(function, "options is null; the learning rate stands there");
    const lockstep_sgd given = complete(function, "lockstep_sgd", *options);
    const auto number = [&](const char* name, double value) { return checked(function, name, value, HUGE_VAL); };
    if (given.nesterov != 0 && (given.momentum == 0 || given.dampening != 0))
      refuse(function, "nesterov needs a momentum, and no dampening");
    run({.function = function,
         .algorithm = given.momentum == 0   ? Algorithm::kSgd
                      : given.nesterov != 0 ? Algorithm::kSgdNesterov
                                            : Algorithm::kSgdMomentum,
         .constants = lockstep::optim::sgd_constants({.lr = number("lr", given.lr),
                                                      .momentum = number("momentum", given.momentum),
                                                      .dampening = number("dampening", given.dampening),
                                                      .weight_decay = number("weight_decay", given.weight_decay)},
                                                     step == 1),
         .parameters = parameters,
         .gradients = gradients,
         .states = {momentum},
         .count = checked_count(function, count, step)},
        state);
  });
}

lockstep_status lockstep_sharded_adam(lockstep_group* group, const lockstep_adam* options, int64_t step,
                                      float* parameters, const float* gradients, float* exp_avg, float* exp_avg_sq,
                                      float* max_exp_avg_sq, int64_t count) {
  const char* function = "lockstep_sharded_adam";
  return guarded(function, group, [&](const State& state) {
    if (options == nullptr) refuse(function, "options is null; the learning rate stands there");
    const lockstep_adam given = complete(function, "lockstep_adam", *options);
    const auto number = [&](const char* name, double value) { return checked(function, name, value, HUGE_VAL); };
    const size_t elements = checked_count(function, count, step);
    run({.function = function,
         .algorithm = max_exp_avg_sq == nullptr ? Algorithm::kAdam : Algorithm::kAdamAmsgrad,
         .constants = lockstep::optim::adam_constants(
             {.lr = number("lr", given.lr),
              .beta1 = checked(function, "beta1", given.beta1, 1),
              .beta2 = checked(function, "beta2", given.beta2, 1),
              .eps = number("eps", given.eps),
              .weight_decay = number("weight_decay", given.weight_decay)},
             static_cast<double>(step), given.decoupled_weight_decay != 0),
         .parameters = parameters,
         .gradients = gradients,
         .states = {exp_avg, exp_avg_sq, max_exp_avg_sq},
         .count = elements},
        state);
  });
}
