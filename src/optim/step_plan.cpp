#include "optim/step_plan.h"

#include <algorithm>
#include <array>
#include <atomic>

#include <ATen/ATen.h>

#include "checkpoint/master_state.h"
#include "collectives/core_types.h"
#include "collectives/intra_op.h"
#include "collectives/shm/kernels/stream_copy.h"

namespace lockstep::optim {
namespace {

/// Elements per thread at once: 256 KiB of floats, a multiple of every vector.
constexpr int64_t kPieceElements = 64 << 10;
/// Elements that are summed, stepped and copied together, while they are in the first-level cache.
constexpr int64_t kBlockElements = 512;
constexpr size_t kLargestElement = 8;

/// The reason why a parameter cannot be stepped, as the end of a sentence; null if none.
const char* problem_with(const at::Tensor& parameter, c10::Device device) {
  if (parameter.device() != device)
    return "is on another device than the first one; step the parameters of each device with an optimizer of their own";
  if (parameter.is_meta()) return "has no data (it is on the meta device); move it to the CPU or a device first";
  if (parameter.layout() != at::kStrided) return "is sparse; step it with torch::optim's optimizer of the same name";
  const at::ScalarType dtype = parameter.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble && !is_16_bit(dtype))
    return "is not float, double, float16 or bfloat16";
  if (!parameter.is_non_overlapping_and_dense())
    return "has gaps between its elements or elements that overlap; clone() it";
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined()) return nullptr;
  if (gradient.layout() != at::kStrided)
    return "has a sparse gradient; make the layer produce dense ones (for an Embedding: sparse = false)";
  if (gradient.device() != device || gradient.sizes() != parameter.sizes() || gradient.is_complex())
    return "has a gradient of another shape, device or kind than itself; call zero_grad() after to()";
  return nullptr;
}

/// Returns the bytes read and written.
size_t run_block(const Plan& plan, int64_t begin, int64_t end, const std::byte* gradient) {
  const auto at = static_cast<size_t>(begin) * plan.element, state_at = static_cast<size_t>(begin) * plan.state_element;
  const auto count = static_cast<size_t>(end - begin);
  StepTask task{.gradient = gradient,
                .parameter = plan.parameter + at,
                .master = plan.master == nullptr ? nullptr : plan.master + state_at,
                .state = {},
                .count = count,
                .constants = &plan.constants};
  size_t states = plan.master == nullptr ? 0 : 1;
  for (size_t a = 0; a < plan.arrays.size() && plan.arrays[a] != nullptr; ++a, ++states)
    task.state[a] = plan.arrays[a] + state_at;
  plan.function(task);
  for (std::byte* copy : plan.copies) shm::stream_copy(copy + at, plan.parameter + at, count * plan.element);
  return count *
         (plan.element * (plan.gradient.parts.size() + 2 + plan.copies.size()) + 2 * states * plan.state_element);
}

struct Piece {
  const Plan* plan;
  int64_t begin, end;

  size_t run() const {
    const GradientSource& gradient = plan->gradient;
    const bool plain = gradient.is_plain();
    const int64_t step = plain && plan->copies.empty() ? kPieceElements : kBlockElements;
    alignas(64) std::array<std::byte, static_cast<size_t>(kBlockElements) * kLargestElement> scratch;
    size_t bytes = 0;
    for (int64_t from = begin; from < end; from += step) {
      const int64_t to = std::min(end, from + step);
      const size_t at = static_cast<size_t>(from) * plan->element;
      if (!plain) gradient.load(scratch.data(), at, static_cast<size_t>(to - from));
      bytes += run_block(*plan, from, to, plain ? gradient.parts.front() + at : scratch.data());
    }
    return bytes;
  }
};

}  // namespace

bool is_16_bit(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

c10::Device device_of(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups())
    if (!group.params().empty()) return group.params().front().device();
  return at::kCPU;
}

std::string problem_of(const torch::optim::Optimizer& optimizer) {
  const auto& groups = optimizer.param_groups();
  const c10::Device device = device_of(optimizer);
  for (size_t g = 0; g < groups.size(); ++g)
    for (size_t i = 0; i < groups[g].params().size(); ++i) {
      const at::Tensor& parameter = groups[g].params()[i];
      if (const char* problem = problem_with(parameter, device))
        return c10::str("ZeroRedundancyOptimizer: parameter ", i, " of group ", g, ", a ", parameter.toString(), " of ",
                        parameter.sizes(), ", ", problem);
    }
  return "";
}

std::vector<Intent> intents_of(const torch::optim::Optimizer& optimizer, const Formula& formula,
                               const std::function<bool(const at::Tensor&)>& is_stepped) {
  std::vector<Intent> intents;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params()) {
      if (!is_stepped(parameter)) continue;
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      const auto* state = found == optimizer.state().end() ? nullptr : found->second.get();
      intents.push_back({parameter, formula.algorithm(group.options()), formula.next(state, group.options())});
    }
  return intents;
}

torch::optim::OptimizerParamState& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
                                            const Formula& formula, bool master) {
  auto& state = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (!state)
    state = formula.new_state(master);
  else if (master && dynamic_cast<Master*>(state.get()) == nullptr)  // loaded from a file without masters
    state = formula.with_master(*state);
  return *state;
}

at::Tensor laid_out(const at::Tensor& tensor, at::ScalarType dtype, const at::Tensor& like) {
  if (tensor.scalar_type() == dtype && tensor.strides() == like.strides() && tensor.device() == like.device() &&
      !tensor.is_neg())
    return tensor;
  return at::empty_strided(like.sizes(), like.strides(), like.options().dtype(dtype).requires_grad(false))
      .copy_(tensor);
}

GradientSource own_gradient(const Intent& intent) {
  const at::Tensor& parameter = intent.parameter;
  const at::Tensor gradient = laid_out(parameter.grad(), parameter.scalar_type(), parameter);
  return {.kept = gradient, .parts = {static_cast<const std::byte*>(gradient.const_data_ptr())}};
}

Plan plan_of(const Intent& intent, GradientSource gradient, bool master) {
  const at::ScalarType dtype = intent.parameter.scalar_type();
  return {.function = find_step(*to_core(dtype), intent.algorithm, master),
          .constants = intent.constants,
          .gradient = std::move(gradient),
          .parameter = static_cast<std::byte*>(intent.parameter.mutable_data_ptr()),
          .element = c10::elementSize(dtype),
          .state_element = c10::elementSize(master ? at::kFloat : dtype),
          .end = intent.parameter.numel()};
}

int64_t run(const std::vector<Plan>& plans) {
  std::vector<Piece> pieces;
  int64_t elements = 0;
  for (const Plan& plan : plans) {
    elements += std::max<int64_t>(plan.end - plan.begin, 0);
    for (int64_t begin = plan.begin; begin < plan.end; begin += kPieceElements)
      pieces.push_back({&plan, begin, std::min(plan.end, begin + kPieceElements)});
  }
  if (pieces.empty()) return 0;
  std::atomic<size_t> bytes{0};
  const auto count = static_cast<int64_t>(pieces.size());
  // A thread takes as many small parameters as make one large one.
  const int64_t grain = std::max<int64_t>(1, count * kPieceElements / elements);
  intra_op_for(count, grain, [&](int64_t from, int64_t to) {
    size_t mine = 0;
    for (int64_t i = from; i < to; ++i) mine += pieces[static_cast<size_t>(i)].run();
    bytes += mine;
  });
  return static_cast<int64_t>(bytes);
}

}  // namespace lockstep::optim
