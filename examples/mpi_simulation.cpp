// A simulation that uses MPI trains a net to replace its solver, on its existing ranks and launcher.
//
// Heat spreads along a ring of cells, faster where it is hot. Each rank has a part of the ring, and gets the cells next
// to its part by MPI. While the solver runs, a net learns how a cell changes from the cell and its neighbours. Then the
// net continues alone.
//
//     mpirun -n 2 build/bin/mpi_simulation
//
// prints
//
//     400 cells on 2 ranks, 300 steps of the solver, the net learns from each
//     the heat is 400.0, as at the start
//     300 steps by the net instead: off by at most 1 % of the hottest cell

#include <cmath>
#include <cstdio>
#include <numbers>

#include <lockstep/lockstep.h>
#include <lockstep/mpi.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

namespace {

struct Options {
  int64_t cells = 400;
  int steps = 300;
};

/// This rank's part of the ring, and what MPI is needed for. It is a program's own, and knows nothing of Lockstep.
class Ring {
 public:
  Ring(MPI_Comm communicator, int64_t cells) : communicator_(communicator) {
    MPI_Comm_rank(communicator, &rank_);
    MPI_Comm_size(communicator, &size_);
    const int64_t first = cells * rank_ / size_, last = cells * (rank_ + 1) / size_;
    const torch::Tensor place =
        (torch::arange(first, last) + 0.5) * (2 * std::numbers::pi / static_cast<double>(cells));
    heat = (1 + 0.6 * torch::sin(3 * place) + 0.3 * torch::cos(5 * place)).to(torch::kFloat);
  }

  /// [own cells, 3]: each cell between its neighbours.
  torch::Tensor neighbourhoods() const {
    const torch::Tensor edges = torch::empty({2});  // the cells before the first and behind the last
    const int before = (rank_ + size_ - 1) % size_, behind = (rank_ + 1) % size_;
    const float *own = heat.const_data_ptr<float>(), *last = own + heat.numel() - 1;
    float* other = edges.mutable_data_ptr<float>();
    MPI_Sendrecv(last, 1, MPI_FLOAT, behind, 0, other, 1, MPI_FLOAT, before, 0, communicator_, MPI_STATUS_IGNORE);
    MPI_Sendrecv(own, 1, MPI_FLOAT, before, 1, other + 1, 1, MPI_FLOAT, behind, 1, communicator_, MPI_STATUS_IGNORE);
    return torch::cat({edges.slice(0, 0, 1), heat, edges.slice(0, 1, 2)}).unfold(0, 3, 1);
  }

  double over_all_ranks(double value, MPI_Op operation) const {
    MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, operation, communicator_);
    return value;
  }

  torch::Tensor heat;  ///< [own cells]

 private:
  const MPI_Comm communicator_;
  int rank_ = 0, size_ = 1;
};

/// The solver: what flows into a cell in a step, from neighbourhoods [n, 3].
torch::Tensor inflow(const torch::Tensor& neighbourhoods) {
  const auto cell = [&](int64_t i) { return neighbourhoods.select(1, i); };
  const auto flow = [](const torch::Tensor& from, const torch::Tensor& to) {
    return (0.05 + 0.1 * (from + to)) * (from - to);
  };
  return flow(cell(0), cell(1)) - flow(cell(1), cell(2));
}

/// The learned inflow. Its input is how much hotter the neighbours are, and how hot the cell is.
struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& neighbourhoods) {
    const torch::Tensor middle = neighbourhoods.slice(1, 1, 2);
    const torch::Tensor left = neighbourhoods.slice(1, 0, 1) - middle, right = neighbourhoods.slice(1, 2, 3) - middle;
    const torch::Tensor differences = torch::cat({left + right, left.square() + right.square()}, 1);
    return (factors->forward(middle) * differences).sum(1);
  }
  torch::nn::Sequential factors{register_module(
      "factors", torch::nn::Sequential(torch::nn::Linear(1, 32), torch::nn::Tanh(), torch::nn::Linear(32, 2)))};
};
TORCH_MODULE(Net);

void run(const Options& options, const lockstep::Context& context) {
  Ring solved(MPI_COMM_WORLD, options.cells);
  const bool speaks = context.is_main();
  if (speaks)
    std::printf("%ld cells on %d ranks, %d steps of the solver, the net learns from each\n",
                static_cast<long>(options.cells), context.world_size(), options.steps);
  torch::manual_seed(1);
  Net net;
  lockstep::DistributedDataParallel<Net> model(net, context);
  torch::optim::Adam optimizer(net->parameters(), 1e-2);
  for (int step = 0; step < options.steps; ++step) {
    const torch::Tensor seen = solved.neighbourhoods(), change = inflow(seen);
    const double scale = context.group().mean(change.square().mean().item<double>());  // changes grow smaller
    for (int turn = 0; turn < 3; ++turn) {
      optimizer.zero_grad();
      (torch::mse_loss(model(seen), change) / scale).backward();
      optimizer.step();
    }
    solved.heat = solved.heat + change;
  }
  const double heat = solved.over_all_ranks(solved.heat.sum().item<double>(), MPI_SUM);
  if (speaks) std::printf("the heat is %.1f, as at the start\n", heat);

  const torch::NoGradGuard no_grad;
  Ring learned(MPI_COMM_WORLD, options.cells);
  for (int step = 0; step < options.steps; ++step) learned.heat = learned.heat + net(learned.neighbourhoods());
  const double off = learned.over_all_ranks((learned.heat - solved.heat).abs().max().item<double>(), MPI_MAX);
  const double hottest = learned.over_all_ranks(solved.heat.max().item<double>(), MPI_MAX);
  if (speaks)
    std::printf("%d steps by the net instead: off by at most %.0f %% of the hottest cell\n", options.steps,
                std::ceil(100 * off / hottest));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"A simulation on MPI trains a net in place of its solver."};
  app.add_option("--cells", options.cells, "Cells of the ring")->capture_default_str()->check(CLI::Range(100, 1000000));
  app.add_option("--steps", options.steps, "Steps of the solver, and of the net")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000000));
  CLI11_PARSE(app, argc, argv);
  MPI_Init(&argc, &argv);
  try {
    const lockstep::Context context = lockstep::mpi_context(MPI_COMM_WORLD);
    run(options, context);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi_simulation: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);  // the others may wait for messages of this rank
  }
  MPI_Finalize();
  return 0;
}
