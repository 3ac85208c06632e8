#include <map>
#include <random>
#include <string>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "reducer/hooks/all_reduce_hook.h"

// One step of a bucket, from the matrices M_r of rank r (its gradients plus its error of the previous step) to one
// approximation on all ranks:
//
//   reduce    Q = orthogonal basis of the last step's Q, or of random numbers that all ranks share;  P_r = M_r Q;
//             starts the sum of P_r, and the mean of the gradients that are not worth compressing
//   finish    P = orthogonal basis of sum P_r;  Q = mean of M_r^T P;  result P Q^T;  error_r = M_r - P Q^T
//
// For a sum (weighted means), Q is the sum, and a rank's error is the part missing from its share of the result.

namespace lockstep {
namespace {

/// Seeds of random matrices, equal on all ranks, and new at every call: the numbers of
/// numpy.random.RandomState(seed).randint(1_000_000_000), which PyTorch draws.
class Seeds {
 public:
  explicit Seeds(uint64_t seed) : engine_(static_cast<uint32_t>(seed)) {}
  uint64_t next() {
    ++drawn_;
    for (;;)
      if (const uint32_t value = engine_() & ((1u << 30) - 1); value < 1'000'000'000) return value;
  }
  int64_t drawn() const { return drawn_; }

 private:
  std::mt19937 engine_;
  int64_t drawn_ = 0;
};

/// Makes the columns of `matrix` [n, rank] orthonormal, in place.
void orthogonalize(const at::Tensor& matrix, double epsilon) {
  const int64_t rank = matrix.size(1);
  if (rank > 2 && matrix.element_size() > 2) {
    matrix.copy_(std::get<0>(at::linalg_qr(matrix)));
    return;
  }
  for (int64_t i = 0; i < rank; ++i) {
    const at::Tensor column = matrix.narrow(1, i, 1);
    const at::Tensor norm = column.norm() + epsilon;
    column.div_(norm.masked_fill(norm == 0, 1));
    if (i + 1 == rank) break;
    const at::Tensor rest = matrix.narrow(1, i + 1, rank - i - 1);
    rest.sub_((column * rest).sum(0, /*keepdim=*/true) * column);
  }
}

class PowerSgdHook : public CommHook {
 public:
  explicit PowerSgdHook(const PowerSgdOptions& options) : options_(options), seeds_(options.random_seed) {
    TORCH_CHECK(options.matrix_approximation_rank >= 1 && options.start_iter >= 0 && options.min_compression_rate > 0 &&
                    options.orthogonalization_epsilon >= 0,
                "PowerSgdOptions: matrix_approximation_rank must be at least 1, start_iter and "
                "orthogonalization_epsilon must not be negative, min_compression_rate must be positive");
  }

  Finish reduce(const GradientBucket& bucket, const Group& group) override {
    const bool compress = iteration_ >= options_.start_iter && bucket.gradients.is_floating_point();
    if (bucket.last) ++iteration_;
    if (!compress) return reduce_plainly(bucket.gradients, bucket.op, group);
    auto step = std::make_shared<Step>(take_apart(bucket));
    Memory& memory = memories_[bucket.index];
    add_errors(memory, *step);
    prepare_factors(memory, *step);
    const Finish plain = reduce_plainly(step->plain, bucket.op, group);
    const Finish sum = reduce_plainly(memory.p, ReduceOp::kSum, group);
    return [this, step, plain, sum, group, bucket] {
      plain();
      sum();
      finish(memories_[bucket.index], *step, bucket.op, group);
    };
  }

  std::string describe() const override {
    return c10::str("matrix_approximation_rank ", options_.matrix_approximation_rank, "\nstart_iter ",
                    options_.start_iter, "\nmin_compression_rate ", options_.min_compression_rate,
                    "\nuse_error_feedback ", options_.use_error_feedback, "\nwarm_start ", options_.warm_start,
                    "\northogonalization_epsilon ", options_.orthogonalization_epsilon, "\nrandom_seed ",
                    options_.random_seed, '\n');
  }

  StateDict state_dict() const override {
    StateDict state;
    state.insert("iteration", at::scalar_tensor(iteration_, at::kLong));
    state.insert("seeds_drawn", at::scalar_tensor(seeds_.drawn(), at::kLong));
    for (const auto& [index, memory] : memories_) {
      const std::string bucket = std::to_string(index);
      if (options_.warm_start) state.insert("q." + bucket, memory.q);
      for (size_t i = 0; i < memory.errors.size(); ++i)
        state.insert(c10::str("error.", bucket, ".", i), memory.errors[i]);
    }
    return state;
  }

  void load_state_dict(const StateDict& state) override {
    iteration_ = state_entry(state, "iteration").item<int64_t>();
    seeds_ = Seeds(options_.random_seed);
    for (int64_t i = state_entry(state, "seeds_drawn").item<int64_t>(); i > 0; --i) seeds_.next();
    memories_.clear();
    for (const auto& item : state) {
      const std::string& name = item.key();
      if (name.starts_with("q.")) {
        memories_[std::stoll(name.substr(2))].q = item.value().clone();
      } else if (name.starts_with("error.")) {
        auto& errors = memories_[std::stoll(name.substr(6))].errors;
        const size_t matrix = std::stoull(name.substr(name.rfind('.') + 1));
        if (matrix >= errors.size()) errors.resize(matrix + 1);
        errors[matrix] = item.value().clone();
      } else if (name != "iteration" && name != "seeds_drawn") {
        throw Error("the state of a PowerSGD hook has no entry `" + name + "`");
      }
    }
  }

 private:
  /// A bucket's state from step to step.
  struct Memory {
    at::Tensor p, q;                 ///< all factors side by side
    std::vector<at::Tensor> errors;  ///< of each compressed matrix, this rank's
  };
  struct Matrix {
    at::Tensor gradient;  ///< the part of the bucket
    at::Tensor values;    ///< [n, m]: the same memory if it can be viewed this way, else a copy
    at::Tensor p, q;      ///< [n, rank], [m, rank]: pieces of Memory
    int64_t rank;
  };
  struct Step {
    std::vector<Matrix> matrices;
    std::vector<at::Tensor> plain_parts;
    at::Tensor plain;  ///< gradients not worth compressing, side by side
  };

  Step take_apart(const GradientBucket& bucket) const {
    Step step;
    std::map<std::pair<int64_t, int64_t>, size_t> shapes;  // matrices of one shape are kept together, as in PyTorch
    std::vector<std::vector<Matrix>> by_shape;
    std::vector<at::Tensor> flat{at::empty({0}, bucket.gradients.options())};
    for (const at::Tensor& part : bucket.parts) {
      const int64_t n = part.dim() == 0 ? 1 : part.size(0), m = n == 0 ? 0 : part.numel() / n;
      const int64_t rank = std::min({n, m, options_.matrix_approximation_rank});
      if (static_cast<double>((n + m) * rank) * options_.min_compression_rate >= static_cast<double>(n * m)) {
        step.plain_parts.push_back(part);
        flat.push_back(part.reshape(-1));
        continue;
      }
      const auto [place, is_new] = shapes.try_emplace({n, m}, by_shape.size());
      if (is_new) by_shape.emplace_back();
      by_shape[place->second].push_back({part, part.reshape({n, m}), {}, {}, rank});
    }
    for (auto& matrices : by_shape) step.matrices.insert(step.matrices.end(), matrices.begin(), matrices.end());
    step.plain = at::cat(flat);
    return step;
  }

  void add_errors(Memory& memory, const Step& step) const {
    if (!options_.use_error_feedback) return;
    TORCH_CHECK(memory.errors.empty() || memory.errors.size() == step.matrices.size(),
                "PowerSGD: the buckets differ from those with which its state was saved");
    for (size_t i = 0; i < step.matrices.size(); ++i) {
      const at::Tensor& values = step.matrices[i].values;
      if (i == memory.errors.size())
        memory.errors.push_back(values.clone());
      else
        memory.errors[i].copy_(values.add_(memory.errors[i]));
    }
  }

  /// Allocates all factors, makes Q orthogonal and computes P = M Q.
  void prepare_factors(Memory& memory, Step& step) {
    int64_t rows = 0, columns = 0;
    for (const Matrix& matrix : step.matrices)
      rows += matrix.values.size(0) * matrix.rank, columns += matrix.values.size(1) * matrix.rank;
    const at::TensorOptions options = step.plain.options();
    memory.p = at::empty({rows}, options);
    const bool fresh = !options_.warm_start || !memory.q.defined() || memory.q.numel() != columns;
    if (fresh) memory.q = at::empty({columns}, options);
    std::optional<at::Generator> generator;
    if (fresh) generator = at::detail::createCPUGenerator(seeds_.next());
    int64_t row = 0, column = 0;
    for (Matrix& matrix : step.matrices) {
      const int64_t n = matrix.values.size(0), m = matrix.values.size(1);
      matrix.p = memory.p.narrow(0, row, n * matrix.rank).view({n, matrix.rank});
      matrix.q = memory.q.narrow(0, column, m * matrix.rank).view({m, matrix.rank});
      row += matrix.p.numel(), column += matrix.q.numel();
      if (fresh) matrix.q.copy_(at::randn(matrix.q.sizes(), generator, options.device(at::kCPU)));
      orthogonalize(matrix.q, options_.orthogonalization_epsilon);
      at::mm_out(matrix.p, matrix.values, matrix.q);
    }
  }

  void finish(Memory& memory, Step& step, ReduceOp op, const Group& group) const {
    int64_t offset = 0;
    for (const at::Tensor& part : step.plain_parts) {
      part.copy_(step.plain.narrow(0, offset, part.numel()).view(part.sizes()));
      offset += part.numel();
    }
    for (Matrix& matrix : step.matrices) {
      orthogonalize(matrix.p, options_.orthogonalization_epsilon);
      at::mm_out(matrix.q, matrix.values.t(), matrix.p);
    }
    group.all_reduce(memory.q, op);
    const double share = op == ReduceOp::kMean ? 1 : 1.0 / group.world_size();
    for (size_t i = 0; i < step.matrices.size(); ++i) {
      Matrix& matrix = step.matrices[i];
      at::mm_out(matrix.values, matrix.p, matrix.q.t());
      if (options_.use_error_feedback) memory.errors[i].sub_(matrix.values, share);
      if (!matrix.values.is_alias_of(matrix.gradient))
        matrix.gradient.copy_(matrix.values.view(matrix.gradient.sizes()));
    }
  }

  const PowerSgdOptions options_;
  int64_t iteration_ = 0;
  Seeds seeds_;
  std::map<int64_t, Memory> memories_;  ///< by bucket
};

}  // namespace

CommHookPtr power_sgd_hook(const PowerSgdOptions& options) { return std::make_shared<PowerSgdHook>(options); }

}  // namespace lockstep
