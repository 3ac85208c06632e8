#include <algorithm>
#include <array>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/zero_redundancy_optimizer.h>

#include "checkpoint/master_state.h"
#include "collectives/core_types.h"
#include "data_parallel/replica_state.h"
#include "optim/formula.h"

// A step of all parameters of one process. What can go wrong is looked for first; then states are counted up, which
// decides the constants of each parameter; then the kernels run, over pieces that threads share out.

namespace lockstep::detail {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

/// What a thread takes at once: 256 KiB of floats, a multiple of every vector.
constexpr int64_t kPieceElements = 64 << 10;
constexpr size_t kMostArrays = 3;

bool is_16_bit(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

/// What is wrong with a parameter, as the end of a sentence; null if nothing is.
const char* problem_of(const at::Tensor& parameter) {
  if (!parameter.is_cpu()) return "is not on the CPU; step it with torch::optim's optimizer of the same name";
  if (parameter.layout() != at::kStrided) return "is sparse; step it with torch::optim's optimizer of the same name";
  if (parameter.scalar_type() != at::kFloat && parameter.scalar_type() != at::kDouble && !is_16_bit(parameter))
    return "is none of float, double, float16 and bfloat16";
  if (!parameter.is_non_overlapping_and_dense())
    return "has gaps between its elements or elements that overlap; clone() it";
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined()) return nullptr;
  if (gradient.layout() != at::kStrided)
    return "has a sparse gradient; make the layer produce dense ones (for an Embedding: sparse = false)";
  if (!gradient.is_cpu() || gradient.sizes() != parameter.sizes() || gradient.is_complex())
    return "has a gradient of another shape, device or kind than itself; call zero_grad() after to()";
  return nullptr;
}

void check(const Optimizer& optimizer) {
  const auto& groups = optimizer.param_groups();
  for (size_t g = 0; g < groups.size(); ++g)
    for (size_t i = 0; i < groups[g].params().size(); ++i)
      if (const char* problem = problem_of(groups[g].params()[i]))
        TORCH_CHECK(false, "ZeroRedundancyOptimizer: parameter ", i, " of group ", g, ", a ",
                    groups[g].params()[i].toString(), " of ", groups[g].params()[i].sizes(), ", ", problem);
}

/// `tensor` in the dtype and with the strides of `like`; itself if it is so already.
at::Tensor laid_out(const at::Tensor& tensor, at::ScalarType dtype, const at::Tensor& like) {
  if (tensor.scalar_type() == dtype && tensor.strides() == like.strides() && tensor.is_cpu() && !tensor.is_neg())
    return tensor;
  return at::empty_strided(like.sizes(), like.strides(), like.options().dtype(dtype).requires_grad(false))
      .copy_(tensor);
}

at::Tensor zeros(at::ScalarType dtype, const at::Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().dtype(dtype).requires_grad(false)).zero_();
}

/// One parameter's step.
struct Plan {
  optim::StepFunction function;
  optim::StepConstants constants;
  at::Tensor gradient;  ///< keeps what is read
  std::byte* parameter;
  std::byte* master = nullptr;
  std::array<std::byte*, kMostArrays> arrays{};
  size_t element, state_element;  ///< their bytes
  int64_t count;

  void run(int64_t begin, int64_t end) const {
    const size_t at = static_cast<size_t>(begin) * element, state_at = static_cast<size_t>(begin) * state_element;
    optim::StepTask task{.gradient = static_cast<const std::byte*>(gradient.const_data_ptr()) + at,
                         .parameter = parameter + at,
                         .master = master == nullptr ? nullptr : master + state_at,
                         .state = {},
                         .count = static_cast<size_t>(end - begin),
                         .constants = &constants};
    for (size_t a = 0; a < arrays.size() && arrays[a] != nullptr; ++a) task.state[a] = arrays[a] + state_at;
    function(task);
  }
};

class Planner {
 public:
  Planner(Optimizer& optimizer, const Formula& formula, bool masters)
      : optimizer_(optimizer), formula_(formula), masters_(masters) {}

  Plan plan(const at::Tensor& parameter, const OptimizerParamGroup& group) {
    const bool masters = masters_ && is_16_bit(parameter);
    const at::ScalarType state_dtype = masters ? at::kFloat : parameter.scalar_type();
    const optim::Algorithm algorithm = formula_.algorithm(group.options());
    const int arrays = optim::state_arrays(algorithm);
    Plan result{.function = optim::find_step(*to_core(parameter.scalar_type()), algorithm, masters),
                .constants = {},
                .gradient = laid_out(parameter.grad(), parameter.scalar_type(), parameter),
                .parameter = static_cast<std::byte*>(parameter.mutable_data_ptr()),
                .element = static_cast<size_t>(parameter.element_size()),
                .state_element = c10::elementSize(state_dtype),
                .count = parameter.numel()};
    OptimizerParamState* state = arrays > 0 || masters ? &state_of_parameter(parameter, masters) : nullptr;
    bool first = false;
    for (int a = 0; a < arrays; ++a) {
      at::Tensor array = formula_.array(*state, a);
      first = first || !array.defined();
      array = array.defined() ? laid_out(array, state_dtype, parameter) : zeros(state_dtype, parameter);
      formula_.set_array(*state, a, array);
      result.arrays[static_cast<size_t>(a)] = static_cast<std::byte*>(array.mutable_data_ptr());
    }
    if (masters) {
      at::Tensor& master = dynamic_cast<Master&>(*state).master_param;
      master = master.defined() ? laid_out(master, at::kFloat, parameter) : zeros(at::kFloat, parameter);
      result.master = static_cast<std::byte*>(master.mutable_data_ptr());
    }
    result.constants = formula_.advance(state, group.options(), first);
    return result;
  }

 private:
  OptimizerParamState& state_of_parameter(const at::Tensor& parameter, bool masters) {
    auto& state = optimizer_.state()[parameter.unsafeGetTensorImpl()];
    if (!state)
      state = formula_.new_state(masters);
    else if (masters && dynamic_cast<Master*>(state.get()) == nullptr)  // loaded from a file that has none
      state = formula_.with_master(*state);
    return *state;
  }

  Optimizer& optimizer_;
  const Formula& formula_;
  const bool masters_;
};

struct Piece {
  const Plan* plan;
  int64_t begin, end;
};

void run(const std::vector<Plan>& plans) {
  std::vector<Piece> pieces;
  int64_t elements = 0;
  for (const Plan& plan : plans) {
    elements += plan.count;
    for (int64_t begin = 0; begin < plan.count; begin += kPieceElements)
      pieces.push_back({&plan, begin, std::min(plan.count, begin + kPieceElements)});
  }
  if (pieces.empty()) return;
  const auto count = static_cast<int64_t>(pieces.size());
  // As many small ones to a thread as make one large one.
  const int64_t grain = std::max<int64_t>(1, count * kPieceElements / std::max<int64_t>(elements, 1));
  at::parallel_for(0, count, grain, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const Piece& piece = pieces[static_cast<size_t>(i)];
      piece.plan->run(piece.begin, piece.end);
    }
  });
}

}  // namespace

void check_parameters(const Optimizer& optimizer, FormulaKind kind, const ZeroRedundancyOptions& options) {
  if (kind != FormulaKind::kNone) return check(optimizer);
  TORCH_CHECK(!options.master_weights,
              "ZeroRedundancyOptimizer: master_weights needs SGD, Adam or AdamW; other optimizers step by themselves");
}

void fused_step(Optimizer& optimizer, FormulaKind kind, const ZeroRedundancyOptions& options) {
  const at::NoGradGuard no_grad;
  check(optimizer);
  Planner planner(optimizer, formula_of(kind), options.master_weights);
  std::vector<Plan> plans;
  std::vector<at::Tensor> stepped;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      plans.push_back(planner.plan(parameter, group));
      stepped.push_back(parameter);
    }
  run(plans);
  for (const at::Tensor& parameter : stepped)
    if (!parameter.is_inference()) parameter.unsafeGetTensorImpl()->bump_version();
}

std::vector<at::Tensor> trained_parameters(const Replica& model) {
  const auto& state = state_of(model);
  TORCH_CHECK(state.group.world_size() == 1, "ZeroRedundancyOptimizer steps the model of one rank, and this one has ",
              state.group.world_size(), "; give it the parameters, and each rank steps its own copy");
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : state.trained) tensors.push_back(tensor);
  return tensors;
}

}  // namespace lockstep::detail
