#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <memory>
#include <optional>

#include <ATen/core/List.h>
#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "base/state_memory.h"
#include "checkpoint/failure.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/wrong_table.h"

// Checkpoints that hold something else than the program expects, and saves to memory of ranks that are not alike: each
// is an error on all ranks.

namespace lockstep::wrong_resumes_test {
namespace {

using namespace testing;  // NOLINT
using torch::optim::AdamOptions;
using torch::optim::SGDOptions;
using Part = Checkpointer::Part;
using Scope = Checkpointer::Scope;

class Rows : public Dataset {
 public:
  explicit Rows(int64_t count) : count_(count) {}
  int64_t size() const override { return count_; }
  Batch get(at::ArrayRef<int64_t> indices) const override {
    const at::Tensor rows = at::tensor(indices, at::kLong).to(at::kFloat).unsqueeze(1).expand({-1, 3}).contiguous();
    return {rows, rows};
  }

 private:
  const int64_t count_;
};

/// In order.
struct InOrder : Sampler {
  explicit InOrder(int64_t count) : count_(count) {}
  int64_t size() const override { return count_; }
  std::vector<int64_t> order(int) override {
    std::vector<int64_t> all;
    for (int64_t i = 0; i < count_; ++i) all.push_back(i);
    return all;
  }
  const int64_t count_;
};

c10::IValue list_of(const std::vector<c10::IValue>& values) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const c10::IValue& value : values) list.push_back(value);
  return list;
}

/// One rank's side of a wrong program.
struct Wrong {
  using Add = std::function<void(Checkpointer&)>;

  Wrong(Context& the_context, std::string the_folder) : context(the_context), folder(std::move(the_folder)) {
    const at::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.fill_(0.5);
  }

  void save(const Add& add, CheckpointerOptions options = {}) {
    Checkpointer checkpointer(folder, context.group(), std::move(options));
    add(checkpointer);
    checkpointer.save(1);
    checkpointer.finish();
    context.group().barrier();
  }
  void resume(const Add& add) {
    Checkpointer checkpointer(folder, context.group());
    add(checkpointer);
    checkpointer.resume();
  }
  /// Saves `state`, and resumes it by the program's own `by`.
  void load(const c10::IValue& state, std::function<void(const c10::IValue&)> by, Scope scope = Scope::kAllRanks) {
    const Part part{.save = [state] { return state; }, .load = std::move(by)};
    save([&](Checkpointer& to) { to.add("part", part, scope); });
    resume([&](Checkpointer& to) { to.add("part", part, scope); });
  }
  /// Saves a loader in the middle of an epoch, and resumes it by another.
  void loaders(DataLoaderOptions saved, DataLoaderOptions resumed, int64_t rows = 24, int64_t rows_then = 24) {
    DataLoader first(Rows(rows), context, saved), second(Rows(rows_then), context, resumed);
    for ([[maybe_unused]] auto& batch : first) {
      save([&](Checkpointer& to) { to.add("loader", first); });
      break;
    }
    resume([&](Checkpointer& to) { to.add("loader", second); });
  }
  template <typename First, typename Second>
  void optimizers(const First& first, const Second& second) {
    auto one = first(net->parameters()), other = second(net->parameters());
    net->forward(at::ones({2, 3})).sum().backward();
    one.step();
    save([&](Checkpointer& to) { to.add("optimizer", one); });
    resume([&](Checkpointer& to) { to.add("optimizer", other); });
  }

  /// Loads the state of an Adam in which one tensor is another. If that is refused, nothing may have changed.
  void load_into_adam(const std::string& name, const at::Tensor& tensor) {
    torch::optim::Adam adam(net->parameters(), AdamOptions(0.1));
    net->forward(at::ones({2, 3})).sum().backward();
    adam.step();
    StateDict given;
    for (const auto& item : lockstep::state_dict(adam))
      given.insert(item.key(), item.key() == name ? tensor : item.value().detach() * 2);
    const std::string before = hash(lockstep::state_dict(adam));
    try {
      load_state_dict(adam, given);
    } catch (...) {
      EXPECT_EQ(hash(lockstep::state_dict(adam)), before) << "a refused state has changed the optimizer";
      throw;
    }
  }

  // To memory.

  /// Steps with `value` as a part.
  void in_memory(const std::function<void(Checkpointer&)>& body) {
    Checkpointer checkpointer(folder, context.group(), {.memory_every_n_steps = 1});
    checkpointer.add("part", {.save = [this] { return value; }, .load = [](const auto&) {}}).add("rate", rate);
    body(checkpointer);
  }
  void differs_in_step_2(const c10::IValue& mine, const c10::IValue& others) {
    in_memory([&](Checkpointer& checkpointer) {
      value = others;
      checkpointer.step(1);
      if (odd) value = mine;
      checkpointer.step(2);
    });
  }

  Context& context;
  const std::string folder;
  const bool odd = context.rank() == context.world_size() - 1;  ///< the last rank is the one that differs
  torch::nn::Linear net{3, 2};
  c10::IValue value = at::ones({40});
  double rate = 0.1;
};

using Programs = std::vector<TabledProgram<Wrong>>;

/// All ranks say the same.
std::string cannot_resume(const std::string& why) {
  return "cannot resume from  ...  rank 0: ... " + why + " ...  rank 1: the same as on rank 0";
}

Programs of_parts() {
  const auto refuses = [](const std::string& has) {
    return cannot_resume("`part`: the checkpoint has " + has + " here, which the part's load() does not take: ");
  };
  const auto to_tensor = [](const c10::IValue& state) { (void)state.toTensor(); };
  const auto to_int = [](const c10::IValue& state) { (void)state.toInt(); };
  const auto load = [](const c10::IValue& value, const auto& by) {
    return [=](Wrong& w) { w.load(value, [by](const c10::IValue& state) { by(state); }); };
  };
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  dict.insert(std::string("a"), 1);
  dict.insert(std::string("b"), 2.5);
  Programs programs{
      {"text_for_a_tensor", refuses("a String"), load(std::string("text"), to_tensor)},
      {"text_for_a_number", refuses("a String"), load(std::string("text"), to_int)},
      {"number_for_a_tensor", refuses("a Int"), load(int64_t{3}, to_tensor)},
      {"nothing_for_a_tensor", refuses("a None"), load(c10::IValue(), to_tensor)},
      {"number_for_a_text", refuses("a Double"), load(2.5, [](const auto& state) { (void)state.toStringRef(); })},
      {"tensor_for_a_number", refuses("a tensor (Float [4])"), load(at::ones({4}), to_int)},
      {"tensor_for_a_dictionary", refuses("a tensor (Long [2, 2])"),
       load(at::ones({2, 2}, at::kLong), [](const auto& state) { (void)state.toGenericDict(); })},
      {"dictionary_for_a_tensor", refuses("a dictionary with `a` `b`"), load(dict, to_tensor)},
      {"dictionary_for_a_list", refuses("a dictionary with `a` `b`"),
       load(dict, [](const auto& state) { (void)state.toList(); })},
      {"list_for_a_dictionary", refuses("a list of 2"),
       load(list_of({1, 2}), [](const auto& state) { (void)state.toGenericDict(); })},
      {"tensor_of_another_shape", refuses("a tensor (Float [4])"),
       load(at::ones({4}), [](const auto& state) { at::zeros({3}).copy_(state.toTensor()); })},
      {"key_that_there_is_not", refuses("a dictionary with `a` `b`"),
       load(dict, [](const auto& state) { (void)state.toGenericDict().at(std::string("c")); })},
      {"place_that_there_is_not", refuses("a list of 2"),
       load(list_of({1, 2}), [](const auto& state) { (void)state.toListRef()[0].toTensor(); })},
      {"bool_for_a_number", refuses("a Bool"), load(true, to_int)},
      {"ones_own_words", cannot_resume("`part`: the checkpoint has a Int here ... this is too old"),
       load(int64_t{3}, [](const auto&) { throw std::runtime_error("this is too old"); })},
      {"an_error_of_the_library", cannot_resume("`part`: expected a dictionary of tensors, found a Int"),
       load(int64_t{3}, [](const auto& state) { (void)to_state_dict(state); })},
      {"of_each_rank", refuses("a String"),
       [=](Wrong& w) {
         w.load(
             std::string("text"), [=](const auto& state) { to_tensor(state); }, Scope::kEachRank);
       }},
      {"of_rank_zero", refuses("a String"),
       [=](Wrong& w) {
         w.load(
             std::string("text"), [=](const auto& state) { to_tensor(state); }, Scope::kRankZero);
       }},
      {"on_one_rank", "cannot resume from  ... \n {odd}: ... the checkpoint has a String here",
       [=](Wrong& w) {
         w.load(std::string("text"), [&w](const auto& state) {
           if (w.odd) (void)state.toTensor();
         });
       }},
      {"part_that_was_not_saved", cannot_resume("`rate`: not in the checkpoint"),
       [](Wrong& w) {
         w.save([&](Checkpointer& to) { to.add("net", *w.net); });
         w.resume([&](Checkpointer& to) { to.add("net", *w.net).add("rate", w.rate); });
       }},
      {"part_that_is_not_resumed", "",
       [](Wrong& w) {
         w.save([&](Checkpointer& to) { to.add("net", *w.net).add("rate", w.rate); });
         w.resume([&](Checkpointer& to) { to.add("net", *w.net); });
       }},
      {"another_scope", cannot_resume("`rate`: not in the checkpoint"),
       [](Wrong& w) {
         w.save([&](Checkpointer& to) { to.add("rate", w.rate); });
         w.resume([&](Checkpointer& to) { to.add("rate", w.rate, Scope::kEachRank); });
       }},
      {"net_of_another_shape", cannot_resume("`net`: the state does not fit the module"),
       [](Wrong& w) {
         torch::nn::Linear other(3, 4);
         w.save([&](Checkpointer& to) { to.add("net", *w.net); });
         w.resume([&](Checkpointer& to) { to.add("net", *other); });
       }},
      {"save_that_fails_on_one_rank", "the state of step 1 cannot be saved:  ... {odd}: no state yet",
       [](Wrong& w) {
         const auto throws = [&] {
           if (w.odd) throw std::runtime_error("no state yet");
           return c10::IValue(1);
         };
         w.save([&](Checkpointer& to) { to.add("part", {.save = throws, .load = [](const auto&) {}}); });
       }},
      {"averages_in_a_list", " ... holds averaged weights now, and a resumed run would continue from them",
       [](Wrong& w) {
         Ema ema(*w.net);
         const auto guard = ema.averaged_weights();
         w.save([&](Checkpointer& to) {
           to.add("part", {.save = [&] { return list_of({1, list_of({w.net->weight})}); }, .load = [](const auto&) {}});
         });
       }},
  };
  return programs;
}

Programs of_states() {
  const auto sgd = [](double momentum) {
    return [=](const auto& parameters) { return torch::optim::SGD(parameters, SGDOptions(0.1).momentum(momentum)); };
  };
  const auto adam = [](bool amsgrad) {
    return [=](const auto& parameters) { return torch::optim::Adam(parameters, AdamOptions(0.1).amsgrad(amsgrad)); };
  };
  const auto adam_refuses = [](const std::string& what) { return "the state does not fit the optimizer ... " + what; };
  const auto loader = [](const std::string& what) {
    return cannot_resume("`loader`: the checkpoint was saved by a DataLoader " + what);
  };
  return {
      {"dataset_size", loader("whose dataset_size was 24, not 30"), [](Wrong& w) { w.loaders({}, {}, 24, 30); }},
      {"seed", loader("whose seed was 1, not 2"),
       [](Wrong& w) { w.loaders({.shuffle = true, .seed = 1}, {.shuffle = true, .seed = 2}); }},
      {"shuffle", loader("whose shuffle was 0, not 1"), [](Wrong& w) { w.loaders({}, {.shuffle = true}); }},
      {"drop_last", loader("whose "),
       [](Wrong& w) { w.loaders({.batch_size = 5, .drop_last = true}, {.batch_size = 5}); }},
      {"exactly_once", loader("whose "), [](Wrong& w) { w.loaders({}, {.exactly_once = true}, 25, 25); }},
      {"a_sampler", loader("without a sampler, but this one has a sampler"),
       [](Wrong& w) { w.loaders({}, {.sampler = std::make_shared<InOrder>(24)}); }},
      {"no_sampler", loader("with a sampler, but this one has none"),
       [](Wrong& w) { w.loaders({.sampler = std::make_shared<InOrder>(24)}, {}); }},
      {"a_shorter_sampler", loader("whose "),
       [](Wrong& w) {
         w.loaders({.sampler = std::make_shared<InOrder>(24)}, {.sampler = std::make_shared<InOrder>(12)});
       }},
      {"the_same_loader", "",
       [](Wrong& w) { w.loaders({.shuffle = true, .workers = 1}, {.shuffle = true, .workers = 2}); }},
      {"momentum_for_none", "", [=](Wrong& w) { w.optimizers(sgd(0.9), sgd(0.9)); }},
      {"sgd_for_adam", cannot_resume("`optimizer`: the state does not fit the optimizer"),
       [=](Wrong& w) { w.optimizers(adam(false), sgd(0.9)); }},
      {"adam_for_sgd", cannot_resume("`optimizer`: the state does not fit the optimizer"),
       [=](Wrong& w) { w.optimizers(sgd(0.9), adam(false)); }},
      {"groups",
       cannot_resume("`optimizer`: the state does not fit the optimizer ... 1 groups of parameters given, 2 in"),
       [=](Wrong& w) {
         w.optimizers(sgd(0.9), [&](const auto& parameters) {
           auto optimizer = sgd(0.9)(parameters);
           optimizer.add_param_group(torch::optim::OptimizerParamGroup({at::zeros({2}).requires_grad_()}));
           return optimizer;
         });
       }},
      {"adam_of_a_sparse_tensor", adam_refuses("1.exp_avg: Sparse given, Strided in the parameter"),
       [](Wrong& w) { w.load_into_adam("1.exp_avg", at::ones({2}).to_sparse()); }},
      {"adam_of_a_tensor_without_numbers", adam_refuses("1.exp_avg_sq: given on the meta device"),
       [](Wrong& w) { w.load_into_adam("1.exp_avg_sq", at::empty({2}, at::TensorOptions(at::kMeta))); }},
      {"adam_of_a_step_without_numbers", adam_refuses("1.step: given on the meta device"),
       [](Wrong& w) { w.load_into_adam("1.step", at::empty({}, at::TensorOptions(at::kMeta))); }},
      {"adam_of_an_undefined_tensor", adam_refuses("1.exp_avg: an undefined tensor given"),
       [](Wrong& w) { w.load_into_adam("1.exp_avg", at::Tensor()); }},
      {"adam_of_an_undefined_step", adam_refuses("1.step: an undefined tensor given"),
       [](Wrong& w) { w.load_into_adam("1.step", at::Tensor()); }},
      {"adam_of_another_shape", adam_refuses("1.exp_avg: shape [3] given, [2] in the parameter"),
       [](Wrong& w) { w.load_into_adam("1.exp_avg", at::ones({3})); }},
      {"adam_of_an_expanded_tensor", "", [](Wrong& w) { w.load_into_adam("1.exp_avg", at::ones({1}).expand({2})); }},
      {"schedule_of_more_groups",
       cannot_resume("`schedule`: the state of the schedule has 1 parameter groups, the optimizer 2"),
       [=](Wrong& w) {
         auto one = sgd(0.9)(w.net->parameters()), two = sgd(0.9)(w.net->parameters());
         two.add_param_group(torch::optim::OptimizerParamGroup({at::zeros({2}).requires_grad_()}));
         LRScheduler first(one, step_lr(3)), second(two, step_lr(3));
         w.save([&](Checkpointer& to) { to.add("schedule", first); });
         w.resume([&](Checkpointer& to) { to.add("schedule", second); });
       }},
      {"decays", cannot_resume("`ema`: the state has averages with the decays [0.9], not of [0.99]"),
       [](Wrong& w) {
         Ema first(*w.net, {.decays = {0.9}}), second(*w.net, {.decays = {0.99}});
         w.save([&](Checkpointer& to) { to.add("ema", first); });
         w.resume([&](Checkpointer& to) { to.add("ema", second); });
       }},
      {"averages_that_differ_by_rank",
       "the state of step 1 cannot be saved: ema.averages.0.weight on {odd} differs from that on",
       [](Wrong& w) {
         Ema ema(*w.net, {.decays = {0.9}});
         at::NoGradGuard(), w.net->weight.add_(w.odd ? 2 : 1);
         ema.update();
         w.save([&](Checkpointer& to) { to.add("ema", ema); });
       }},
      {"an_optimizer_stepped_on_one_rank", "the state of step 1 cannot be saved: ",
       [=](Wrong& w) {
         auto optimizer = adam(false)(w.net->parameters());
         w.net->forward(at::ones({2, 3})).sum().backward();
         for (int step = 0; step < (w.odd ? 2 : 1); ++step) optimizer.step();
         w.save([&](Checkpointer& to) { to.add("optimizer", optimizer); });
       }},
      {"schedules_that_stepped_differently", "the state of step 1 cannot be saved: schedule.",
       [=](Wrong& w) {
         auto optimizer = sgd(0.9)(w.net->parameters());
         LRScheduler scheduler(optimizer, step_lr(3));
         if (w.odd) scheduler.step();
         w.save([&](Checkpointer& to) { to.add("schedule", scheduler); });
       }},
  };
}

Programs of_memory() {
  const auto not_what = [](const std::string& what) {
    return "a checkpoint in memory holds one state for all ranks, so it must be the same on all of them: " + what +
           " on {odd} differs from that on {rest}. If ranks may differ in a part, add it with";
  };
  const std::string cannot = "the state of step 2 cannot be saved to memory: ";
  const auto steps = [](int64_t rest, int64_t odd, int64_t every, bool after_one) {
    return [=](Wrong& w) {
      Checkpointer checkpointer(w.folder, w.context.group(), {.memory_every_n_steps = every});
      checkpointer.add("rate", w.rate);
      if (after_one) checkpointer.step(every);
      checkpointer.step(w.odd ? odd : rest);
    };
  };
  const auto differs = [](const c10::IValue& mine, const c10::IValue& others) {
    return [=](Wrong& w) { w.differs_in_step_2(mine, others); };
  };
  at::Tensor one_element = at::arange(40, at::kFloat);
  one_element[17] = -1;
  const auto ones = [](int64_t count, double value = 1) { return at::full({count}, value); };
  return {
      {"first_steps", " ... cannot be saved to memory: ranks save different steps: 1 on {rest} and 2 on {odd};",
       steps(1, 2, 1, false)},
      {"later_steps", " ... cannot be saved to memory: ranks save different steps: 2 on {rest} and 3 on {odd};",
       steps(2, 3, 1, true)},
      {"every_second_step", " ... ranks save different steps: 4 on {rest} and 5 on {odd};", steps(4, 5, 2, true)},
      {"a_step_behind", " ... ranks save different steps: 9 on {rest} and 8 on {odd};", steps(9, 8, 3, true)},
      {"numbers", not_what("part"), differs(0.1, 0.2)},
      {"whole_numbers", not_what("part"), differs(1, 2)},
      {"texts", not_what("part"), differs(std::string("a"), std::string("b"))},
      {"types", not_what("part"), differs(1, 1.0)},
      {"lengths", " ... holds one state for all ranks", differs(list_of({1, 2}), list_of({1}))},
      {"shapes", not_what("part"), differs(at::ones({4, 10}), at::ones({40}))},
      {"dtypes", not_what("part"), differs(at::ones({40}), at::ones({40}, at::kDouble))},
      {"larger_tensors", not_what("part"), differs(at::ones({90'000}), at::ones({40}))},
      {"tensors", not_what("part"), differs(ones(100'000), ones(100'000, 2))},
      {"one_of_several_tensors", not_what("part.2"),
       differs(list_of({ones(9), ones(99), ones(999, 2)}), list_of({ones(9), ones(99), ones(999)}))},
      {"one_of_a_thousand_tensors", not_what("part.700"),
       [=](Wrong& w) {
         std::vector<c10::IValue> others, mine;
         for (int i = 0; i < 1000; ++i) others.emplace_back(ones(5)), mine.emplace_back(ones(5, i == 700 ? 2 : 1));
         w.differs_in_step_2(list_of(mine), list_of(others));
       }},
      {"one_element", not_what("part"), differs(one_element, at::arange(40, at::kFloat))},
      {"a_bool", not_what("part"), differs(at::ones({1}, at::kBool), at::zeros({1}, at::kBool))},
      {"a_sign_of_zero", not_what("part"), differs(-at::zeros({8}), at::zeros({8}))},
      {"half_a_tensor", not_what("part"), differs(at::cat({ones(50'000), ones(50'000, 2)}), ones(100'000))},
      {"a_model_added_by_its_module", not_what("net.weight"),
       [](Wrong& w) {
         DistributedDataParallel model(w.net, w.context);
         Checkpointer checkpointer(w.folder, w.context.group(), {.memory_every_n_steps = 1});
         checkpointer.add("net", *w.net);
         checkpointer.step(1);
         at::NoGradGuard(), w.net->weight.add_(w.odd ? 2 : 1);
         checkpointer.step(2);
       }},
      {"replicas", not_what("net.bias"),
       [](Wrong& w) {
         DistributedDataParallel model(w.net, w.context);
         Checkpointer checkpointer(w.folder, w.context.group(), {.memory_every_n_steps = 1});
         checkpointer.add("net", model);
         checkpointer.step(1);
         at::NoGradGuard(), w.net->bias.add_(w.odd ? 2 : 1);
         checkpointer.step(2);
       }},
      {"folders",
       "ranks have given their Checkpointer different folders: rank 0 ... and rank {last} ... . Ranks save and resume "
       "together, so all of them must give the same folder",
       [](Wrong& w) {
         Checkpointer checkpointer(w.folder + (w.odd ? "2" : ""), w.context.group(), {.memory_every_n_steps = 1});
         checkpointer.add("rate", w.rate);
         checkpointer.step(1);
       }},
      {"save_that_fails_on_one_rank", "the state of step 1 cannot be saved to memory: no state yet (on {odd})",
       [](Wrong& w) {
         Checkpointer checkpointer(w.folder, w.context.group(), {.memory_every_n_steps = 1});
         const auto throws = [&] {
           if (w.odd) throw std::runtime_error("no state yet");
           return c10::IValue(1);
         };
         checkpointer.add("part", {.save = throws, .load = [](const auto&) {}});
         checkpointer.step(1);
       }},
      {"averages_in_place_on_one_rank", cannot + " ... holds averaged weights now ... (on {odd})",
       [](Wrong& w) {
         DistributedDataParallel model(w.net, w.context);
         Ema ema(*w.net);
         Checkpointer checkpointer(w.folder, w.context.group(), {.memory_every_n_steps = 1});
         checkpointer.add("net", *w.net);
         checkpointer.step(1);
         std::unique_ptr<Ema::Guard> guard(w.odd ? new Ema::Guard(ema.averaged_weights()) : nullptr);
         checkpointer.step(2);
       }},
      {"a_tensor_that_cannot_be_saved", cannot + "cannot save `part`: ",
       [](Wrong& w) {
         w.in_memory([&](Checkpointer& checkpointer) {
           checkpointer.step(1);
           w.value = at::ones({3}).to_sparse();
           checkpointer.step(2);
         });
       }},
      {"what_may_differ", "",
       [](Wrong& w) {
         at::Tensor own = at::full({40}, w.context.rank());
         const at::Tensor around = at::full({100}, w.context.rank());
         around.narrow(0, 30, 40).fill_(7);
         w.value =
             list_of({around.narrow(0, 30, 40), at::full({4}, std::nan("")), at::empty({0}), at::ones({3}, at::kBool),
                      at::ones({1}).expand({5}), at::arange(6).view({2, 3}).t(), at::scalar_tensor(2.0)});
         w.in_memory([&](Checkpointer& checkpointer) {
           checkpointer.add("own", {.save = [&] { return c10::IValue(own); }, .load = [](const auto&) {}},
                            Scope::kEachRank);
           for (int64_t step = 1; step < 20; ++step) {
             checkpointer.step(step);
             w.rate += 1;
           }
         });
       }},
      {"a_refused_save_that_is_mended", "",
       [](Wrong& w) {
         w.in_memory([&](Checkpointer& checkpointer) {
           checkpointer.step(1);
           if (w.odd) w.rate = 5;
           EXPECT_NE(failure([&] { checkpointer.step(2); }), "");
           w.rate = 7;
           checkpointer.step(3);
           w.rate = 0;
           EXPECT_TRUE(checkpointer.resume());
           EXPECT_EQ(w.rate, 7);
         });
       }},
  };
}

class WrongResumes : public ::testing::TestWithParam<Engine> {
 protected:
  WrongResumes() : memory_(StateMemory::make()) {
    ::setenv("LOCKSTEP_MEMORY_FD", std::to_string(memory_.get()).c_str(), 1);
  }
  ~WrongResumes() override { ::unsetenv("LOCKSTEP_MEMORY_FD"); }

  void expect(const Programs& programs) const {
    run_ranks(GetParam(), [&](Context& context) {
      const auto make = [&](const std::string& name) {
        return std::make_unique<Wrong>(context, (folder_.path() / name).string());
      };
      expect_each_told(context, programs, make);
    });
  }

  TemporaryFolder folder_;
  FileDescriptor memory_;
};
INSTANTIATE_TEST_SUITE_P(Engines, WrongResumes, ::testing::ValuesIn(engines_of_wrong_programs()),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(WrongResumes, PartsOfAnotherKind) { expect(of_parts()); }
TEST_P(WrongResumes, StatesOfAnotherProgram) { expect(of_states()); }
TEST_P(WrongResumes, SavesToMemoryThatDiffer) { expect(of_memory()); }

/// What rank 0 says when a hand-written loop goes on with another accumulate(n).
std::string said_on_resuming(Context& context, const std::string& folder, int saved, int then, bool before_resume) {
  const auto train = [](auto& model, int passes) {
    const auto accumulation = passes > 0 ? std::optional(model.accumulate(passes)) : std::nullopt;
    for (int i = 0; i < std::max(1, passes); ++i) model(at::ones({2, 3})).sum().backward();
  };
  {
    DistributedDataParallel model(torch::nn::Linear(3, 2), context);
    Checkpointer checkpointer(folder, context.group());
    checkpointer.add("model", model);
    train(model, saved);
    checkpointer.save(1);
    checkpointer.finish();
    context.group().barrier();
  }
  DistributedDataParallel model(torch::nn::Linear(3, 2), context);
  Checkpointer checkpointer(folder, context.group());
  checkpointer.add("model", model);
  ::testing::internal::CaptureStderr();
  if (before_resume) train(model, then);
  EXPECT_TRUE(checkpointer.resume());
  train(model, then);
  checkpointer.save(2);
  checkpointer.save(3);
  checkpointer.finish();
  return ::testing::internal::GetCapturedStderr();
}

TEST_P(WrongResumes, AnotherAccumulationIsSaidOnce) {
  run_ranks(GetParam(), [&](Context& context) {
    int run = 0;
    const auto expect_said = [&](int saved, int then, const std::string& part) {
      for (const bool before_resume : {false, true}) {
        const std::string said =
            said_on_resuming(context, (folder_.path() / std::to_string(run++)).string(), saved, then, before_resume);
        const size_t first = said.find(part.empty() ? "made a step" : part);
        const bool wanted = context.rank() == 0 && !part.empty();
        EXPECT_EQ(first != std::string::npos, wanted) << saved << ", " << then << ": " << said;
        if (wanted) {
          EXPECT_EQ(said.find(part, first + 1), std::string::npos) << "said twice: " << said;
        }
      }
    };
    expect_said(4, 2, "in which 4 backward passes of `model` made a step, and in this run 2 do");
    expect_said(3, 0, "in which 3 backward passes of `model` made a step, and in this run 1 does");
    expect_said(0, 4, "in which 1 backward pass of `model` made a step, and in this run 4 do");
    expect_said(3, 3, "");
    expect_said(0, 0, "");
    expect_said(1, 0, "");
  });
}

/// With virtual ranks a step is the same on any number of ranks, so its batches are compared there, too.
TEST(WrongAccumulation, IsNamedOnAnotherNumberOfRanks) {
  const TemporaryFolder folder;
  const auto fit = [&](const Engine& engine, int accumulate, int epochs) {
    const auto body = [&](Context& context) {
      torch::nn::Linear net(3, 3);
      torch::optim::SGD optimizer(net->parameters(), SGDOptions(0.1));
      DataLoader loader(Rows(48), context, {.batch_size = 2, .accumulate = accumulate});
      Trainer trainer(net.ptr(), optimizer, context,
                      {.epochs = epochs,
                       .accumulate = accumulate,
                       .folder = (folder.path() / engine.backend).string(),
                       .progress = false});
      const std::string text = failure(
          [&] { trainer.fit(loader, [&](Batch& batch) { return torch::mse_loss(net(batch.data), batch.target); }); });
      if (accumulate == 2)
        EXPECT_EQ(text, "");
      else
        EXPECT_NE(text.find("accumulate = 2, but this one has 4"), std::string::npos) << text;
    };
    run_ranks(engine.world_size, body, std::chrono::seconds(60),
              {.seed = 3, .virtual_ranks = 6, .backend = engine.backend, .announce = false});
  };
  for (const char* backend : {"shm", "gloo"}) {
    fit({2, backend}, 2, 1);
    fit({3, backend}, 4, 2);
    fit({3, backend}, 2, 2);
    fit({2, backend}, 4, 3);
  }
}

}  // namespace
}  // namespace lockstep::wrong_resumes_test
