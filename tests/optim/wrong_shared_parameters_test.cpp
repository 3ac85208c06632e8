#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/assert_equal.h>
#include <lockstep/checkpointer.h>
#include <lockstep/ema.h>

#include "optim/wrong_optimizer.h"

// Programs that change parameters of which all ranks have one copy. Within two seconds, each that does so incorrectly
// must end on every rank with its message from wrong_optimizers.txt.

namespace lockstep::wrong_optimizers_test {
namespace {

/// An optimizer steps, all ranks change what they share, and it ends; then `after`.
Program after_the_end(const std::function<void(Wrong&)>& after) {
  return [after](Wrong& w) {
    {
      AdamW adamw = w.optimizer({.shared_parameters = true});
      w.backward();
      adamw.step();
      w.change_everywhere([&] { w.halve(); });
    }
    after(w);
  };
}

/// The state of a net like it, of other values for each `seed`.
StateDict state_of_another(const Net& net, double seed) {
  StateDict other;
  for (const auto& item : state_dict(*net)) other.insert(item.key(), item.value() * 0.5 + seed);
  return other;
}

Programs programs_that_end() {
  return {
      {"shared_parameters_changed_before_their_optimizer_went", after_the_end([](Wrong& w) { w.backward(); })},
      {"shared_parameters_of_an_optimizer_that_went_saved", after_the_end([](Wrong& w) {
         lockstep::save(state_dict(*w.net), (w.folder.path() / "weights.safetensors").string());
       })},
      {"shared_parameters_of_an_optimizer_that_went_saved_as_pt",
       after_the_end([](Wrong& w) { lockstep::save(state_dict(*w.net), (w.folder.path() / "weights.pt").string()); })},
      {"shared_parameters_of_an_optimizer_that_went_checkpointed", after_the_end([](Wrong& w) {
         Checkpointer checkpointer(w.context.group().broadcast_bytes(w.folder.path().string(), 0), w.context.group());
         checkpointer.add("model", w.model);
         checkpointer.save(1);
       })},
      {"shared_parameters_of_an_optimizer_that_went_compared",
       after_the_end([](Wrong& w) { assert_equal_across_ranks(w.context.group(), *w.net); })},
      {"shared_parameters_of_an_optimizer_that_went_attached_again",
       [](Wrong& w) {
         const Net net;
         {
           const Model model(net, w.context);
           const AdamW adamw(model, AdamWOptions(0.1), {.shared_parameters = true});
           w.change_everywhere([&] {
             const at::NoGradGuard no_grad;
             net->fc->weight.mul_(0.5);
           });
         }
         const Model again(net, w.context);
       }},
      {"edited_on_one_rank_before_parameters_are_shared",
       [](Wrong& w) {
         if (w.odd) w.net->out->weight.data()[1][2] += 1e-3;
         w.optimizer({.shared_parameters = true});
       }},
      {"shared_parameters_of_an_optimizer_that_went_averaged", after_the_end([](Wrong& w) {
         Ema ema(*w.net, {.decays = {0.9}});
         const auto averaged = ema.averaged_weights();
       })},
      {"the_later_optimizer_has_gone",
       [](Wrong& w) {
         AdamW adamw = w.optimizer({.shared_parameters = true});
         { const AdamW later = w.optimizer({.shared_parameters = false}); }
         w.backward();
         adamw.step();
       }},
  };
}

/// Each has stepped once, and `spoils` the one copy of the parameters.
const Programs& programs_that_share() {
  const auto shared = [](const std::function<void(Wrong&, AdamW&)>& spoil) {
    return [spoil](Wrong& w) {
      AdamW adamw = w.optimizer({.shared_parameters = true});
      w.backward();
      adamw.step();
      adamw.zero_grad();
      spoil(w, adamw);
    };
  };
  static const Programs kPrograms{
      {"all_change_what_is_shared_and_broadcast", shared([](Wrong& w, AdamW&) {
         w.change_everywhere([&] { w.halve(); });
         w.model.broadcast_parameters();
       })},
      {"another_optimizer_steps_what_is_shared_before_a_broadcast", shared([](Wrong& w, AdamW&) {
         torch::optim::SGD sgd(w.net->parameters(), 0.1);
         w.backward();
         w.step_everywhere(sgd);
         w.model.broadcast_parameters();
       })},
      {"all_change_what_is_shared_by_data_and_broadcast", shared([](Wrong& w, AdamW&) {
         w.change_everywhere([&] {
           for (const at::Tensor& parameter : w.net->parameters()) parameter.data().mul_(0.5);
         });
         w.model.broadcast_parameters();
       })},
      {"shared_parameter_replaced_on_one_rank_and_broadcast", shared([](Wrong& w, AdamW&) {
         at::Tensor first = w.net->parameters().front();
         if (w.odd) first.set_data(first.detach() * 0.5);  // as torch::load() does
         w.model.broadcast_parameters(w.context.world_size() - 1);
       })},
      {"another_rank_than_the_root_changes_what_is_shared", shared([](Wrong& w, AdamW&) {
         w.change_everywhere([&] {
           if (w.odd) w.halve();
         });
         w.model.broadcast_parameters();
       })},
      {"shared_parameters_changed_after_the_broadcast", shared([](Wrong& w, AdamW&) {
         w.model.broadcast_parameters();
         w.change_everywhere([&] {
           if (w.context.rank() == 0) w.halve();
         });
         w.backward();
       })},
      {"shared_parameters_changed_after_a_load", shared([](Wrong& w, AdamW& adamw) {
         load_state_dict(*w.net, copies_of(*w.net));
         w.change_everywhere([&] { w.halve(); });
         adamw.step();
       })},
      {"shared_parameters_loaded_on_one_rank",  // when the others have already looked
       shared([](Wrong& w, AdamW& adamw) {
         StateDict other;
         for (const auto& item : state_dict(*w.net)) other.insert(item.key(), item.value() * 0.5);
         w.context.group().barrier();
         if (w.context.rank() == 0) {
           std::this_thread::sleep_for(std::chrono::milliseconds(300));
           load_state_dict(*w.net, other);
         }
         w.backward();
         adamw.step();
       })},
      {"shared_parameters_changed_and_checked", shared([](Wrong& w, AdamW&) {
         w.change_everywhere([&] { w.halve(); });
         w.model.check_divergence();
       })},
      {"shared_parameters_changed_and_compared", shared([](Wrong& w, AdamW&) {
         w.change_everywhere([&] { w.halve(); });
         assert_equal_across_ranks(w.context.group(), *w.net);
       })},
      {"shared_parameters_changed_and_averaged", shared([](Wrong& w, AdamW&) {
         Ema ema(*w.net, {.decays = {0.9}});
         w.change_everywhere([&] { w.halve(); });
         ema.update();
       })},
      {"shared_parameters_changed_and_sent_as_an_object", shared([](Wrong& w, AdamW&) {
         w.change_everywhere([&] { w.halve(); });
         w.context.group().broadcast_object(to_object(state_dict(*w.net)));
       })},
      {"shared_parameters_changed_and_gathered_as_objects", shared([](Wrong& w, AdamW&) {
         w.change_everywhere([&] { w.halve(); });
         (void)w.context.group().all_gather_object(w.net->out->weight);
       })},
      {"shared_parameters_changed_and_saved", shared([](Wrong& w, AdamW&) {
         w.change_everywhere([&] { w.halve(); });
         lockstep::save(state_dict(*w.net), (w.folder.path() / "weights.safetensors").string());
       })},
      {"shared_parameters_changed_and_saved_as_pt", shared([](Wrong& w, AdamW&) {
         w.change_everywhere([&] { w.halve(); });
         lockstep::save(state_dict(*w.net), (w.folder.path() / "weights.pt").string());
       })},
      {"shared_parameters_changed_and_checkpointed", shared([](Wrong& w, AdamW& adamw) {
         Checkpointer checkpointer(w.context.group().broadcast_bytes(w.folder.path().string(), 0), w.context.group());
         checkpointer.add("model", *w.net).add("optimizer", adamw);
         w.change_everywhere([&] { w.halve(); });
         checkpointer.save(1);
       })},
      {"shared_parameters_changed_before_another_optimizer", shared([](Wrong& w, AdamW&) {
         w.change_everywhere([&] { w.halve(); });
         w.optimizer({.shared_parameters = true});
       })},
      {"shared_parameters_loaded_from_other_states", shared([](Wrong& w, AdamW& adamw) {
         load_state_dict(*w.net, state_of_another(w.net, w.context.rank()));
         w.context.group().barrier();
         w.backward();
         adamw.step();
       })},
      {"shared_parameters_loaded_on_one_rank_before_a_backward", shared([](Wrong& w, AdamW& adamw) {
         if (w.odd) load_state_dict(*w.net, state_of_another(w.net, 1));
         w.context.group().barrier();
         w.backward();
         adamw.step();
       })},
      {"shared_parameters_loaded_on_rank_1", shared([](Wrong& w, AdamW& adamw) {  // rank 2 alone sees it in backward
         const int rank = w.context.rank();
         std::this_thread::sleep_for(std::chrono::milliseconds(rank == 0 ? 0 : rank * 300));
         if (rank == 1) load_state_dict(*w.net, state_of_another(w.net, 1));
         w.backward();
         adamw.step();
       })},
  };
  return kPrograms;
}

std::vector<Case> cases_of_sharing() {
  std::vector<Case> cases;
  for (const Programs& programs : {programs_that_share(), programs_that_end()})
    for (const auto& [name, program] : programs)
      for (const Engine& engine : {Engine{2, "shm"}, Engine{3, "shm"}}) cases.push_back({name, engine});
  return cases;
}

class WrongSharedParameters : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, WrongSharedParameters, ::testing::ValuesIn(cases_of_sharing()), [](const auto& instance) {
  return instance.param.name + "_" + name_of(instance.param.engine);
});

TEST_P(WrongSharedParameters, EndOnEveryRankWithTheirMessage) {
  const Programs ends = programs_that_end();
  const auto found = ends.find(GetParam().name);
  expect_refused(GetParam(), found != ends.end() ? found->second : programs_that_share().at(GetParam().name));
}

/// Changes of what all ranks share that are right.
void change_rightly(Context& context) {
  Wrong side(context);
  AdamW adamw = side.optimizer({.shared_parameters = true});
  const Group& group = context.group();
  for (int step = 0; step < 12; ++step) {
    const at::Tensor before = side.net->fc->weight.detach().clone();
    const int root = step % context.world_size();
    group.barrier();
    if (step % 4 == 0) {
      load_state_dict(*side.net, copies_of(*side.net));
      EXPECT_TRUE(side.net->fc->weight.equal(before));
    } else {
      if (context.rank() == root && step % 4 == 1) side.halve();
      if (context.rank() == root && step % 4 == 2) {
        StateDict other;
        for (const auto& item : state_dict(*side.net)) other.insert(item.key(), item.value() * 0.5);
        load_state_dict(*side.net, other);
      }
      side.model.broadcast_parameters(root);
      EXPECT_TRUE(side.net->fc->weight.equal(step % 4 == 3 ? before : before * 0.5));
    }
    side.model.check_divergence();
    side.backward();
    adamw.step();
    adamw.zero_grad();
  }
}

/// What an optimizer that went has left wrong may be saved once it is loaded, or is no more.
void set_right(Context& context) {
  Wrong side(context);
  const std::string file = (side.folder.path() / "weights.pt").string();
  const StateDict good = copies_of(*side.net);
  after_the_end([&](Wrong& w) {
    EXPECT_THROW(lockstep::save(state_dict(*w.net), file), Error);
    StateDict part;
    for (const char* name : {"weight", "bias"}) part.insert(name, good[std::string("fc.") + name]);
    load_state_dict(*w.net->fc, part);
    EXPECT_THROW(lockstep::save(state_dict(*w.net), file), Error);  // the other layer is still wrong
    load_state_dict(*w.net, good);
    lockstep::save(state_dict(*w.net), file);
    w.model.check_divergence();
    w.backward();
  })(side);
  {
    Wrong other(context);
    after_the_end([](Wrong&) {})(other);
  }
  Checkpointer checkpointer(context.group().broadcast_bytes(side.folder.path().string(), 0), context.group());
  checkpointer.add("model", side.model);
  checkpointer.save(1);
}

TEST(SharedParameters, AreRightOnceLoaded) {
  for (const int world_size : {2, 3}) run_ranks(Engine{world_size, "shm"}, set_right);
}

TEST(SharedParameters, OneRankMayChangeWhatAllShareBeforeABroadcast) {
  for (const Engine& engine : {Engine{2, "shm"}, Engine{3, "shm"}, Engine{4, "hierarchical", "aaab"}})
    run_ranks(engine, change_rightly);
}

}  // namespace
}  // namespace lockstep::wrong_optimizers_test
