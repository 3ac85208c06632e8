#include <lockstep/distributed_data_parallel.h>

#include <limits>

#include <gtest/gtest.h>

#include <lockstep/checkpoint.h>

#include "data_parallel/models.h"
#include "support/ranks.h"

namespace lockstep::distributed_data_parallel_test {
namespace {

using namespace testing;  // NOLINT

class Ranks : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{2, "shm"},
                           {3, "shm"},
                           {2, "gloo"},
                           {3, "gloo"},
                           {3, "hierarchical", "aab"},
                           {4, "hierarchical", "aabb"},
                           {4, "hierarchical", "aaab"},
                           {4, "hierarchical", "aaaa"},
                           {4, "hierarchical", "abcd"}};
INSTANTIATE_TEST_SUITE_P(Engines, Ranks, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

constexpr int kSteps = 10;

/// Ten steps of one process over the batches of all ranks. `together`: as one batch; otherwise one after the other with
/// the mean of their gradients, as batch norm sees them on separate ranks, and with the buffers of the first.
StateDict train_in_one_process(Model& model, int world_size, at::ScalarType dtype, bool together) {
  auto optimizer = make_sgd(model);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    std::vector<at::Tensor> data, target;
    StateDict first_buffers;
    for (int rank = 0; rank < world_size; ++rank) {
      const Sample sample = batch(step, rank, dtype);
      data.push_back(sample.data);
      target.push_back(sample.target);
      if (together) continue;
      for (const auto& item : model.named_buffers())
        if (rank == 1) first_buffers.insert(item.key(), item.value().clone());
      (loss_of(model, sample, step, rank) / world_size).backward();
    }
    if (together) loss_of(model, {at::cat(data), at::cat(target)}, step, 0).backward();
    optimizer.step();
    at::NoGradGuard no_grad;
    for (auto& item : model.named_buffers())
      if (first_buffers.contains(item.key())) item.value().copy_(first_buffers[item.key()]);
  }
  return state_dict(model);
}

void train_on_ranks(Model& model, DistributedDataParallel<std::shared_ptr<Model>>&, int rank, at::ScalarType dtype) {
  auto optimizer = make_sgd(model);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    loss_of(model, batch(step, rank, dtype), step, rank).backward();
    optimizer.step();
  }
}

void expect_as_one_process(Context& context, const std::string& name, at::ScalarType dtype, bool evaluation_statistics,
                           double tolerance) {
  auto model = make_model(name), reference = make_model(name);
  for (auto* module : {model.get(), reference.get()}) {
    module->to(dtype);
    module->train(!evaluation_statistics);
  }
  DistributedDataParallel replica(model, context);
  train_on_ranks(*model, replica, context.rank(), dtype);
  const bool together = name != "batch_norm" || evaluation_statistics;
  const StateDict expected = train_in_one_process(*reference, context.world_size(), dtype, together);
  const StateDict actual = state_dict(*model);
  for (const auto& item : expected)
    EXPECT_TRUE(at::allclose(actual[item.key()].detach().to(at::kDouble), item.value().detach().to(at::kDouble),
                             tolerance, tolerance))
        << item.key() << "\n"
        << actual[item.key()] << "\none process has\n"
        << item.value();
}

TEST_P(Ranks, TrainAsOneProcessWithTheWholeBatch) {
  run_ranks(GetParam(), [](Context& context) {
    expect_as_one_process(context, "plain", at::kFloat, false, 1e-6);
    expect_as_one_process(context, "plain", at::kDouble, false, 1e-15);
  });
}

TEST_P(Ranks, TrainAsOneProcessWithBatchNorm) {
  run_ranks(GetParam(), [](Context& context) {
    expect_as_one_process(context, "batch_norm", at::kFloat, /*evaluation_statistics=*/true, 1e-6);
    expect_as_one_process(context, "batch_norm", at::kDouble, /*evaluation_statistics=*/true, 1e-15);
    expect_as_one_process(context, "batch_norm", at::kDouble, /*evaluation_statistics=*/false, 1e-13);
  });
}

TEST_P(Ranks, HoldTheSameBitsWhateverTheBuckets) {
  run_ranks(GetParam(), [](Context& context) {
    std::string first;
    for (double bucket_mb : {1e-6, 1e-4, 3e-4, 25.0, std::numeric_limits<double>::infinity()}) {
      auto model = make_model("batch_norm");
      DistributedDataParallel replica(model, context, {.first_bucket_cap_mb = bucket_mb, .bucket_cap_mb = bucket_mb});
      train_on_ranks(*model, replica, context.rank(), at::kFloat);
      const auto hashes = context.group().all_gather_bytes(hash(state_dict(*model)));
      for (const auto& other : hashes) EXPECT_EQ(other, hashes[0]);
      // Every engine adds along the same tree over the ranks.
      if (first.empty()) first = hashes[0];
      EXPECT_EQ(hashes[0], first) << "buckets of " << bucket_mb << " MiB";
    }
  });
}

TEST_P(Ranks, StartFromRankZero) {
  run_ranks(GetParam(), [](Context& context) {
    auto model = std::make_shared<WithBatchNorm>();
    torch::manual_seed(context.rank());
    for (auto& parameter : model->parameters()) at::NoGradGuard(), parameter.data().uniform_();
    model->bn->running_mean.fill_(context.rank());
    DistributedDataParallel replica(model, context);
    const auto hashes = context.group().all_gather_bytes(hash(state_dict(*model)));
    for (const auto& other : hashes) EXPECT_EQ(other, hashes[0]);
    EXPECT_EQ(model->bn->running_mean[0].item<float>(), 0);
  });
}

TEST_P(Ranks, GradientsStayViewsAndAccumulateInPlace) {
  run_ranks(GetParam(), [](Context& context) {
    auto model = make_model("plain");
    DistributedDataParallel replica(model, context);
    const int rank = context.rank(), n = context.world_size();
    loss_of(*model, batch(0, rank), 0, rank).backward();
    const at::Tensor first = model->parameters()[0].grad();
    const at::Tensor once = first.clone();
    loss_of(*model, batch(0, rank), 0, rank).backward();  // without zero_grad: the mean of all, added once more
    EXPECT_EQ(model->parameters()[0].grad().data_ptr(), first.data_ptr());
    EXPECT_TRUE(at::allclose(model->parameters()[0].grad(), 2 * once));
    for (auto& parameter : model->parameters()) parameter.mutable_grad().zero_();
    loss_of(*model, batch(0, rank), 0, rank).backward();
    EXPECT_TRUE(at::allclose(model->parameters()[0].grad(), once));
    EXPECT_GT(n, 1);
  });
}

TEST_P(Ranks, FrozenAndNeverUsedParametersKeepTheirGradients) {
  run_ranks(GetParam(), [](Context& context) {
    auto model = std::make_shared<Branches>();
    model->right->bias.set_requires_grad(false);
    DistributedDataParallel replica(std::static_pointer_cast<Model>(model), context);
    loss_of(*model, batch(0, 0), 0, 0).backward();  // every rank goes left
    EXPECT_TRUE(model->left->weight.grad().defined());
    EXPECT_FALSE(model->right->weight.grad().defined());
    EXPECT_FALSE(model->never->weight.grad().defined());
    model->never->weight.mutable_grad() = at::ones({3, 6});
    loss_of(*model, batch(1, 0), 0, 0).backward();
    EXPECT_TRUE(at::equal(model->never->weight.grad(), at::ones({3, 6})));
  });
}

TEST_P(Ranks, SurviveABackwardEndedByAnException) {
  run_ranks(GetParam(), [](Context& context) {
    auto model = make_model("plain"), reference = make_model("plain");
    DistributedDataParallel replica(model, context);
    const int rank = context.rank();
    auto* plain = dynamic_cast<Plain*>(model.get());
    at::Tensor hidden = torch::tanh(plain->fc1(batch(0, rank).data));
    hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("on purpose"); });
    EXPECT_THROW(plain->fc2(hidden).sum().backward(), std::exception);
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
    loss_of(*model, batch(0, rank), 0, rank).backward();
    at::Tensor loss = at::zeros({});
    for (int r = 0; r < context.world_size(); ++r) loss = loss + loss_of(*reference, batch(0, r), 0, r);
    (loss / context.world_size()).backward();
    for (size_t i = 0; i < model->parameters().size(); ++i)
      EXPECT_TRUE(at::allclose(model->parameters()[i].grad(), reference->parameters()[i].grad(), 1e-5, 1e-6));
  });
}

TEST_P(Ranks, MixedDtypesAndChannelsLast) {
  struct Mixed : torch::nn::Module {
    torch::nn::Conv2d conv{register_module("conv", torch::nn::Conv2d(3, 4, 3))};
    at::Tensor scale{register_parameter("scale", at::ones({4}, at::kDouble))};
  };
  run_ranks(GetParam(), [](Context& context) {
    auto model = std::make_shared<Mixed>();
    torch::NoGradGuard(), model->conv->weight.set_data(model->conv->weight.detach().to(at::MemoryFormat::ChannelsLast));
    DistributedDataParallel replica(model, context);
    EXPECT_EQ(replica.bucket_parameters().size(), 2u);
    const at::Tensor input = formula({2, 3, 5, 5}, context.rank()).to(at::kFloat);
    (model->conv(input).mean({0, 2, 3}).to(at::kDouble) * model->scale).sum().backward();
    EXPECT_TRUE(model->conv->weight.grad().is_contiguous(at::MemoryFormat::ChannelsLast));
    const auto all =
        context.group().all_gather_bytes(hash({{{"g", model->conv->weight.grad()}, {"s", model->scale.grad()}}}));
    for (const auto& other : all) EXPECT_EQ(other, all[0]);
  });
}

TEST_P(Ranks, ModelsThatDifferAreAnErrorOnAllRanks) {
  run_ranks(GetParam(), [](Context& context) {
    const auto expect_refused = [&](const std::shared_ptr<Model>& model, const std::string& text) {
      try {
        DistributedDataParallel replica(model, context);
        ADD_FAILURE() << "expected: " << text;
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
      }
    };
    const bool last = context.rank() == context.world_size() - 1;
    const std::string odd = "on rank " + std::to_string(context.world_size() - 1);
    expect_refused(make_model(last ? "batch_norm" : "plain"), "parameter 2 is `fc2.weight: Float [3, 8] on cpu`");
    auto frozen = make_model("plain");
    if (last) frozen->parameters()[1].set_requires_grad(false);
    expect_refused(frozen, "`fc1.bias: Float [8] on cpu, no gradient` " + odd);
    auto wide = make_model("plain");
    if (last) wide->to(at::kDouble);
    expect_refused(wide, "`fc1.weight: Double [8, 6] on cpu` " + odd);
    context.group().barrier();
  });
}

TEST(OneRank, NeedsNothing) {
  run_ranks(1, [](Context& context) {
    auto model = make_model("plain"), reference = make_model("plain");
    DistributedDataParallel replica(model, context);
    train_on_ranks(*model, replica, 0, at::kFloat);
    train_in_one_process(*reference, 1, at::kFloat, true);
    EXPECT_EQ(hash(state_dict(*model)), hash(state_dict(*reference)));
  });
}

TEST(Detached, TheModuleTrainsAlone) {
  run_ranks(2, [](Context& context) {
    auto model = make_model("plain");
    { DistributedDataParallel replica(model, context); }
    loss_of(*model, batch(0, context.rank()), 0, 0).backward();
    const auto all = context.group().all_gather_bytes(hash({{{"g", model->parameters()[0].grad()}}}));
    EXPECT_NE(all[0], all[1]);
  });
}

TEST(Misuse, IsRefusedWithAdvice) {
  run_ranks(2, [](Context& context) {
    auto model = make_model("plain");
    EXPECT_THROW(DistributedDataParallel(model, context, {.bucket_cap_mb = 0}), c10::Error);
    DistributedDataParallel replica(model, context);
    const at::Tensor loss = loss_of(*model, batch(0, 0), 0, 0);
    EXPECT_THROW(loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true), Error);
    for (auto& parameter : model->parameters()) parameter.set_requires_grad(false);
    EXPECT_THROW(DistributedDataParallel(model, context), c10::Error);
  });
}

}  // namespace
}  // namespace lockstep::distributed_data_parallel_test
