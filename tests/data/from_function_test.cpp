#include <lockstep/from_function.h>

#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/data_loader.h>
#include <lockstep/transforms.h>

#include "support/complaint.h"

namespace lockstep::from_function_test {
namespace {

using datasets::FromFunction;
using testing::complaint;

/// Sample i is i, i + 1; the target is i.
Batch pairs(at::ArrayRef<int64_t> indices) {
  const at::Tensor chosen = torch::tensor(indices);
  return {at::stack({chosen, chosen + 1}, 1), chosen};
}

FromFunction drawn() {
  return {10, [](at::ArrayRef<int64_t> indices, at::ArrayRef<uint64_t> seeds) {
            std::vector<double> numbers;
            for (const uint64_t seed : seeds) numbers.push_back(transforms::Random(seed).uniform());
            return Batch{torch::tensor(numbers, at::kDouble), torch::tensor(indices)};
          }};
}

/// The numbers of two epochs by index, [2, 10], on this many ranks.
at::Tensor numbers_of(int ranks, int workers, uint64_t seed) {
  const at::Tensor numbers = at::zeros({2, 10}, at::kDouble);
  for (int rank = 0; rank < ranks; ++rank) {
    DataLoader loader(drawn(), Shard(rank, ranks, seed), {.batch_size = 2, .shuffle = true, .workers = workers});
    for (int epoch : loader.epochs(2))
      for (auto& [data, target] : loader) numbers[epoch].index_copy_(0, target, data);
  }
  return numbers;
}

TEST(FromFunctionTest, GivesTheBatchesOfTheFunction) {
  DataLoader loader(FromFunction(7, pairs), Shard(0, 1), {.batch_size = 3});
  int64_t first = 0;
  for (auto& [data, target] : loader) {
    EXPECT_TRUE(target.equal(at::arange(first, std::min<int64_t>(first + 3, 7))));
    EXPECT_TRUE(data.select(1, 1).equal(target + 1));
    first += 3;
  }
  EXPECT_EQ(first, 9);
  EXPECT_TRUE(FromFunction(7, pairs).get({4, 4, 0}).target.equal(torch::tensor({4, 4, 0})));
  DataLoader without(FromFunction(4, [](at::ArrayRef<int64_t> i) { return Batch{torch::tensor(i)}; }), Shard(0, 1));
  for (auto& [data, target] : without) EXPECT_FALSE(target.defined());
}

TEST(FromFunctionTest, SeedsBelongToSampleAndEpoch) {
  const at::Tensor one = numbers_of(1, 1, 5);
  EXPECT_EQ(std::get<0>(at::_unique(one)).numel(), 20) << "each sample draws its own, anew in each epoch";
  for (const int ranks : {1, 2, 3})
    for (const int workers : {0, 1, 2}) EXPECT_TRUE(numbers_of(ranks, workers, 5).equal(one)) << ranks << workers;
  EXPECT_FALSE(numbers_of(1, 1, 6).equal(one));
  EXPECT_TRUE(drawn().get({3, 1}).data.equal(drawn().get({3, 1}).data));
}

TEST(FromFunctionTest, SaysWhatIsWrong) {
  EXPECT_EQ(complaint([] { FromFunction(-1, pairs); }).substr(0, 24), "FromFunction: -1 samples");
  EXPECT_NE(complaint([] { FromFunction(1, FromFunction::Function()); }).find("the function is null"),
            std::string::npos);
  EXPECT_NE(complaint([] { FromFunction(1, FromFunction::RandomFunction()); }).find("the function is null"),
            std::string::npos);
  const auto said = [](const Batch& batch) {
    const FromFunction dataset(9, [batch](at::ArrayRef<int64_t>) { return batch; });
    return complaint([&] {
      DataLoader loader(dataset, Shard(0, 1), {.batch_size = 3});
      for (auto& unused : loader) static_cast<void>(unused);
    });
  };
  EXPECT_NE(said({at::zeros({2, 4})})
                .find("the function was asked for 3 samples from index 0 on and returned a `data` of the shape [2, 4]"),
            std::string::npos);
  EXPECT_NE(said({at::zeros({3}), at::zeros({})}).find("returned a `target` of the shape []"), std::string::npos);
  EXPECT_NE(said({}).find("a `data` that is an undefined tensor"), std::string::npos);
}

}  // namespace
}  // namespace lockstep::from_function_test
