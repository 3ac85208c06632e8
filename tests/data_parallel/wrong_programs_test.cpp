#include <gtest/gtest.h>

#include <map>

#include <lockstep/comm_hook.h>
#include <lockstep/distributed_data_parallel.h>

#include "data_parallel/models.h"
#include "support/golden_cases.h"
#include "support/ranks.h"

// Programs that use DistributedDataParallel incorrectly. Within two seconds, each must end on every rank with its
// message from wrong_programs.txt.

namespace lockstep::wrong_programs_test {
namespace {

using namespace testing;  // NOLINT

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("fc", fc);
    register_module("out", out);
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return out(torch::tanh(fc(x))); }
  torch::nn::Linear fc{6, 4}, out{4, 3};
};
TORCH_MODULE(Net);

/// One rank's side of a wrong program.
struct Wrong {
  explicit Wrong(Context& the_context) : context(the_context) {}

  Context& context;
  Net net;
  const bool odd = context.rank() == context.world_size() - 1;  ///< the last rank is the one that differs

  DistributedDataParallel<Net> attach(const DistributedDataParallelOptions& options = {}) {
    return DistributedDataParallel(net, context, options);
  }
  static void backward(DistributedDataParallel<Net>& replica, int steps = 1) {
    for (int step = 0; step < steps; ++step) replica(batch(step, 0).data).square().mean().backward();
  }
  static torch::nn::BatchNorm1d buffers_alone() {
    return torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(4).affine(false));
  }
  void attach_and_train() {
    auto replica = attach();
    backward(replica, 2);
  }
  /// Trains, changes the module, and trains again.
  void edit(const std::function<void()>& change) {
    auto replica = attach();
    backward(replica, 2);
    change();
    backward(replica, 2);
  }
};

using Program = std::function<void(Wrong&)>;

const std::vector<std::pair<std::string, Program>>& programs_that_attach() {
  static const std::vector<std::pair<std::string, Program>> kPrograms{
      {"names_differ",
       [](Wrong& w) {
         if (w.odd) w.net->unregister_module("out"), w.net->register_module("exit", w.net->out);
         w.attach();
       }},
      {"order_differs",
       [](Wrong& w) {
         if (w.odd) w.net->unregister_module("fc"), w.net->register_module("fc", w.net->fc);
         w.attach();
       }},
      {"shapes_differ",
       [](Wrong& w) {
         if (w.odd) w.net->fc = w.net->replace_module("fc", torch::nn::Linear(6, 5));
         w.attach();
       }},
      {"dtypes_differ",
       [](Wrong& w) {
         if (w.odd) w.net->out->to(at::kDouble);
         w.attach();
       }},
      {"requires_grad_differs",
       [](Wrong& w) {
         if (w.odd) w.net->fc->bias.set_requires_grad(false);
         w.attach();
       }},
      {"one_parameter_fewer",
       [](Wrong& w) {
         if (w.odd)
           w.net->out = w.net->replace_module("out", torch::nn::Linear(torch::nn::LinearOptions(4, 3).bias(false)));
         w.attach();
       }},
      {"one_layer_more",
       [](Wrong& w) {
         if (w.odd) w.net->register_module("extra", torch::nn::Linear(2, 2));
         w.attach();
       }},
      {"strides_differ",
       [](Wrong& w) {
         if (w.odd) w.net->out->weight.set_data(w.net->out->weight.detach().t().contiguous().t());
         w.attach();
       }},
      {"layers_options_differ",
       [](Wrong& w) {
         w.net->register_module("drop", torch::nn::Dropout(w.odd ? 0.5 : 0.1));
         w.attach();
       }},
      {"buffers_differ",
       [](Wrong& w) {
         w.net->register_buffer("mean", at::zeros({w.odd ? 3 : 2}));
         w.attach();
       }},
      {"options_differ", [](Wrong& w) { w.attach({.bucket_cap_mb = w.odd ? 5.0 : 25.0}); }},
      {"buckets_of_nothing", [](Wrong& w) { w.attach({.bucket_cap_mb = 0}); }},
      {"nothing_to_train",
       [](Wrong& w) {
         for (auto& parameter : w.net->parameters()) parameter.set_requires_grad(false);
         w.attach();
       }},
      {"attached_twice",
       [](Wrong& w) {
         const auto first = w.attach();
         w.attach();
       }},
      {"attached_twice_on_one_rank",
       [](Wrong& w) {
         Net other;
         const DistributedDataParallel first(w.odd ? w.net : other, w.context);
         w.attach();
       }},
      {"empty_module", [](Wrong& w) { DistributedDataParallel(Net(nullptr), w.context); }},
      {"delayed_parameter_that_is_not_there",
       [](Wrong& w) { w.attach({.delay_all_reduce_named_params = {"fc.wait"}}); }},
      {"ignored_name_that_is_not_there",
       [](Wrong& w) {
         w.attach({.parameters_to_ignore = {"out.bias", "fc.wait"}});
       }},
      {"sparse_parameter",
       [](Wrong& w) {
         const at::Tensor sparse = at::ones({2, 2}).to_sparse().requires_grad_();
         DistributedDataParallel(NamedTensors{{"a", w.net->fc->weight}, {"table", sparse}}, w.context);
       }},
      {"sparse_parameter_on_one_rank",
       [](Wrong& w) {
         const at::Tensor dense = at::ones({2, 2});
         const at::Tensor table = (w.odd ? dense.to_sparse() : dense).requires_grad_();
         DistributedDataParallel(NamedTensors{{"table", table}}, w.context);
       }},
      {"expanded_parameter",
       [](Wrong& w) {
         const at::Tensor expanded = at::ones({1, 3}).expand({2, 3}).requires_grad_();
         DistributedDataParallel(NamedTensors{{"a", w.net->fc->weight}, {"table", expanded}}, w.context);
       }},
      {"expanded_buffer_on_one_rank",
       [](Wrong& w) {
         w.net->register_buffer("mean", w.odd ? at::ones({1}).expand({3}) : at::ones({3}));
         w.attach();
       }},
      {"list_with_a_name_twice",
       [](Wrong& w) {
         const auto& [weight, bias] = std::tie(w.net->fc->weight, w.net->fc->bias);
         DistributedDataParallel(NamedTensors{{"a", weight}, {"a", bias}}, w.context);
       }},
      {"list_with_a_tensor_twice",
       [](Wrong& w) {
         DistributedDataParallel(NamedTensors{{"a", w.net->fc->weight}, {"b", w.net->fc->weight}}, w.context);
       }},
      {"list_with_a_tensor_missing_on_one_rank",
       [](Wrong& w) {
         const at::Tensor weight = w.net->fc->weight, other = weight.detach().clone().requires_grad_();
         DistributedDataParallel(NamedTensors{{"a", weight}, {"b", w.odd ? at::Tensor() : other}}, w.context);
       }},
      {"list_with_a_tensor_that_is_not_there",
       [](Wrong& w) {
         DistributedDataParallel(NamedTensors{{"a", at::Tensor()}}, w.context);
       }},
      {"list_with_a_tensor_that_is_no_leaf",
       [](Wrong& w) {
         DistributedDataParallel(NamedTensors{{"a", w.net->fc->weight * 2}}, w.context);
       }},
  };
  return kPrograms;
}

const std::vector<std::pair<std::string, Program>>& programs_that_edit() {
  static const std::vector<std::pair<std::string, Program>> kPrograms{
      {"layer_added_without_refresh",
       [](Wrong& w) { w.edit([&] { w.net->register_module("extra", torch::nn::Linear(2, 2)); }); }},
      {"layer_added_on_one_rank_without_refresh",
       [](Wrong& w) {
         w.edit([&] {
           if (w.odd) w.net->register_module("extra", torch::nn::Linear(2, 2));
         });
       }},
      {"layer_of_buffers_added_without_refresh",
       [](Wrong& w) { w.edit([&] { w.net->register_module("norm", Wrong::buffers_alone()); }); }},
      {"layer_of_buffers_added_on_one_rank_without_refresh",
       [](Wrong& w) {
         w.edit([&] {
           if (w.odd) w.net->register_module("norm", Wrong::buffers_alone());
         });
       }},
      {"layer_of_buffers_removed_without_refresh",
       [](Wrong& w) {
         w.net->register_module("norm", Wrong::buffers_alone());
         w.edit([&] { w.net->unregister_module("norm"); });
       }},
      {"layer_added_on_one_rank_with_refresh",
       [](Wrong& w) {
         auto replica = w.attach();
         if (w.odd) w.net->register_module("extra", torch::nn::Linear(2, 2));
         replica.refresh();
       }},
      {"layer_replaced_on_one_rank_with_refresh",
       [](Wrong& w) {
         auto replica = w.attach();
         if (w.odd) w.net->fc = w.net->replace_module("fc", torch::nn::Linear(6, 4));
         replica.refresh();
       }},
      {"everything_replaced_without_refresh",
       [](Wrong& w) {
         w.edit([&] {
           w.net->fc = w.net->replace_module("fc", torch::nn::Linear(6, 4));
           w.net->out = w.net->replace_module("out", torch::nn::Linear(4, 3));
         });
       }},
      {"layer_removed_without_refresh",
       [](Wrong& w) {
         w.net->register_module("extra", torch::nn::Linear(2, 2));
         w.edit([&] { w.net->unregister_module("extra"); });
       }},
      {"unfrozen_without_refresh",
       [](Wrong& w) {
         w.net->fc->bias.set_requires_grad(false);
         w.edit([&] { w.net->fc->bias.set_requires_grad(true); });
       }},
      {"converted_without_refresh",
       [](Wrong& w) {
         auto replica = w.attach();
         Wrong::backward(replica);
         w.net->to(at::kDouble);
         replica(batch(0, 0, at::kDouble).data).square().mean().backward();
       }},
      // From here on the module is called directly, so no code of ours runs in forward.
      {"converted_and_called_by_its_own_name",
       [](Wrong& w) {
         const auto replica = w.attach();
         w.net->to(at::kDouble);
         w.net(batch(0, 0, at::kDouble).data).square().mean().backward();
       }},
      {"converted_on_one_rank",
       [](Wrong& w) {
         const auto replica = w.attach();
         const auto dtype = w.odd ? at::kDouble : at::kFloat;
         w.net->to(dtype);
         w.net(batch(0, 0, dtype).data).square().mean().backward();
       }},
      {"one_tensor_set_to_another_dtype_on_one_rank",
       [](Wrong& w) {
         at::Tensor a = at::ones({3}).requires_grad_(), b = at::ones({3}).requires_grad_();
         const DistributedDataParallel replica(NamedTensors{{"a", a}, {"b", b}}, w.context);
         if (w.odd) b.set_data(at::ones({3}, at::kDouble));
         (a * b.to(at::kFloat)).sum().backward();
       }},
      {"converted_after_forward",
       [](Wrong& w) {
         const auto replica = w.attach();
         const at::Tensor loss = w.net(batch(0, 0).data).square().mean();
         w.net->fc->bias.set_data(w.net->fc->bias.to(at::kDouble));
         loss.backward();
       }},
      {"resized",
       [](Wrong& w) {
         at::Tensor a = at::ones({1, 3}).requires_grad_();
         const DistributedDataParallel replica(NamedTensors{{"a", a}}, w.context);
         a.set_data(at::ones({2, 3}));
         a.sum().backward();
       }},
      {"converted_and_resized",
       [](Wrong& w) {
         at::Tensor a = at::ones({3}).requires_grad_();
         const DistributedDataParallel replica(NamedTensors{{"a", a}}, w.context);
         a.set_data(at::ones({50, 3}, at::kDouble));
         a.sum().backward();
       }},
      {"converted_with_autograd_grad",
       [](Wrong& w) {
         const auto replica = w.attach();
         w.net->to(at::kDouble);
         torch::autograd::grad({w.net(batch(0, 0, at::kDouble).data).sum()}, {w.net->fc->weight});
       }},
      {"everything_replaced_and_called_by_its_own_name",
       [](Wrong& w) {
         const auto replica = w.attach();
         w.net->fc = w.net->replace_module("fc", torch::nn::Linear(6, 4));
         w.net->out = w.net->replace_module("out", torch::nn::Linear(4, 3));
         w.net(batch(0, 0).data).square().mean().backward();
       }},
      {"list_whose_tensors_were_replaced",
       [](Wrong& w) {
         at::Tensor a = at::ones({3}).requires_grad_(), b = at::ones({3}).requires_grad_();
         const DistributedDataParallel replica(NamedTensors{{"a", a}, {"b", b}}, w.context);
         (a * b).sum().backward();
         a = at::zeros({3}).requires_grad_(), b = at::zeros({3}).requires_grad_();
         (a * b).sum().backward();
       }},
      {"list_with_a_tensor_replaced_on_one_rank",
       [](Wrong& w) {
         at::Tensor a = at::ones({3}).requires_grad_(), b = at::ones({3}).requires_grad_();
         DistributedDataParallel replica(NamedTensors{{"a", a}, {"b", b}}, w.context);
         replica.refresh();
         if (w.odd) b = at::zeros({3}).requires_grad_();
         (a * b).sum().backward();
       }},
      {"head_of_a_frozen_body_replaced_on_one_rank",
       [](Wrong& w) {
         for (auto& parameter : w.net->fc->parameters()) parameter.set_requires_grad(false);
         const auto replica = w.attach();
         if (w.odd) w.net->out = w.net->replace_module("out", torch::nn::Linear(4, 3));
         w.net(batch(0, 0).data).square().mean().backward();
       }},
      {"head_of_a_frozen_body_replaced_and_gradients_kept_for_a_step",
       [](Wrong& w) {
         for (auto& parameter : w.net->fc->parameters()) parameter.set_requires_grad(false);
         auto replica = w.attach();
         w.net->out = w.net->replace_module("out", torch::nn::Linear(4, 3));
         if (const auto guard = replica.no_sync(); true) w.net(batch(0, 0).data).square().mean().backward();
         replica.reduce_gradients();
       }},
      {"body_unfrozen_and_head_frozen",
       [](Wrong& w) {
         for (auto& parameter : w.net->fc->parameters()) parameter.set_requires_grad(false);
         const auto replica = w.attach();
         for (auto& parameter : w.net->fc->parameters()) parameter.set_requires_grad(true);
         for (auto& parameter : w.net->out->parameters()) parameter.set_requires_grad(false);
         w.net(batch(0, 0).data).square().mean().backward();
       }},
      {"edited_on_one_rank_then_broadcast",
       [](Wrong& w) {
         auto replica = w.attach();
         if (w.odd) w.net->register_module("extra", torch::nn::Linear(2, 2));
         replica.broadcast_parameters();
       }},
      {"refreshed_on_one_rank_while_the_others_average",  // both begin with bytes of the same length
       [](Wrong& w) {
         auto replica = w.attach();
         w.odd ? replica.refresh() : replica.average_parameters(1);
       }},
      {"refreshed_on_one_rank_while_the_others_train",
       [](Wrong& w) {
         auto replica = w.attach();
         w.odd ? replica.refresh() : Wrong::backward(replica);
       }},
      {"refreshed_while_gradients_wait",
       [](Wrong& w) {
         auto replica = w.attach();
         const auto guard = replica.no_sync();
         Wrong::backward(replica, 2);
         replica.refresh();
       }},
      {"refreshed_within_join",
       [](Wrong& w) {
         auto replica = w.attach();
         replica.join([&] { replica.refresh(); });
       }},
      {"averaged_with_a_negative_weight",
       [](Wrong& w) {
         auto replica = w.attach();
         replica.average_parameters(w.odd ? -1 : 1);
       }},
      {"diverged",
       [](Wrong& w) {
         auto replica = w.attach();
         replica.check_divergence_every(2);
         if (w.odd) at::NoGradGuard(), w.net->fc->weight[1][2] = 7;
         Wrong::backward(replica, 2);
       }},
  };
  return kPrograms;
}

const std::vector<std::pair<std::string, Program>>& programs_that_train() {
  static const std::vector<std::pair<std::string, Program>> kPrograms{
      {"one_backward_fewer",
       [](Wrong& w) {
         auto replica = w.attach();
         Wrong::backward(replica, w.odd ? 2 : 3);
         w.context.group().barrier();
       }},
      {"one_backward_more",
       [](Wrong& w) {
         auto replica = w.attach();
         Wrong::backward(replica, w.odd ? 3 : 2);
         w.context.group().barrier();
       }},
      {"backward_where_the_loss_is_large",
       [](Wrong& w) {
         auto replica = w.attach();
         for (int step = 0; step < 3; ++step) {
           const at::Tensor loss = replica(batch(step, 0).data).square().mean() + (step == 2 && w.odd ? 10 : 1);
           if (step < 2 || loss.item<double>() > 5) loss.backward();
         }
         w.context.group().barrier();
       }},
      {"early_stop_by_the_own_loss",
       [](Wrong& w) {
         auto replica = w.attach();
         for (int step = 0; step < 3; ++step) {
           const at::Tensor loss = replica(batch(step, 0).data).square().mean() + (step == 2 && w.odd ? 0 : 10);
           if (loss.item<double>() < 5) break;
           loss.backward();
         }
         w.context.group().barrier();
       }},
      {"stop_of_the_inner_loop_by_the_own_divergence",  // as in PPO
       [](Wrong& w) {
         auto replica = w.attach();
         Wrong::backward(replica);
         for (int pass = 0; pass < 2; ++pass) {
           const at::Tensor policy = replica(batch(pass, 0).data);
           if (policy.square().mean().item<double>() + (pass == 1 && w.odd ? 10 : 0) > 5) break;
           policy.mean().backward();
         }
         w.context.group().barrier();
       }},
      {"hooks_of_two_types",
       [](Wrong& w) {
         auto replica = w.attach();
         replica.register_comm_hook(w.odd ? nullptr : fp16_compress_hook());
       }},
      {"hooks_of_other_options",
       [](Wrong& w) {
         auto replica = w.attach();
         replica.register_comm_hook(fp16_compress_hook(power_sgd_hook({.random_seed = w.odd ? 2u : 1u})));
       }},
      {"no_sync_on_one_rank",
       [](Wrong& w) {
         auto replica = w.attach();
         if (w.odd) {
           const auto guard = replica.no_sync();
           Wrong::backward(replica);
         }
         Wrong::backward(replica, 2);
       }},
      {"accumulation_differs",
       [](Wrong& w) {
         auto replica = w.attach();
         const auto accumulation = replica.accumulate(w.odd ? 3 : 2);
         Wrong::backward(replica, 6);
       }},
      {"joined_on_some_ranks",
       [](Wrong& w) {
         auto replica = w.attach();
         if (w.odd) return Wrong::backward(replica, 3);
         replica.join([&] { Wrong::backward(replica, 2); });
       }},
      {"early_termination_that_shall_throw",
       [](Wrong& w) {
         auto replica = w.attach();
         replica.join([&] { Wrong::backward(replica, w.odd ? 3 : 2); }, {.throw_on_early_termination = true});
       }},
      {"twins_in_another_order",
       [](Wrong& w) {
         auto replica = w.attach();
         Net twin;
         DistributedDataParallel other(twin, w.context);
         Wrong::backward(w.odd ? other : replica);
         Wrong::backward(w.odd ? replica : other);
       }},
      {"twins_averaged_in_another_order",
       [](Wrong& w) {
         auto replica = w.attach();
         Net twin;
         DistributedDataParallel other(twin, w.context);
         (w.odd ? other : replica).average_parameters();
       }},
      {"twins_broadcast_in_another_order",
       [](Wrong& w) {
         auto replica = w.attach();
         Net twin;
         DistributedDataParallel other(twin, w.context);
         (w.odd ? other : replica).broadcast_parameters();
       }},
      {"twins_refreshed_in_another_order",
       [](Wrong& w) {
         auto replica = w.attach();
         Net twin;
         DistributedDataParallel other(twin, w.context);
         (w.odd ? other : replica).refresh();
       }},
      {"used_after_it_was_moved",
       [](Wrong& w) {
         auto replica = w.attach();
         const auto moved = std::move(replica);
         replica.refresh();  // NOLINT
       }},
      {"called_after_it_was_moved",
       [](Wrong& w) {
         auto replica = w.attach();
         const auto moved = std::move(replica);
         replica(batch(0, 0).data);  // NOLINT
       }},
      {"reached_into_after_it_was_moved",
       [](Wrong& w) {
         DistributedDataParallel replica(w.net.ptr(), w.context);
         const auto moved = std::move(replica);
         replica->zero_grad();  // NOLINT
       }},
      {"create_graph",
       [](Wrong& w) {
         auto replica = w.attach();
         replica(batch(0, 0).data).square().mean().backward({}, false, /*create_graph=*/true);
       }},
      {"sparse_gradient",
       [](Wrong& w) {
         struct Table : torch::nn::Module {
           torch::nn::Embedding table{register_module("table", torch::nn::Embedding(5, 3))};
         };
         auto model = std::make_shared<Table>();
         const DistributedDataParallel replica(model, w.context);
         model->table->options.sparse(w.odd);  // as it attaches, ranks compare the layers' options
         model->table(at::tensor({1, 3}, at::kLong)).sum().backward();
       }},
      {"went_on_after_a_failed_backward",
       [](Wrong& w) {
         auto replica = w.attach({.first_bucket_cap_mb = 1e-6, .bucket_cap_mb = 1e-6});
         Wrong::backward(replica);
         const auto fails = [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("on purpose"); };
         at::Tensor hidden = torch::tanh(w.net->fc(batch(1, 0).data));
         if (w.odd) hidden.register_hook(fails);
         try {
           w.net->out(hidden).sum().backward();
         } catch (const std::runtime_error& error) {
           if (error.what() != std::string("on purpose")) throw;
         }
         Wrong::backward(replica);
       }},
      {"clipped_before_the_reduction",
       [](Wrong& w) {
         auto replica = w.attach();
         const auto guard = replica.no_sync();
         Wrong::backward(replica, 2);
         replica.clip_grad_norm(1);
       }},
      {"autograd_grad_of_a_parameter",
       [](Wrong& w) {
         auto replica = w.attach();
         torch::autograd::grad({replica(batch(0, 0).data).sum()}, {w.net->fc->weight});
       }},
      {"forward_after_the_context",
       [](Wrong& w) {
         auto replica = w.attach();
         { const Context gone = std::move(w.context); }
         replica(batch(0, 0).data);
       }},
      {"weight_that_is_no_number",
       [](Wrong& w) {
         auto replica = w.attach({.reduction = GradientReduction::kWeightedMean});
         replica.set_weight(std::nan(""));
       }},
      {"weight_without_weighted_mean",
       [](Wrong& w) {
         auto replica = w.attach();
         replica.set_weight(3);
       }},
      {"broadcast_from_no_rank",
       [](Wrong& w) {
         auto replica = w.attach();
         replica.broadcast_parameters(7);
       }},
      {"accumulation_of_nothing",
       [](Wrong& w) {
         auto replica = w.attach();
         const auto accumulation = replica.accumulate(0);
       }},
  };
  return kPrograms;
}

std::map<std::string, Program> all_programs() {
  std::map<std::string, Program> programs;
  for (const auto* list : {&programs_that_attach(), &programs_that_edit(), &programs_that_train()})
    programs.insert(list->begin(), list->end());
  return programs;
}

class WrongPrograms : public ::testing::TestWithParam<testing::GoldenCase> {};
INSTANTIATE_TEST_SUITE_P(All, WrongPrograms, ::testing::ValuesIn(testing::golden_cases(all_programs())),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(WrongPrograms, EndOnEveryRankWithTheirMessage) {
  testing::expect_golden_case<Wrong>(GetParam(), "tests/data_parallel/wrong_programs.txt",
                                     all_programs().at(GetParam().name));
}

}  // namespace
}  // namespace lockstep::wrong_programs_test
