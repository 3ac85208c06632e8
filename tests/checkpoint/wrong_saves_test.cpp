#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <torch/nn.h>

#include <lockstep/checkpoint.h>
#include <lockstep/checkpointer.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/ema.h>

#include "base/state_memory.h"
#include "checkpoint/failure.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

// Saves that would put something else into the file than the program means: each is an error on all ranks.

namespace lockstep {
namespace {

using testing::Engine;
using testing::failure;
using testing::run_ranks;
using Scope = Checkpointer::Scope;

class WrongSaves : public ::testing::TestWithParam<Engine> {
 protected:
  std::string path(const std::string& name = "checkpoints") const { return (temporary_.path() / name).string(); }
  static int last(const Context& context) { return context.world_size() - 1; }
  static void expect_in(const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << "`" << part << "` is not in: " << text;
  }
  /// All ranks wait until the folder is as they left it.
  static void settle(const Context& context, Checkpointer& checkpointer) {
    checkpointer.finish();
    context.group().barrier();
  }

  TemporaryFolder temporary_;
};
INSTANTIATE_TEST_SUITE_P(Engines, WrongSaves,
                         ::testing::Values(Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}, Engine{3, "gloo"}),
                         [](const auto& instance) { return testing::name_of(instance.param); });

TEST_P(WrongSaves, OnOneRankAloneAreNamed) {
  run_ranks(GetParam(), [&](Context& context) {
    int64_t value = 10;
    Checkpointer checkpointer(path(), context.group());
    checkpointer.add("value", value);
    const bool odd = context.rank() == last(context);
    const std::string text = failure([&] { odd ? checkpointer.save(1) : context.group().barrier(); });
    expect_in(text, "rank " + std::to_string(last(context)) + " called all_gather_bytes() of Checkpointer::save()");
    expect_in(text, " called barrier()");
    expect_in(text, ". Where one rank calls Checkpointer::save(), every rank must, in the same order.");
  });
}

TEST_P(WrongSaves, AnUndefinedTensorIsNamed) {
  run_ranks(GetParam(), [&](Context& context) {
    const auto object = [](const at::Tensor& bias) {
      c10::impl::GenericDict state(c10::AnyType::get(), c10::AnyType::get());
      state.insert(std::string("weight"), at::ones({2}));
      state.insert(std::string("bias"), bias);
      return c10::IValue(state);
    };
    for (const Scope scope : {Scope::kAllRanks, Scope::kEachRank, Scope::kRankZero}) {
      // On all ranks, and on one alone.
      for (const bool everywhere : {true, false}) {
        if (!everywhere && scope == Scope::kRankZero) continue;  // of the others it saves nothing
        const std::string folder = "gap" + std::to_string(static_cast<int>(scope)) + std::to_string(everywhere);
        Checkpointer checkpointer(path(folder), context.group());
        const bool gap = everywhere || context.rank() == last(context);
        checkpointer.add("part",
                         Checkpointer::Part{.save = [&] { return object(gap ? at::Tensor() : at::ones({2})); },
                                            .load = [](const c10::IValue&) {}},
                         scope);
        const std::string text = failure([&] { checkpointer.save(1); });
        expect_in(text, "part");
        expect_in(text, "bias");
        if (everywhere || scope != Scope::kAllRanks) expect_in(text, "undefined");  // else that the ranks differ there
        EXPECT_EQ(text.find("INTERNAL ASSERT"), std::string::npos) << text;
      }
    }
    StateDict state;
    state.insert("weight", at::ones({2}));
    state.insert("bias", at::Tensor());
    for (const char* name : {"state.pt", "state.safetensors"}) {
      std::string text;
      try {
        lockstep::save(state, path(std::to_string(context.rank()) + name));
      } catch (const std::exception& error) {
        text = error.what();
      }
      expect_in(text, "`bias`");
      expect_in(text, "undefined tensor");
    }
  });
}

/// What resume() would refuse must not be saved, or the last good checkpoint is thrown away for it.
TEST_P(WrongSaves, WhatIsTooLongToBeReadAgain) {
  run_ranks(GetParam(), [&](Context& context) {
    const bool odd = context.rank() == last(context);
    const auto part = [&]() -> c10::IValue {
      if (!odd) return std::string("short");
      if (context.world_size() == 2) return std::string(70 << 20, 'x');
      return c10::List<int64_t>(std::vector<int64_t>(9 << 20, 1));
    };
    Checkpointer checkpointer(path(), context.group());
    checkpointer.add("part", Checkpointer::Part{.save = part, .load = [](const c10::IValue&) {}}, Scope::kEachRank);
    const std::string text = failure([&] { checkpointer.save(1); });
    expect_in(text, "rank " + std::to_string(last(context)));
    expect_in(text, context.world_size() == 2
                        ? "and 67108864 at most are read again; save many numbers or a long text as"
                        : "it makes more than 8388608 objects; save many numbers");
    EXPECT_EQ(failure([&] { checkpointer.finish(); }), "");
    EXPECT_FALSE(Checkpointer(path(), context.group()).resume());
  });
}

TEST_P(WrongSaves, ANewRunInAnOldFolder) {
  run_ranks(GetParam(), [&](Context& context) {
    int64_t value = 10;
    {
      Checkpointer old(path(), context.group());
      old.add("value", value);
      old.save(10);
      settle(context, old);
    }
    {
      Checkpointer anew(path(), context.group(), {.every_steps = 2});
      anew.add("value", value);
      for (const auto& call : std::vector<std::function<void()>>{[&] { anew.save(4); }, [&] { anew.save(10); },
                                                                 [&] { anew.step(1); }, [&] { anew.step(2); }}) {
        const std::string text = failure(call);
        for (const char* part : {"holds step 10 of another run", "resume()", "a folder of its own", "replace_old_run"})
          expect_in(text, part);
        expect_in(text, path());
      }
      value = 11;
      EXPECT_TRUE(anew.step(11)) << "which is newer";
      settle(context, anew);
    }
    {
      Checkpointer going_on(path(), context.group());
      going_on.add("value", value);
      EXPECT_TRUE(going_on.resume());
      EXPECT_EQ(value, 11);
      going_on.save(11, 0.5);  // the same step, now with a score
      EXPECT_NE(failure([&] { going_on.save(10); }).find("has already saved step 11"), std::string::npos);
      going_on.save(12);
      settle(context, going_on);
    }
    Checkpointer replacing(path(), context.group(), {.replace_old_run = true});
    value = 1;
    replacing.add("value", value);
    EXPECT_FALSE(replacing.step(1)) << "nothing is due";
    EXPECT_TRUE(std::filesystem::is_empty(path()));
    replacing.save(2);
    replacing.save(3);
    settle(context, replacing);
    value = 0;
    EXPECT_TRUE(replacing.resume());
    EXPECT_EQ(replacing.resumed_step(), 3);
    EXPECT_EQ(value, 1);
  });
}

TEST_P(WrongSaves, ReplacingLeavesWhatIsResumed) {
  run_ranks(GetParam(), [&](Context& context) {
    int64_t value = 1;
    for (const int64_t step : {1, 2, 3}) {
      Checkpointer checkpointer(path(), context.group(), {.keep_last = 9, .replace_old_run = true});
      checkpointer.add("value", value);
      EXPECT_EQ(checkpointer.resume(), step > 1);
      checkpointer.save(step);
      settle(context, checkpointer);
    }
    for (const char* file : {"step-000000000001.0.pt", "step-000000000003.0.pt"})
      EXPECT_TRUE(std::filesystem::exists(path() + '/' + file)) << file;
  });
}

TEST_P(WrongSaves, StepsThatCannotBe) {
  run_ranks(GetParam(), [&](Context& context) {
    int64_t value = 0;
    Checkpointer checkpointer(path(), context.group(), {.every_steps = 1});
    checkpointer.add("value", value);
    for (const int64_t step : {int64_t{-1}, std::numeric_limits<int64_t>::min(), int64_t{1'000'000'000'000}}) {
      expect_in(failure([&] { checkpointer.save(step); }), "the step is " + std::to_string(step));
      expect_in(failure([&] { checkpointer.step(step); }), "the step is " + std::to_string(step));
    }
    const bool odd = context.rank() == last(context);
    const std::string text = failure([&] { checkpointer.save(odd ? 2 : 1); });
    expect_in(text, "ranks save different steps: 1 on rank");
    expect_in(text, "and 2 on rank " + std::to_string(last(context)));
    expect_in(failure([&] { checkpointer.save(odd ? -2 : 1); }), "ranks save different steps: 1 on rank");
    expect_in(failure([&] { checkpointer.step(odd ? 4 : 3); }), "ranks save different steps: 3 on rank");
    checkpointer.save(0);
    checkpointer.save(1);
    settle(context, checkpointer);
  });
}

TEST_P(WrongSaves, ScoresThatDifferOrAreNoNumber) {
  run_ranks(GetParam(), [&](Context& context) {
    int64_t value = 0;
    Checkpointer checkpointer(path(), context.group(), {.keep_last = 1, .keep_best = 1, .asynchronous = false});
    checkpointer.add("value", value);
    const bool odd = context.rank() == last(context);
    const auto on_odd = [&](std::optional<double> of_odd) {
      return failure([&] { checkpointer.save(1, odd ? of_odd : 0.5); });
    };
    expect_in(on_odd(0.25), "ranks save different scores: 0.5 on rank");
    expect_in(on_odd(0.25), "0.25 on rank " + std::to_string(last(context)));
    expect_in(on_odd({}), "none on rank " + std::to_string(last(context)));
    expect_in(on_odd(std::nextafter(0.5, 1)), "0.50000000000000011 on rank");
    checkpointer.save(1, 0.5);
    ::testing::internal::CaptureStderr();
    int64_t step = 2;
    for (const double score : {std::numeric_limits<double>::infinity(), std::nan("")}) checkpointer.save(step++, score);
    const std::string said = ::testing::internal::GetCapturedStderr();
    checkpointer.save(step++, 0.25);
    settle(context, checkpointer);
    if (context.rank() != 0) return;
    expect_in(said, "the score of the checkpoint of step 2 is inf");
    expect_in(said, "the score of the checkpoint of step 3 is nan");
    EXPECT_TRUE(std::filesystem::exists(path() + "/step-000000000001.0.pt")) << "the best that has a score";
  });
}

TEST_P(WrongSaves, OptionsThatDiffer) {
  run_ranks(GetParam(), [&](Context& context) {
    const bool odd = context.rank() == last(context);
    const auto refused = [&](const CheckpointerOptions& others, const CheckpointerOptions& mine) {
      return failure([&] { Checkpointer(path(), context.group(), odd ? mine : others); });
    };
    const std::string rank = "on rank " + std::to_string(last(context));
    for (const auto& [mine, part] : std::vector<std::pair<CheckpointerOptions, std::string>>{
             {{.every_steps = 3}, "`every_steps: 3` "},
             {{.every_steps = -1}, "`every_steps: -1` "},
             {{}, "`every_steps: none` "},
             {{.every_steps = 2, .every_minutes = 1}, "`every_minutes: 1.000000` "},
             {{.every_steps = 2, .memory_every_n_steps = 1}, "`memory_every_n_steps: 1` "},
             {{.every_steps = 2, .keep_last = 1}, "`keep_last: 1` "},
             {{.every_steps = 2, .keep_best = 3}, "`keep_best: 3` "},
             {{.every_steps = 2, .higher_is_better = false}, "`higher_is_better: 0` "},
             {{.every_steps = 2, .asynchronous = false}, "`asynchronous: 0` "},
             {{.every_steps = 2, .replace_old_run = true}, "`replace_old_run: 1` "}}) {
      const std::string text = refused({.every_steps = 2}, mine);
      expect_in(text, "ranks have different CheckpointerOptions: option ");
      expect_in(text, part + rank);
    }
    const std::string other = failure([&] { Checkpointer(path() + (odd ? "/other" : ""), context.group()); });
    expect_in(other, "ranks have given their Checkpointer different folders: rank 0 /");
    expect_in(other, " and " + rank.substr(3) + " /");
    EXPECT_FALSE(std::filesystem::exists(path() + "/other"));
    EXPECT_EQ(failure([&] { Checkpointer(path() + (odd ? "/./x/.." : ""), context.group()); }), "") << "the same one";
    const auto parent = std::filesystem::path(path()).parent_path();
    std::filesystem::current_path(parent);
    EXPECT_EQ(failure([&] { Checkpointer(odd ? (parent / "new").string() : "new", context.group()); }), "")
        << "the same one, which was not there";
    if (odd) std::filesystem::current_path("/");
    expect_in(failure([&] { Checkpointer("of_each_own", context.group()); }), "different folders");
  });
}

TEST_P(WrongSaves, PartsThatDiffer) {
  run_ranks(GetParam(), [&](Context& context) {
    const bool odd = context.rank() == last(context);
    int64_t a = 1, b = 2;
    using Fill = std::function<void(Checkpointer&)>;
    const auto refused = [&](const Fill& others, const Fill& mine, const std::string& part) {
      Checkpointer checkpointer(path(), context.group());
      (odd ? mine : others)(checkpointer);
      for (const std::string& text :
           {failure([&] { checkpointer.save(1); }), failure([&] { checkpointer.resume(); })}) {
        expect_in(text, "ranks have added different parts to the Checkpointer: part ");
        expect_in(text, part);
        expect_in(text, "on rank " + std::to_string(last(context)));
      }
    };
    const auto add_both = [&](Checkpointer& to) { to.add("a", a).add("b", b); };
    refused(
        add_both, [&](Checkpointer& to) { to.add("b", b).add("a", a); }, "part 0 is `a, kAllRanks` on rank");
    refused(
        add_both, [&](Checkpointer& to) { to.add("a", a).add("b", b, Scope::kEachRank); }, "`b, kEachRank` on rank");
    refused(
        add_both, [&](Checkpointer& to) { to.add("a", a); }, "`nothing (it has 1)` on rank");
  });
}

/// Of dictionaries below a part: the message had an empty name.
TEST_P(WrongSaves, EntriesThatOneRankLacks) {
  run_ranks(GetParam(), [&](Context& context) {
    const bool odd = context.rank() == last(context);
    const auto refused = [&](const StateDict& others, const StateDict& mine) {
      Checkpointer checkpointer(path(), context.group());
      checkpointer.add("part", {.save = [&] { return to_object(odd ? mine : others); }, .load = [](const auto&) {}});
      return failure([&] { checkpointer.save(1); });
    };
    const at::Tensor one = at::ones({1});
    const std::string rank = " on rank " + std::to_string(last(context));
    expect_in(refused({{"a", one}}, StateDict()), "part" + rank + " is where part.a is on rank");
    expect_in(refused({{"a", one}, {"b", one}}, {{"b", one}, {"a", one}}), "part.b" + rank + " is where part.a is on");
    expect_in(refused({{"a", one}}, {{"a", at::zeros({1})}}), "part.a" + rank + " differs from that on rank");
  });
}

TEST_P(WrongSaves, WhatContainsItself) {
  run_ranks(GetParam(), [&](Context& context) {
    c10::impl::GenericList list(c10::AnyType::get());
    list.push_back(list);
    list.push_back(list);  // twice: a limit of depth alone would take for ever
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    dict.insert(std::string("self"), dict);
    for (const Scope scope : {Scope::kAllRanks, Scope::kEachRank, Scope::kRankZero})
      for (const c10::IValue& value : {c10::IValue(list), c10::IValue(dict)}) {
        Checkpointer checkpointer(path(), context.group(), {.asynchronous = false});
        checkpointer.add("part", {.save = [&] { return value; }, .load = [](const auto&) {}}, scope);
        expect_in(failure([&] { checkpointer.save(1); }), "contains itself");
      }
    {  // Averages that stand for the weights are looked for in all that is saved.
      const torch::nn::Linear net(2, 2);
      Ema ema(*net);
      const auto averaged = ema.averaged_weights();
      Checkpointer checkpointer(path(), context.group(), {.asynchronous = false});
      checkpointer.add("part", {.save = [&] { return c10::IValue(dict); }, .load = [](const auto&) {}});
      expect_in(failure([&] { checkpointer.save(1); }), "contains itself");
    }
    EXPECT_THROW(save_object(list, path("list.pt")), c10::Error);
    EXPECT_NE(failure([&] { (void)to_state_dict(dict); }).find("contains itself"), std::string::npos);
    // What is there twice, but not within itself, is no such thing.
    c10::impl::GenericList both(c10::AnyType::get()), inner(c10::AnyType::get());
    inner.push_back(int64_t{1});
    both.push_back(inner);
    both.push_back(inner);
    Checkpointer checkpointer(path(), context.group());
    checkpointer.add("part", {.save = [&] { return c10::IValue(both); }, .load = [](const auto&) {}});
    checkpointer.save(1);
    settle(context, checkpointer);
  });
}

TEST_P(WrongSaves, AveragesInTheModelsPlace) {
  run_ranks(GetParam(), [&](Context& context) {
    torch::nn::Linear net(3, 2), other(3, 2);
    DistributedDataParallel model(net, context), with_guard(other, context);
    Ema ema(*net), of_other(*other);
    at::NoGradGuard(), net->weight.add_(1);
    ema.update();
    Checkpointer replicas(path("replicas"), context.group()), module(path("module"), context.group());
    Checkpointer own(path("own"), context.group());
    replicas.add("model", model);
    module.add("net", *net);
    own.add("net", *net, Scope::kEachRank);
    {
      const auto elsewhere = of_other.averaged_weights();
      for (Checkpointer* each : {&replicas, &module, &own}) each->save(1);
      const auto guard = ema.averaged_weights();
      for (Checkpointer* each : {&replicas, &module, &own})
        expect_in(failure([&] { each->save(2); }),
                  "holds averaged weights now, and a resumed run would continue from them");
      lockstep::save(state_dict(*net),
                     path("averages" + std::to_string(context.rank()) + ".pt"));  // which somebody wants
    }
    for (Checkpointer* each : {&replicas, &module, &own}) {
      each->save(3);
      settle(context, *each);
    }
  });
}

/// Rank 0 chose before the others had written their part of the last save, and took the one before.
class ResumesAtOnce : public WrongSaves {
 protected:
  ResumesAtOnce() : memory_(StateMemory::make()) {
    ::setenv("LOCKSTEP_MEMORY_FD", std::to_string(memory_.get()).c_str(), 1);
  }
  ~ResumesAtOnce() override { ::unsetenv("LOCKSTEP_MEMORY_FD"); }

  FileDescriptor memory_;
};
INSTANTIATE_TEST_SUITE_P(Engines, ResumesAtOnce,
                         ::testing::Values(Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}, Engine{3, "gloo"}),
                         [](const auto& instance) { return testing::name_of(instance.param); });

TEST_P(ResumesAtOnce, WhatTheSlowestRankHasSaved) {
  run_ranks(GetParam(), [&](Context& context) {
    int64_t value = 0;
    Checkpointer checkpointer(path(), context.group(), {.memory_every_n_steps = 1});
    checkpointer.add("value", value);
    for (int64_t step = 1; step <= 6; ++step) {
      value = 100 + step;
      if (context.rank() == static_cast<int>(step) % context.world_size())
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      checkpointer.step(step);
      value = -1;
      EXPECT_TRUE(checkpointer.resume());
      EXPECT_EQ(checkpointer.resumed_step(), step);
      EXPECT_EQ(value, 100 + step);
    }
  });
}

TEST_P(ResumesAtOnce, WhatIsOnItsWayToTheDisk) {
  run_ranks(GetParam(), [&](Context& context) {
    at::Tensor large = at::zeros({1 << 21});
    Checkpointer checkpointer(path("disk"), context.group());
    checkpointer.add("large", {.save = [&] { return c10::IValue(large); },
                               .load = [&](const c10::IValue& state) { large.copy_(state.toTensor()); }});
    for (int64_t step = 1; step <= 4; ++step) {
      large.fill_(static_cast<double>(step));
      checkpointer.save(step);
      large.zero_();
      EXPECT_TRUE(checkpointer.resume());
      EXPECT_EQ(checkpointer.resumed_step(), step);
      EXPECT_EQ(large[5].item<float>(), static_cast<float>(step));
    }
    checkpointer.finish();
  });
}

/// 300 in an int8 was 44; another type was LibTorch's "please report a bug to PyTorch".
TEST_P(WrongSaves, NumbersThatTheVariableCannotHold) {
  run_ranks(GetParam(), [&](Context& context) {
    int step = 0;
    const auto resumed = [&](auto saved, auto into) {
      {
        Checkpointer from(path(), context.group(), {.replace_old_run = true});
        from.add("part", saved);
        from.save(++step);
        settle(context, from);
      }
      Checkpointer to(path(), context.group());
      to.add("part", into);
      return failure([&] {
        to.resume();
        EXPECT_EQ(static_cast<double>(into), static_cast<double>(saved));
      });
    };
    expect_in(resumed(int64_t{300}, int8_t{0}),
              "the checkpoint has 300 here, but the program's variable holds -128 to 127");
    expect_in(resumed(int64_t{-1}, uint8_t{0}), "has -1 here");
    expect_in(resumed(int64_t{-1}, uint64_t{0}), "has -1 here");
    expect_in(resumed(1e300, 1.0f), "has 1e+300 here");
    expect_in(resumed(2.5, 1), "has a Double here, but the program's variable is a whole number");
    expect_in(resumed(true, 1), "has a Bool here");
    expect_in(resumed(1, true), "has a Int here, but the program's variable is a bool");
    EXPECT_EQ(resumed(int64_t{127}, int8_t{0}), "");
    EXPECT_EQ(resumed(uint64_t{1} << 62, uint64_t{0}), "");
    EXPECT_EQ(resumed(7, 1.0), "");
    EXPECT_EQ(resumed(std::numeric_limits<double>::infinity(), 1.0f), "");
    uint64_t most = UINT64_MAX;
    torch::nn::Linear net(2, 2);
    Checkpointer checkpointer(path(), context.group(), {.replace_old_run = true});
    checkpointer.add("most", most);
    expect_in(failure([&] { checkpointer.save(1); }), "18446744073709551615");
    Checkpointer words(path("words"), context.group()), model(path("words"), context.group());
    std::string text = "text";
    words.add("part", text);
    words.save(1);
    settle(context, words);
    model.add("part", *net);
    const std::string refused = failure([&] { model.resume(); });
    expect_in(refused, "`part`: expected a dictionary of tensors, found a String");
    EXPECT_EQ(refused.find("report a bug"), std::string::npos) << refused;
  });
}

}  // namespace
}  // namespace lockstep
