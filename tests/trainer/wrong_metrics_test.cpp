#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "checkpoint/failure.h"
#include "support/ranks.h"
#include "support/wrong_table.h"

// Metrics that count something else than their values say, and averages of something else than the model: each is an
// error on all ranks.

namespace lockstep::wrong_metrics_test {
namespace {

using namespace testing;  // NOLINT

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// A user's own, as many numbers as it is told.
class Histogram : public Metric {
 public:
  explicit Histogram(int64_t bins) : Metric(bins) {}
  void update(int64_t bin) { begin_update()[bin] += 1; }
  void append_values(const std::string& name, MetricValues& values) const override {
    for (size_t i = 0; i < numbers().size(); ++i) values.emplace_back(name + std::to_string(i), numbers()[i]);
  }
};
/// With what must be equal on all ranks.
class Named : public Histogram {
 public:
  explicit Named(std::string options) : Histogram(2), options_(std::move(options)) {}
  std::string options() const override { return options_; }

 private:
  std::string options_;
};

/// One rank's side of a wrong program.
struct Wrong {
  explicit Wrong(Context& the_context) : context(the_context) {}

  void reduce() { metrics.reduce(context.group()); }
  /// What goes into the Ema, in place of what it saves.
  void load(const std::string& name, const at::Tensor& value) {
    auto state = ema.state_dict().toGenericDict();
    StateDict averages = to_state_dict(state.at(std::string("averages")).toList().get(0));
    averages.contains(name) ? averages[name] = value : averages.insert(name, value);
    c10::impl::GenericList list(c10::AnyType::get());
    list.push_back(to_object(averages));
    state.insert_or_assign(std::string("averages"), list);
    load_state(state);
  }
  void load_state(const c10::IValue& state) {
    const auto of = [this] { return hash(ema.averaged_state()) + hash(lockstep::state_dict(*net)); };
    const std::string before = of();
    try {
      ema.load_state_dict(state);
    } catch (...) {
      EXPECT_EQ(of(), before) << "a refused state has changed the averages";
      throw;
    }
  }
  c10::impl::GenericDict state() const { return ema.state_dict().toGenericDict(); }
  void trained(int updates = 3) {
    const at::NoGradGuard no_grad;
    for (int i = 0; i < updates; ++i) {
      for (auto& parameter : net->parameters()) parameter.add_(1);
      ema.update();
    }
  }

  Context& context;
  const bool odd = context.rank() == context.world_size() - 1;  ///< the last rank is the one that differs
  Metrics metrics;
  torch::nn::Sequential net{torch::nn::Linear(3, 2), torch::nn::Linear(2, 1)};
  Ema ema{*net, {.decays = {0.5}}};
};

using Programs = std::vector<TabledProgram<Wrong>>;

const char* const kDiffer = "the metrics cannot be reduced, because ranks count different things: metric ";

Programs of_metrics() {
  const auto differ = [](const std::string& rest, const std::string& odd, int place = 0) {
    return kDiffer + std::to_string(place) + " is `" + rest + "` on {rest} and `" + odd + "` on {odd}";
  };
  return {
      {"sized_by_rank_before_a_mean",
       differ("bins: lockstep::wrong_metrics_test::(anonymous namespace)::Histogram, 2 numbers",
              "bins: lockstep::wrong_metrics_test::(anonymous namespace)::Histogram, 3 numbers"),
       [](Wrong& w) {
         w.metrics.add("bins", Histogram(w.odd ? 3 : 2)).update(1);
         w.metrics.add("loss", Mean()).update(7.0);
         w.reduce();
       }},
      {"much_larger_on_one_rank", kDiffer + std::string(" ... 2 numbers` on {rest} ... 2000 numbers` on {odd}"),
       [](Wrong& w) { w.metrics.add("bins", Histogram(w.odd ? 2000 : 2)).update(1), w.reduce(); }},
      {"two_that_make_up_for_each_other", kDiffer + std::string(" ... 2 numbers` on {rest} ... 3 numbers` on {odd}"),
       [](Wrong& w) {
         w.metrics.add("first", Histogram(w.odd ? 3 : 2)).update(1);
         w.metrics.add("second", Histogram(w.odd ? 2 : 3)).update(1);
         w.reduce();
       }},
      {"other_types", differ("a: lockstep::Mean, 2 numbers", "a: lockstep::Perplexity, 2 numbers"),
       [](Wrong& w) {
         if (w.odd)
           w.metrics.add("a", Perplexity()).update(1.0);
         else
           w.metrics.add("a", Mean()).update(1.0);
         w.reduce();
       }},
      {"other_names", differ("a: lockstep::Mean, 2 numbers", "b: lockstep::Mean, 2 numbers"),
       [](Wrong& w) { w.metrics.add(w.odd ? "b" : "a", Mean()).update(1.0), w.reduce(); }},
      {"another_order", differ("a: lockstep::Mean, 2 numbers", "b: lockstep::Mean, 2 numbers"),
       [](Wrong& w) {
         for (const char* name : {w.odd ? "b" : "a", w.odd ? "a" : "b"}) w.metrics.add(name, Mean()).update(*name);
         w.reduce();
       }},
      {"one_more", differ("nothing (it has 1)", "b: lockstep::Mean, 2 numbers", 1),
       [](Wrong& w) {
         w.metrics.add("a", Mean()).update(1.0);
         if (w.odd) w.metrics.add("b", Mean()).update(1.0);
         w.reduce();
       }},
      {"none_on_one_rank", kDiffer + std::string("0 is `a: lockstep::Mean, 2 numbers` on {rest} and `nothing"),
       [](Wrong& w) {
         if (!w.odd) w.metrics.add("a", Mean()).update(1.0);
         w.reduce();
       }},
      {"other_top_k", kDiffer + std::string("0 is `a: lockstep::Accuracy(top_k 1 ... top_k 5"),
       [](Wrong& w) { w.metrics.add("a", Accuracy({.top_k = w.odd ? 5 : 1})), w.reduce(); }},
      {"other_ignore_index", kDiffer + std::string(" ... ignore_index -100 ... ignore_index 0"),
       [](Wrong& w) { w.metrics.add("a", Accuracy({.ignore_index = w.odd ? 0 : -100})), w.reduce(); }},
      {"other_classes", kDiffer + std::string(" ... 3 classes ... 4 classes"),
       [](Wrong& w) { w.metrics.add("a", ConfusionMatrix(w.odd ? 4 : 3)), w.reduce(); }},
      {"other_options_of_ones_own", kDiffer + std::string(" ... Named(by day) ... Named(by night)"),
       [](Wrong& w) { w.metrics.add("a", Named(w.odd ? "by night" : "by day")), w.reduce(); }},
      {"options_that_look_like_a_line", kDiffer + std::string("0 is "),
       [](Wrong& w) { w.metrics.add("a", Named(w.odd ? "x\ny" : "x")), w.reduce(); }},
      {"failed_on_one_rank", "",
       [](Wrong& w) {
         w.metrics.add("a", Mean()).update(1.0);
         if (w.odd) return w.metrics.reduce_failed(w.context.group());
         EXPECT_NE(failure([&] { w.reduce(); }).find("failed before; see its own message for the reason"),
                   std::string::npos);
       }},
      {"mean_of_an_undefined_tensor", "Mean: the value is an undefined tensor",
       [](Wrong& w) { w.metrics.add("a", Mean()).update(at::Tensor()); }},
      {"mean_of_a_tensor_that_was_moved_from", "Mean: the value is an undefined tensor",
       [](Wrong& w) {
         at::Tensor loss = at::ones({});
         const at::Tensor kept = std::move(loss);
         w.metrics.add("a", Mean()).update(loss, 3);  // NOLINT
       }},
      {"perplexity_of_an_undefined_tensor", "Mean: the value is an undefined tensor",
       [](Wrong& w) { w.metrics.add("a", Perplexity()).update(at::Tensor()); }},
      {"weight_below_zero", "Mean: the weight is -1", [](Wrong& w) { w.metrics.add("a", Mean()).update(1.0, -1); }},
      {"tensor_with_a_weight_below_zero", "Mean: the weight is -1",
       [](Wrong& w) { w.metrics.add("a", Mean()).update(at::ones({2}), -1); }},
      {"complex_mean", "Mean: the value is a complex number",
       [](Wrong& w) { w.metrics.add("a", Mean()).update(at::ones({2}, at::kComplexFloat)); }},
      {"target_that_is_no_class", " ... ",
       [](Wrong& w) {
         w.metrics.add("a", Accuracy()).update(at::ones({2, 3}), at::full({2}, 7, at::kLong));
       }},
      {"target_of_another_length", " ... ",
       [](Wrong& w) {
         w.metrics.add("a", Accuracy()).update(at::ones({2, 3}), at::zeros({3}, at::kLong));
       }},
      {"accuracy_of_undefined_scores", " ... ",
       [](Wrong& w) { w.metrics.add("a", Accuracy()).update(at::Tensor(), at::zeros({3}, at::kLong)); }},
      {"accuracy_of_an_undefined_target", " ... ",
       [](Wrong& w) {
         w.metrics.add("a", Accuracy()).update(at::ones({2, 3}), at::Tensor());
       }},
      {"matrix_of_an_undefined_target", " ... ",
       [](Wrong& w) {
         w.metrics.add("a", ConfusionMatrix(3)).update(at::ones({2, 3}), at::Tensor());
       }},
      {"matrix_of_undefined_scores", " ... ",
       [](Wrong& w) { w.metrics.add("a", ConfusionMatrix(3)).update(at::Tensor(), at::zeros({2}, at::kLong)); }},
      {"matrix_of_more_classes", " ... ",
       [](Wrong& w) {
         w.metrics.add("a", ConfusionMatrix(3)).update(at::ones({2, 4}), at::zeros({2}, at::kLong));
       }},
      {"matrix_of_a_prediction_that_is_no_class", " ... ",
       [](Wrong& w) {
         w.metrics.add("a", ConfusionMatrix(3)).update(at::full({2}, 3, at::kLong), at::zeros({2}, at::kLong));
       }},
      {"matrix_of_no_classes", " ... ", [](Wrong& w) { w.metrics.add("a", ConfusionMatrix(0)); }},
      {"top_zero", " ... ", [](Wrong& w) { w.metrics.add("a", Accuracy({.top_k = 0})); }},
      {"top_k_above_the_classes", " ... ",
       [](Wrong& w) {
         w.metrics.add("a", Accuracy({.top_k = 4})).update(at::ones({2, 3}), at::zeros({2}, at::kLong));
       }},
      {"fewer_numbers_than_none", "Metric: it has -1 numbers", [](Wrong& w) { w.metrics.add("a", Histogram(-1)); }},
      {"the_same_name_twice", "Metrics: `a` was already added",
       [](Wrong& w) { w.metrics.add("a", Mean()), w.metrics.add("a", Perplexity()); }},
      {"uneven_counts", "",
       [](Wrong& w) {
         auto& mean = w.metrics.add("a", Mean());
         w.metrics.add("bins", Histogram(100));
         for (int i = 0; i < w.context.rank(); ++i) mean.update(3.0);
         w.reduce();
         EXPECT_EQ(mean.value(), 3);
       }},
  };
}

Programs of_averages() {
  const at::TensorOptions meta(at::kMeta);
  const auto refused = [](const std::string& what) { return "the averages do not fit the model: ... " + what; };
  const auto edit = [](const std::function<void(torch::nn::Sequential&)>& change, int updates, int after = 1) {
    return [=](Wrong& w) {
      w.trained(updates);
      change(w.net);
      for (int i = 0; i < after; ++i) w.ema.update();
    };
  };
  const std::string is_not = "Ema::update(): `";
  return {
      {"layer_added_before_the_first_update", is_not + "2.weight` has changed since the Ema was made",
       edit([](auto& net) { net->push_back(torch::nn::Linear(1, 1)); }, 0)},
      {"layer_added_after_an_update", is_not + "2.weight` has changed since the Ema was made",
       edit([](auto& net) { net->push_back(torch::nn::Linear(1, 1)); }, 1)},
      {"layer_replaced_after_updates", is_not + "1.weight` has changed since the Ema was made",
       edit([](auto& net) { net->replace_module("1", torch::nn::Linear(2, 1).ptr()); }, 4)},
      {"layer_removed_after_updates", "Ema::update(): the module no longer has `1.bias`",
       edit([](auto& net) { net->unregister_module("1"); }, 4)},
      {"parameter_added_to_a_layer", is_not + "1.scale` has changed since",
       edit([](auto& net) { net->ptr(1)->register_parameter("scale", at::ones({1})); }, 2)},
      {"buffer_added", is_not + "0.seen` has changed since",
       edit([](auto& net) { net->ptr(0)->register_buffer("seen", at::zeros({1})); }, 2)},
      {"in_a_large_model", is_not + "300.weight` has changed since",
       [](Wrong&) {
         torch::nn::Sequential large;
         for (int i = 0; i < 300; ++i) large->push_back(torch::nn::Linear(1, 1));
         Ema ema(*large);
         ema.update();
         large->push_back(torch::nn::Linear(1, 1));
         for (int i = 0; i < 6; ++i) ema.update();  // it looks at 64 layers in turn
       }},
      {"layer_without_parameters_added", "", edit([](auto& net) { net->push_back(torch::nn::Tanh()); }, 2, 4)},
      {"data_set_and_frozen", "",
       edit(
           [](auto& net) {
             net->parameters()[0].set_data(at::ones({2, 3}));
             net->parameters()[1].set_requires_grad(false);
           },
           2, 4)},
      {"model_that_went", "",
       [](Wrong& w) {
         std::optional<Ema> ema;
         {
           torch::nn::Sequential gone(torch::nn::Linear(1, 1));
           ema.emplace(*gone);
         }
         for (int i = 0; i < 3; ++i) ema->update();
         EXPECT_EQ(ema->averaged_state().size(), 2U);
         w.trained();
       }},
      {"min_decay_above_the_decay", "Ema: min_decay is 0.999, above the decay 0.9",
       [](Wrong& w) {
         Ema(*w.net, {.decays = {0.9999, 0.9}, .warm_up = true, .min_decay = 0.999});
       }},
      {"min_decay_without_a_warm_up", "Ema: min_decay is 0.5, above the decay 0.1",
       [](Wrong& w) { Ema(*w.net, {.decays = {0.1}, .min_decay = 0.5}); }},
      {"min_decay_of_the_decay", "",
       [](Wrong& w) { Ema(*w.net, {.decays = {0.9}, .warm_up = true, .min_decay = 0.9}).update(); }},
      {"updates_after_a_step_below_zero", "Ema: ", [](Wrong& w) { Ema(*w.net, {.update_after_step = -1}); }},
      {"no_decay", "Ema: decays is empty", [](Wrong& w) { Ema(*w.net, {.decays = {}}); }},
      {"nothing_to_average", "Ema: the module has neither", [](Wrong&) { Ema(*torch::nn::Sequential()); }},
      {"updated_with_averages_in_place", "update() while the model has the averaged weights",
       [](Wrong& w) {
         const auto guard = w.ema.averaged_weights();
         w.ema.update();
       }},
      {"two_averages_in_place", "averaged_weights() while the model has the averaged weights",
       [](Wrong& w) {
         const auto guard = w.ema.averaged_weights();
         const auto other = w.ema.averaged_weights();
       }},
      {"an_average_that_there_is_not", "Ema: there is no average 1 of 1",
       [](Wrong& w) { const auto guard = w.ema.averaged_weights(1); }},
      {"loads_a_sparse_tensor", refused("1.bias (decay 0.5): Sparse given, Strided in the Ema"),
       [](Wrong& w) { w.trained(), w.load("1.bias", at::ones({1}).to_sparse()); }},
      {"loads_a_tensor_without_numbers", refused("1.bias (decay 0.5): given on the meta device"),
       [meta](Wrong& w) { w.trained(), w.load("1.bias", at::empty({1}, meta)); }},
      {"loads_an_undefined_tensor", refused("1.bias (decay 0.5): an undefined tensor given"),
       [](Wrong& w) { w.trained(), w.load("1.bias", at::Tensor()); }},
      {"loads_a_quantized_tensor", refused("1.bias (decay 0.5): quantized as given, but not in the Ema"),
       [](Wrong& w) { w.trained(), w.load("1.bias", at::quantize_per_tensor(at::ones({1}), 0.1, 0, at::kQInt8)); }},
      {"loads_another_shape", refused("shape of 1.bias (decay 0.5): [4] given, [1] in the model"),
       [](Wrong& w) { w.trained(), w.load("1.bias", at::ones({4})); }},
      {"loads_a_name_that_there_is_not", refused("unknown: 7.bias"),
       [](Wrong& w) { w.trained(), w.load("7.bias", at::ones({4})); }},
      {"loads_an_expanded_tensor", "", [](Wrong& w) { w.trained(), w.load("0.bias", at::ones({1}).expand({2})); }},
      {"loads_other_decays", "the state has averages with the decays [0.9], not of [0.5]",
       [](Wrong& w) { w.load_state(Ema(*w.net, {.decays = {0.9}}).state_dict()); }},
      {"loads_updates_below_zero", "the state of the averages has no number of `updates`",
       [](Wrong& w) {
         auto state = w.state();
         state.insert_or_assign(std::string("updates"), int64_t{-1});
         w.load_state(state);
       }},
      {"loads_a_list", "the state of the averages must be a dictionary",
       [](Wrong& w) { w.load_state(c10::impl::GenericList(c10::AnyType::get())); }},
      {"loads_averages_of_no_decay", refused("the numbers of averages and decays differ"),
       [](Wrong& w) {
         auto state = w.state();
         state.insert_or_assign(std::string("averages"), c10::impl::GenericList(c10::AnyType::get()));
         w.load_state(state);
       }},
      {"loads_texts", "expected a dictionary of tensors, found a String",
       [](Wrong& w) {
         auto state = w.state();
         c10::impl::GenericList list(c10::AnyType::get());
         list.push_back(std::string("text"));
         state.insert_or_assign(std::string("averages"), list);
         w.load_state(state);
       }},
      {"a_decay_of_nan", "Ema: a decay must be at least 0",
       [](Wrong& w) {
         Ema(*w.net, {.decays = {0.9, kNaN}});
       }},
  };
}

class WrongMetrics : public ::testing::TestWithParam<Engine> {
 protected:
  static void expect(const Programs& programs) {
    run_ranks(GetParam(), [&](Context& context) {
      expect_each_told(context, programs, [&](const std::string&) { return std::make_unique<Wrong>(context); });
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Engines, WrongMetrics, ::testing::ValuesIn(engines_of_wrong_programs()),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(WrongMetrics, OfWhatIsNotTheSame) { expect(of_metrics()); }
TEST_P(WrongMetrics, AveragesOfAnotherModel) { expect(of_averages()); }

}  // namespace
}  // namespace lockstep::wrong_metrics_test
