// Each collective once, on tensors of a few numbers. Rank r starts with [10 r, 10 r + 1].
//
//     lockstep run -n 2 -- build/bin/collectives
//
// prints
//
//     rank                      0                1
//     all_reduce, sum           10 12            10 12
//     all_reduce, mean          5 6              5 6
//     broadcast from rank 1     10 11            10 11
//     reduce to rank 0          10 12            10 11
//     all_gather                0 1 10 11        0 1 10 11
//     gather to rank 0          0 1 10 11        -
//     scatter from rank 0       0                1
//     reduce_scatter            10               12
//     all_to_all                0 10             1 11
//     send to the next rank     10 11            0 1
//     all_reduce_async, max     10 11            10 11
//     subgroup of rank 0        0 1              -
//     broadcast_bytes           hello            hello
//     all_gather_object         0 of 2, 1 of 2   0 of 2, 1 of 2

#include <cstdio>
#include <functional>
#include <sstream>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

namespace {

std::string text_of(const torch::Tensor& numbers) {
  if (!numbers.defined()) return "-";
  std::ostringstream text;
  const torch::Tensor flat = numbers.flatten();
  for (int64_t i = 0; i < flat.numel(); ++i) text << (i ? " " : "") << flat[i].item<double>();
  return text.str();
}

class Table {
 public:
  explicit Table(const lockstep::Group& group) : group_(group) {}

  /// Prints every rank's result, on rank 0.
  void row(const char* name, const std::string& result) const {
    const std::vector<std::string> all = group_.all_gather_bytes(result);
    if (group_.rank() != 0) return;
    std::ostringstream line;
    line << std::left << std::setw(26) << name;
    for (const std::string& text : all) line << std::setw(17) << text;
    const std::string whole = line.str();
    std::printf("%s\n", whole.substr(0, whole.find_last_not_of(' ') + 1).c_str());
  }
  void row(const char* name, const torch::Tensor& result) const { row(name, text_of(result)); }

 private:
  const lockstep::Group& group_;
};

void tensors(const lockstep::Group& group, const Table& table) {
  using lockstep::ReduceOp;
  const int rank = group.rank(), size = group.world_size();
  const auto own = [&] {
    return torch::tensor({10.0f * static_cast<float>(rank), 10.0f * static_cast<float>(rank) + 1});
  };
  const auto in_place = [&](const char* name, const std::function<void(const torch::Tensor&)>& operation) {
    const torch::Tensor tensor = own();
    operation(tensor);
    table.row(name, tensor);
  };

  in_place("all_reduce, sum", [&](const auto& tensor) { group.all_reduce(tensor); });
  in_place("all_reduce, mean", [&](const auto& tensor) { group.all_reduce(tensor, ReduceOp::kMean); });
  in_place("broadcast from rank 1", [&](const auto& tensor) { group.broadcast(tensor, /*root=*/1); });
  in_place("reduce to rank 0", [&](const auto& tensor) { group.reduce(tensor, /*root=*/0); });
  table.row("all_gather", group.all_gather(own()));
  table.row("gather to rank 0", group.gather(own(), /*root=*/0));

  const torch::Tensor piece = torch::empty({1});
  group.scatter(piece, rank == 0 ? torch::arange(size, torch::kFloat).view({size, 1}) : torch::Tensor(), /*root=*/0);
  table.row("scatter from rank 0", piece);

  // These two take a row for each rank.
  const torch::Tensor rows = torch::arange(size, torch::kFloat).view({size, 1}) + 10 * rank;
  table.row("reduce_scatter", group.reduce_scatter(rows));
  table.row("all_to_all", group.all_to_all(rows));

  const torch::Tensor received = torch::empty({2});
  const lockstep::Work sent = group.send_async(own(), (rank + 1) % size);
  group.recv(received, (rank + size - 1) % size);
  sent.wait();
  table.row("send to the next rank", received);

  in_place("all_reduce_async, max", [&](const auto& tensor) {
    const lockstep::Work work = group.all_reduce_async(tensor, ReduceOp::kMax);
    // ... do something else meanwhile, without touching the tensor ...
    work.wait();
  });

  const std::optional<lockstep::Group> first = group.subgroup({0});
  table.row("subgroup of rank 0", first ? first->all_gather(own()) : torch::Tensor());
}

void objects(const lockstep::Group& group, const Table& table) {
  table.row("broadcast_bytes", group.broadcast_bytes(group.rank() == 0 ? "hello" : "", /*root=*/0));
  const std::string own = std::to_string(group.rank()) + " of " + std::to_string(group.world_size());
  std::string all;
  for (const c10::IValue& object : group.all_gather_object(own))
    all += (all.empty() ? "" : ", ") + object.toStringRef();
  table.row("all_gather_object", all);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Shows what each collective does, on two ranks or more."};
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    const lockstep::Context context;
    if (context.world_size() < 2)
      throw lockstep::Error("start it with two ranks or more: lockstep run -n 2 -- " + std::string(argv[0]));
    const Table table(context.group());
    table.row("rank", std::to_string(context.rank()));
    tensors(context.group(), table);
    objects(context.group(), table);
    return 0;
  });
}
