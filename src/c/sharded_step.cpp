#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "c/guarded.h"
#include "collectives/shm/kernels/reduce.h"
#include "collectives/shm/kernels/stream_copy.h"
#include "optim/kernels/step_constants.h"
#include "rank_page/rank_board.h"

// A step has two meetings. In the first, ranks exchange their intentions and the places of their arrays, so no rank
// computes with the parameters any longer; after the second, all ranks have all of them. In between each takes its
// slice of the mean, a block at a time while it is in the cache, and steps it.

namespace lockstep::c {
namespace {

using State = std::shared_ptr<GroupState>;
using optim::Algorithm;

constexpr size_t kBlock = 512;        ///< elements
constexpr size_t kSliceAligned = 64;  ///< elements: ranks write no common cache line if arrays are page-aligned
constexpr size_t kStates = 3, kLargestElement = 8;

/// A rank's arguments. All but the arrays' addresses must be equal on all ranks.
struct Step {
  const char* function;
  Algorithm algorithm;
  optim::StepConstants constants;
  std::byte* parameters;
  const std::byte* gradients;
  std::array<std::byte*, kStates> states;
  std::byte* master;  ///< null: none
  size_t count;
  shm::DataType type;  ///< of parameters and gradients

  size_t state_arrays() const { return static_cast<size_t>(optim::state_arrays(algorithm)); }
  shm::DataType state_type() const { return master == nullptr ? type : shm::DataType::kFloat32; }
  size_t bytes() const { return count * shm::element_bytes(type); }
  size_t state_bytes() const { return count * shm::element_bytes(state_type()); }
};

/// A rank's statement: bytes that are compared, and offsets in resident memory.
struct Announced {
  uint64_t count, type, algorithm;
  optim::StepConstants constants;
  uint64_t together;    ///< whether the parameters exist once for all ranks
  uint64_t has_master;  ///< whether float copies are kept
  uint64_t sample;      ///< of the values of parameters of which each rank has a copy
  std::array<uint64_t, kStates> states;
  uint64_t master;
  uint64_t parameters, gradients;
};
static_assert(sizeof(Announced) == 21 * sizeof(uint64_t), "there is no padding, so bytes may be compared");

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

shm::DataType checked_type(const char* function, lockstep_dtype dtype, const void* master) {
  if (dtype < LOCKSTEP_FLOAT32 || dtype > LOCKSTEP_BFLOAT16)
    refuse(function, "the dtype is " + std::to_string(dtype) +
                         "; parameters of LOCKSTEP_FLOAT32, FLOAT64, FLOAT16 and BFLOAT16 can be stepped");
  const auto type = static_cast<shm::DataType>(dtype);
  if (master != nullptr && dtype != LOCKSTEP_FLOAT16 && dtype != LOCKSTEP_BFLOAT16)
    refuse(function, std::string("a master is for parameters of float16 and bfloat16, and these are ") +
                         shm::name(type) + "; give null");
  return type;
}

/// The array's offset in this rank's memory, or in rank 0's if it exists once for all ranks.
uint64_t place_of(const shm::Communicator& group, const void* array, HandedOut::Kind kind) {
  const auto* owner = group.memory_of(kind == HandedOut::Kind::kTogether ? 0 : group.rank(), 0);
  return static_cast<uint64_t>(static_cast<const std::byte*>(array) - owner);
}

/// An array of step.count elements that a rank gives.
struct Array {
  const char* role;
  const std::byte* begin;
  shm::DataType type;
};

HandedOut::Kind checked_array(const Step& step, GroupState& state, const Array& array, bool own, bool together) {
  const std::string wanted = own && together ? "lockstep_allocate() or lockstep_allocate_together()"
                             : own           ? "lockstep_allocate()"
                                             : "lockstep_allocate_together()";
  if (array.begin == nullptr)
    refuse(step.function, std::string("the ") + array.role + " array is null; get its memory from " + wanted);
  const size_t bytes = step.count * shm::element_bytes(array.type);
  const auto kind = state.handed_out.holder_of(array.begin, bytes);
  if (!kind || (*kind == HandedOut::Kind::kOwn ? !own : !together))
    refuse(step.function, std::string("the ") + array.role + " array of " + std::to_string(step.count) + " " +
                              shm::name(array.type) + " (" + std::to_string(bytes) +
                              " bytes) does not lie in memory from " + wanted + " of this group, or it has been freed");
  return *kind;
}

void check_apart(const Step& step) {
  std::vector<std::pair<const std::byte*, size_t>> arrays{{step.parameters, step.bytes()},
                                                          {step.gradients, step.bytes()}};
  for (size_t s = 0; s < step.state_arrays(); ++s) arrays.emplace_back(step.states[s], step.state_bytes());
  if (step.master != nullptr) arrays.emplace_back(step.master, step.state_bytes());
  std::sort(arrays.begin(), arrays.end());
  for (size_t i = 1; i < arrays.size(); ++i)
    if (static_cast<size_t>(arrays[i].first - arrays[i - 1].first) < arrays[i - 1].second)
      refuse(step.function, "two of the arrays overlap; give each its own memory");
}

/// Samples of the parameters: copies that differ as a whole differ in them. No other code writes them now.
uint64_t sample_of(const Step& step) {
  constexpr size_t kPlaces = 16, kWord = sizeof(uint64_t);
  const size_t bytes = step.bytes(), piece = std::min(bytes, kWord);
  uint64_t hash = Hash::kStart;
  for (size_t i = 0; i < kPlaces; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, step.parameters + (bytes - piece) * i / (kPlaces - 1), piece);
    hash = Hash::mixed(hash, word);
  }
  return hash;
}

Announced announced(const Step& step, GroupState& state) {
  constexpr const char* kNames[2][kStates] = {{"momentum", "", ""}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}};
  const bool adam = step.algorithm >= Algorithm::kAdam;
  Announced mine{};
  mine.count = step.count;
  mine.type = static_cast<uint64_t>(step.type);
  mine.algorithm = static_cast<uint64_t>(step.algorithm);
  mine.constants = step.constants;
  mine.has_master = step.master != nullptr ? 1 : 0;
  if (step.count == 0) return mine;
  const shm::Communicator& group = state.group;
  const auto parameters =
      checked_array(step, state, {"parameters", step.parameters, step.type}, /*own=*/true, /*together=*/true);
  const auto gradients =
      checked_array(step, state, {"gradients", step.gradients, step.type}, /*own=*/true, /*together=*/false);
  mine.together = parameters == HandedOut::Kind::kTogether ? 1 : 0;
  mine.parameters = place_of(group, step.parameters, parameters);
  mine.gradients = place_of(group, step.gradients, gradients);
  const auto place_of_state = [&](const char* role, const std::byte* array) {
    return place_of(group, array,
                    checked_array(step, state, {role, array, step.state_type()}, /*own=*/false, /*together=*/true));
  };
  for (size_t s = 0; s < step.state_arrays(); ++s)
    mine.states[s] = place_of_state(kNames[adam ? 1 : 0][s], step.states[s]);
  if (step.master != nullptr) mine.master = place_of_state("master", step.master);
  check_apart(step);
  if (mine.together == 0) mine.sample = sample_of(step);
  return mine;
}

std::string text_of(const char* what, uint64_t rank_has, uint64_t zero_has, size_t rank) {
  return "rank " + std::to_string(rank) + " steps " + std::to_string(rank_has) + what + ", and rank 0 " +
         std::to_string(zero_has);
}

/// The difference between a rank's step and rank 0's; empty if none.
std::string difference(const Announced& zero, const Announced& other, size_t rank) {
  const std::string who = "rank " + std::to_string(rank);
  if (other.count != zero.count) return text_of(" parameters", other.count, zero.count, rank);
  if (other.type != zero.type)
    return who + " steps " + shm::name(static_cast<shm::DataType>(other.type)) + ", and rank 0 " +
           shm::name(static_cast<shm::DataType>(zero.type));
  if (other.has_master != zero.has_master)
    return "rank " + std::to_string(zero.has_master != 0 ? rank : 0) + " gives no master, and rank " +
           std::to_string(zero.has_master != 0 ? 0 : rank) + " does";
  if (other.algorithm != zero.algorithm) return who + " steps by another formula than rank 0";
  if (other.constants != zero.constants) return who + " has other options, or is at another step, than rank 0";
  if (other.together != zero.together)
    return "all ranks share the parameters on rank " + std::to_string(zero.together != 0 ? 0 : rank) +
           ", but each has its own copy on rank " + std::to_string(zero.together != 0 ? rank : 0);
  if (other.states != zero.states || other.master != zero.master ||
      (zero.together != 0 && other.parameters != zero.parameters))
    return who + " gives another part of the shared memory than rank 0";
  if (other.sample != zero.sample)
    return who +
           " has other values in its copy of the parameters than rank 0. Before the first step, set all copies to one "
           "rank's (lockstep_broadcast()); later, change them in the same way on every rank";
  return "";
}

void agree(const Step& step, const std::vector<Announced>& all) {
  for (size_t rank = 1; rank < all.size(); ++rank)
    if (const std::string text = difference(all[0], all[rank], rank); !text.empty())
      throw StatusError(LOCKSTEP_MISMATCH, std::string(step.function) + ": " + text +
                                               "; every rank must give the same. Nothing was stepped");
}

void step_slice(const Step& step, const shm::Communicator& group, const std::vector<Announced>& all) {
  const auto ranks = static_cast<size_t>(group.size()), rank = static_cast<size_t>(group.rank());
  const size_t slice = shm::Geometry::round_up((step.count + ranks - 1) / ranks, kSliceAligned);
  const size_t begin = std::min(step.count, rank * slice), end = std::min(step.count, begin + slice);
  const size_t element = shm::element_bytes(step.type), state_element = shm::element_bytes(step.state_type());
  const auto sum = shm::find_reduce(step.type, shm::ReduceOp::kMean, group.size());
  const auto formula = optim::find_step(step.type, step.algorithm, /*with_master=*/step.master != nullptr);
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t count = std::min(kBlock, end - at), bytes = count * element, offset = at * element;
    alignas(64) std::byte mean[kBlock * kLargestElement];
    void* output = mean;
    std::array<const void*, shm::kMaxRanks> parts;
    for (size_t r = 0; r < ranks; ++r) parts[r] = group.memory_of(static_cast<int>(r), all[r].gradients) + offset;
    sum({&output, 1, parts.data(), group.size(), count, nullptr});
    optim::StepTask task{mean, step.parameters + offset, nullptr, {}, count, &step.constants};
    if (step.master != nullptr) task.master = step.master + at * state_element;
    for (size_t s = 0; s < step.state_arrays(); ++s) task.state[s] = step.states[s] + at * state_element;
    formula(task);
    for (size_t r = 0; all[0].together == 0 && r < ranks; ++r)
      if (r != rank)
        shm::stream_copy(group.memory_of(static_cast<int>(r), all[r].parameters) + offset, step.parameters + offset,
                         bytes);
  }
}

void run(const Step& step, const State& state) {
  shm::Communicator& group = state->group;
  const Announced mine = announced(step, *state);
  const uint64_t number =
      note_start(step.function, static_cast<lockstep_dtype>(step.type), static_cast<int64_t>(step.count));
  const std::vector<Announced> all = all_gather(state, shm::CalledAs::kShardedStep, mine);
  agree(step, all);
  step_slice(step, group, all);
  group.run({.kind = shm::OperationKind::kBarrier}, state->timeout);
  own_page().finish_operation(number);
}

/// The arrays of a program; `states` has as many as any formula.
struct Given {
  void* parameters;
  const void* gradients;
  std::array<void*, kStates> states;
  void* master;
  int64_t count;
  lockstep_dtype dtype;
};

Step step_of(const char* function, Algorithm algorithm, const optim::StepConstants& constants, const Given& given,
             size_t count) {
  const auto bytes = [](void* array) { return static_cast<std::byte*>(array); };
  return {.function = function,
          .algorithm = algorithm,
          .constants = constants,
          .parameters = bytes(given.parameters),
          .gradients = static_cast<const std::byte*>(given.gradients),
          .states = {bytes(given.states[0]), bytes(given.states[1]), bytes(given.states[2])},
          .master = bytes(given.master),
          .count = count,
          .type = checked_type(function, given.dtype, given.master)};
}

lockstep_status sgd(const char* function, lockstep_group* group, const lockstep_sgd* options, int64_t step,
                    const Given& arrays) {
  return guarded(function, group, [&](const State& state) {
    if (options == nullptr) refuse(function, "options is null; it must contain the learning rate");
    const lockstep_sgd given = complete(function, "lockstep_sgd", *options);
    const auto number = [&](const char* name, double value) { return checked(function, name, value, HUGE_VAL); };
    if (given.nesterov != 0 && (given.momentum == 0 || given.dampening != 0))
      refuse(function, "nesterov needs momentum, and dampening must be 0");
    const auto algorithm = given.momentum == 0   ? Algorithm::kSgd
                           : given.nesterov != 0 ? Algorithm::kSgdNesterov
                                                 : Algorithm::kSgdMomentum;
    const auto constants = optim::sgd_constants({.lr = number("lr", given.lr),
                                                 .momentum = number("momentum", given.momentum),
                                                 .dampening = number("dampening", given.dampening),
                                                 .weight_decay = number("weight_decay", given.weight_decay)},
                                                step == 1);
    run(step_of(function, algorithm, constants, arrays, checked_count(function, arrays.count, step)), state);
  });
}

lockstep_status adam(const char* function, lockstep_group* group, const lockstep_adam* options, int64_t step,
                     const Given& arrays) {
  return guarded(function, group, [&](const State& state) {
    if (options == nullptr) refuse(function, "options is null; it must contain the learning rate");
    const lockstep_adam given = complete(function, "lockstep_adam", *options);
    const auto number = [&](const char* name, double value) { return checked(function, name, value, HUGE_VAL); };
    const size_t count = checked_count(function, arrays.count, step);
    const auto constants = optim::adam_constants({.lr = number("lr", given.lr),
                                                  .beta1 = checked(function, "beta1", given.beta1, 1),
                                                  .beta2 = checked(function, "beta2", given.beta2, 1),
                                                  .eps = number("eps", given.eps),
                                                  .weight_decay = number("weight_decay", given.weight_decay)},
                                                 static_cast<double>(step), given.decoupled_weight_decay != 0);
    run(step_of(function, arrays.states[2] == nullptr ? Algorithm::kAdam : Algorithm::kAdamAmsgrad, constants, arrays,
                count),
        state);
  });
}

}  // namespace
}  // namespace lockstep::c

using namespace lockstep::c;

lockstep_status lockstep_sharded_sgd(lockstep_group* group, const lockstep_sgd* options, int64_t step,
                                     float* parameters, const float* gradients, float* momentum, int64_t count) {
  return sgd("lockstep_sharded_sgd", group, options, step,
             {parameters, gradients, {momentum}, nullptr, count, LOCKSTEP_FLOAT32});
}

lockstep_status lockstep_sharded_sgd_typed(lockstep_group* group, const lockstep_sgd* options, int64_t step,
                                           void* parameters, const void* gradients, void* momentum, float* master,
                                           int64_t count, lockstep_dtype dtype) {
  return sgd("lockstep_sharded_sgd_typed", group, options, step,
             {parameters, gradients, {momentum}, master, count, dtype});
}

lockstep_status lockstep_sharded_adam(lockstep_group* group, const lockstep_adam* options, int64_t step,
                                      float* parameters, const float* gradients, float* exp_avg, float* exp_avg_sq,
                                      float* max_exp_avg_sq, int64_t count) {
  return adam("lockstep_sharded_adam", group, options, step,
              {parameters, gradients, {exp_avg, exp_avg_sq, max_exp_avg_sq}, nullptr, count, LOCKSTEP_FLOAT32});
}

lockstep_status lockstep_sharded_adam_typed(lockstep_group* group, const lockstep_adam* options, int64_t step,
                                            void* parameters, const void* gradients, void* exp_avg, void* exp_avg_sq,
                                            void* max_exp_avg_sq, float* master, int64_t count, lockstep_dtype dtype) {
  return adam("lockstep_sharded_adam_typed", group, options, step,
              {parameters, gradients, {exp_avg, exp_avg_sq, max_exp_avg_sq}, master, count, dtype});
}
