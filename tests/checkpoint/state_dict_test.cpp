#include <gtest/gtest.h>

#include <torch/torch.h>

#include <lockstep/checkpoint.h>

#include "checkpoint/failure.h"
#include "support/complaint.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::failure;

struct NetImpl : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(3, 2));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(2));
  torch::nn::Sequential rest =
      register_module("rest", torch::nn::Sequential(torch::nn::Linear(2, 2), torch::nn::ReLU()));
};
TORCH_MODULE(Net);

StateDict copy(const StateDict& state) {
  StateDict result;
  for (const auto& item : state) result.insert(item.key(), item.value().detach().clone());
  return result;
}

TEST(StateDict, HasPyTorchsNames) {
  const Net net;
  EXPECT_EQ(state_dict(*net).keys(), (std::vector<std::string>{"first.weight", "first.bias", "norm.weight", "norm.bias",
                                                               "rest.0.weight", "rest.0.bias", "norm.running_mean",
                                                               "norm.running_var", "norm.num_batches_tracked"}));
}

TEST(StateDict, HoldsTheModulesOwnTensors) {
  const Net net;
  {
    torch::NoGradGuard no_grad;
    state_dict(*net)["first.bias"].fill_(7);
  }
  EXPECT_EQ(net->first->bias[0].item<float>(), 7);
}

TEST(LoadStateDict, CopiesIntoTheModulesOwnTensors) {
  const Net from, to;
  from->norm->running_mean.fill_(3);
  const auto weight = to->first->weight;
  load_state_dict(*to.ptr(), copy(state_dict(*from)));
  EXPECT_EQ(hash(state_dict(*to)), hash(state_dict(*from)));
  EXPECT_TRUE(weight.is_same(to->first->weight));
  EXPECT_TRUE(torch::equal(weight, from->first->weight));
  EXPECT_TRUE(weight.requires_grad() && weight.is_leaf());
  EXPECT_FALSE(weight.data_ptr() == from->first->weight.data_ptr());
}

TEST(LoadStateDict, TakesOffWhatPythonsWrappersLeave) {
  const Net from, to;
  for (const std::string prefix : {"module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."}) {
    const LoadStateReport report = load_state_dict(*to.ptr(), with_prefix(prefix, copy(state_dict(*from))));
    EXPECT_EQ(report.removed_prefix, prefix);
    EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
    EXPECT_EQ(hash(state_dict(*to)), hash(state_dict(*from)));
    torch::NoGradGuard no_grad;
    for (const auto& item : state_dict(*to)) at::Tensor(item.value()).zero_();
  }
}

struct Wrapped : torch::nn::Module {
  torch::nn::Linear inner = register_module("module", torch::nn::Linear(2, 2));
};

TEST(LoadStateDict, APrefixThatBelongsToTheNamesStays) {
  Wrapped from, to;
  EXPECT_EQ(load_state_dict(to, copy(state_dict(from))).removed_prefix, "");
  EXPECT_TRUE(torch::equal(to.inner->weight, from.inner->weight));
  // Wrapped once more, one of the two goes.
  EXPECT_EQ(load_state_dict(to, with_prefix("module.", copy(state_dict(from)))).removed_prefix, "module.");
  // If no prefix helps, the message has the names as they are.
  torch::nn::Linear other(2, 2);
  StateDict state;
  state.insert("module.x", at::ones({1}));
  EXPECT_NE(failure([&] { load_state_dict(*other.ptr(), state); }).find("unknown: module.x"), std::string::npos);
}

TEST(LoadStateDict, NamesTheNearest) {
  const Net net;
  StateDict state = copy(state_dict(*net));
  state.insert("frist.bias", state["first.bias"]);
  state.erase("first.bias");
  state.insert("backbone.norm.running_mean", state["norm.running_mean"]);
  state.erase("norm.running_mean");
  state.erase("norm.running_var");
  state.insert("z", at::ones({1}));
  const std::string text = failure([&] { load_state_dict(*net.ptr(), state); });
  for (const char* part :
       {"missing: first.bias (near: frist.bias)", "missing: norm.running_mean (near: backbone.norm.running_mean)",
        "missing: norm.running_var\n", "unknown: z"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\nis not in\n" << text;
}

TEST(LoadStateDict, NotStrictLoadsWhatFits) {
  const Net net;
  StateDict state = copy(state_dict(*net));
  state.erase("first.bias");
  state.insert("more", at::ones({1}));
  state["first.weight"].fill_(4);
  const LoadStateReport report = load_state_dict(*net.ptr(), state, {.strict = false});
  EXPECT_EQ(report.missing, std::vector<std::string>{"first.bias"});
  EXPECT_EQ(report.unexpected, std::vector<std::string>{"more"});
  EXPECT_EQ(net->first->weight[0][0].item<float>(), 4);
  state["first.weight"] = at::ones({9});
  EXPECT_NE(failure([&] { load_state_dict(*net.ptr(), state, {.strict = false}); }).find("shape of first.weight"),
            std::string::npos);
}

TEST(LoadStateDict, ListsAllProblemsAndChangesNothing) {
  const Net net;
  StateDict state = copy(state_dict(*net));
  for (auto& item : state) item.value().fill_(9);
  state.erase("first.bias");
  state.erase("norm.running_var");
  state["rest.0.weight"] = torch::ones({4, 4});
  state["norm.weight"] = torch::ones({});
  state.insert("second.weight", torch::ones({1}));
  const std::string before = hash(state_dict(*net));
  const std::string text = failure([&] { load_state_dict(*net.ptr(), state); });
  for (const char* part : {"missing: first.bias", "missing: norm.running_var",
                           "shape of rest.0.weight: [4, 4] given, [2, 2] in the module",
                           "shape of norm.weight: [] given, [2] in the module", "unknown: second.weight"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\nis not in\n" << text;
  EXPECT_EQ(hash(state_dict(*net)), before);
}

TEST(Prefix, SeveralStatesShareAFile) {
  StateDict all;
  all.update(with_prefix("a.", {{"x", torch::ones({1})}}));
  all.update(with_prefix("ab.", {{"x", torch::zeros({2})}}));
  EXPECT_EQ(all.keys(), (std::vector<std::string>{"a.x", "ab.x"}));
  EXPECT_EQ(without_prefix("a.", all).keys(), std::vector<std::string>{"x"});
  EXPECT_EQ(without_prefix("ab.", all)["x"].numel(), 2);
  EXPECT_TRUE(without_prefix("b.", all).is_empty());
}

// The advice "load it with torch::jit::load" used to be given for files that C++'s own torch::save had written.
TEST(Load, SaysOfAFileOfCppsTorchSaveWhatItIsAndTheWayItNamesWorks) {
  const TemporaryFolder folder;
  const std::string path = folder.path() / "net.pt";
  const Net net;
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const std::vector<std::function<void()>> writers = {
      [&] { torch::save(optimizer, path); }, [&] { torch::save(at::ones({3}), path); },
      [&] { torch::save(std::vector{at::ones({3})}, path); }, [&] { torch::save(net, path); }};
  for (const auto& write : writers) {
    write();
    for (const std::string& text : {failure([&] { (void)load(path); }), failure([&] { (void)load_object(path); })}) {
      EXPECT_NE(text.find("it was written by torch::save in C++"), std::string::npos) << text;
      EXPECT_NE(text.find("load it with torch::load"), std::string::npos) << text;
      EXPECT_EQ(text.find("jit"), std::string::npos) << text;
    }
  }
  Net other;
  torch::load(other, path);
  save(state_dict(*other), path);
  EXPECT_EQ(hash(load(path).tensors), hash(state_dict(*net)));
  const std::string script = failure([] { (void)load(LOCKSTEP_SOURCE_DIR "/tests/golden/scripted_batch_norm.pt"); });
  EXPECT_NE(script.find("it is a TorchScript archive (torch.jit.save); load it with torch::jit::load"),
            std::string::npos)
      << script;
}

TEST(Hash, NamesAnUndefinedTensor) {
  EXPECT_EQ(testing::complaint([] {
              static_cast<void>(hash({{"fc.weight", torch::ones({2})}, {"fc.bias", at::Tensor()}}));
            }),
            "hash: the state's tensor `fc.bias` is an undefined tensor");
}

TEST(Hash, DependsOnEveryPart) {
  const auto of = [](const std::string& name, const at::Tensor& tensor) { return hash({{name, tensor}}); };
  const auto values = torch::arange(24, torch::kFloat);
  const std::string base = of("x", values);
  EXPECT_EQ(base.size(), 16u);
  EXPECT_EQ(base, of("x", values.clone()));
  EXPECT_EQ(base, of("x", torch::arange(48, torch::kFloat).div(2).slice(0, 0, 48, 2)))
      << "of the values, not of their layout";
  EXPECT_NE(base, of("y", values));
  EXPECT_NE(base, of("x", values.reshape({4, 6})));
  EXPECT_NE(base, of("x", values.view(torch::kInt)));
  EXPECT_NE(of("x", torch::zeros({2})), of("x", -torch::zeros({2})));
  for (int64_t i = 0; i < 24; ++i)
    for (int bit : {0, 13, 31}) {
      auto changed = values.clone();
      changed.view(torch::kInt)[i].bitwise_xor_(static_cast<int>(1u << bit));
      EXPECT_NE(base, of("x", changed)) << i << " " << bit;
    }
  EXPECT_NE(hash({{"a", values}, {"b", -values}}), hash({{"b", -values}, {"a", values}}));
}

/// LibTorch's own message had no name, and the tensors before it had changed.
TEST(LoadStateDict, TensorsThatCannotBeCopiedAreNamedAndNothingChanges) {
  torch::nn::Linear net(3, 2);
  const std::string before = hash(state_dict(*net));
  const auto refused = [&](const at::Tensor& bias) {
    return failure([&] { load_state_dict(*net, {{"weight", at::ones({2, 3})}, {"bias", bias}}); });
  };
  const auto meta = at::TensorOptions(at::kMeta);
  EXPECT_NE(refused(at::ones({2}).to_sparse()).find("bias: Sparse given, Strided in the module"), std::string::npos);
  EXPECT_NE(refused(at::empty({2}, meta)).find("bias: given on the meta device"), std::string::npos);
  EXPECT_NE(refused(at::Tensor()).find("bias: an undefined tensor given"), std::string::npos);
  EXPECT_EQ(hash(state_dict(*net)), before);
  EXPECT_EQ(refused(at::ones({1}).expand({2})), "") << "what is given may repeat its elements";

  struct Odd : torch::nn::Module {
    explicit Odd(const at::Tensor& second) {
      register_buffer("first", at::zeros({2}));
      register_buffer("second", second);
    }
  };
  for (const auto& [second, part] : std::vector<std::pair<at::Tensor, std::string>>{
           {at::zeros({1}).expand({4}), "second: its elements share memory in the module (expand())"},
           {at::zeros({4}, meta), "second: on the meta device in the module"}}) {
    Odd odd(second);
    const std::string text = failure([&] {
      load_state_dict(odd, {{"first", at::ones({2})}, {"second", at::ones({4})}});
    });
    EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_TRUE(at::equal(odd.buffers()[0], at::zeros({2}))) << "the first has changed";
  }
}

}  // namespace
}  // namespace lockstep
