// Edits a model while ranks train it: a bias, a layer, and weights that differ between ranks for a while.
//
//     lockstep run -n 2 -- build/bin/edit_live_model
//
// prints
//
//     a bias changed on rank 0:        5.0 0.5
//     broadcast_parameters(0):         5.0 5.0
//     a layer added on every rank:     drawn differently
//     refresh():                       the same, and trained
//     a layer added on rank 0 alone:   parameter 6 is `forgotten.weight: Float [2, 2] on cpu, new` on rank 0
//     weights changed on every rank:   1.0 2.0
//     two steps later:                 1.0 apart
//     average_parameters():            0.0 apart

#include <cstdio>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace {

struct NetImpl : torch::nn::Module {
  /// x [n, 4]; returns scores [n, 2].
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor hidden = torch::relu(first(x));
    if (!middle.is_empty()) hidden = torch::relu(middle(hidden));
    return last(hidden);
  }

  torch::nn::Linear first{register_module("first", torch::nn::Linear(4, 8))};
  torch::nn::Linear middle{nullptr};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(8, 2))};
};
TORCH_MODULE(Net);

class Editing {
 public:
  explicit Editing(const lockstep::Context& context) : context_(context) {}

  void change_a_bias() {
    at::NoGradGuard no_grad;
    net_->last->bias.fill_(0.5);
    if (context_.is_main()) net_->last->bias.fill_(5);
    say("a bias changed on rank 0:", all_of(net_->last->bias[0]));
    model_.broadcast_parameters(/*root=*/0);
    say("broadcast_parameters(0):", all_of(net_->last->bias[0]));
  }

  void add_a_layer() {
    torch::manual_seed(context_.rank());
    net_->middle = net_->register_module("middle", torch::nn::Linear(8, 8));
    say("a layer added on every rank:", is_same(net_->middle->weight) ? "drawn alike" : "drawn differently");
    model_.refresh();
    optimizer_.add_param_group(net_->middle->parameters());
    const torch::Tensor before = net_->middle->weight.detach().clone();
    train();
    say("refresh():", std::string(is_same(net_->middle->weight) ? "the same" : "different") +
                          (at::equal(before, net_->middle->weight) ? "" : ", and trained"));
  }

  void forget_the_other_ranks() {
    if (context_.is_main()) net_->register_module("forgotten", torch::nn::Linear(2, 2));
    try {
      model_.refresh();
    } catch (const lockstep::Error& error) {  // on every rank
      const std::string text = error.what();
      const size_t start = text.find("parameter"), end = text.find(" and `nothing");
      say("a layer added on rank 0 alone:", text.substr(start, end - start));
    }
    if (context_.is_main()) net_->unregister_module("forgotten");
  }

  void differ_for_a_while() {
    {
      at::NoGradGuard no_grad;
      net_->last->bias.fill_(context_.rank() + 1);
    }
    say("weights changed on every rank:", all_of(net_->last->bias[0]));
    train();
    train();
    say("two steps later:", apart());
    model_.average_parameters();
    say("average_parameters():", apart());
  }

 private:
  void train() {
    optimizer_.zero_grad();
    model_(torch::randn({16, 4})).square().mean().backward();
    optimizer_.step();
  }

  static std::string text_of(double number) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.1f", number);
    return text;
  }

  std::string all_of(const torch::Tensor& number) const {
    const torch::Tensor all = context_.group().all_gather(number.detach());
    std::string text;
    for (int rank = 0; rank < context_.world_size(); ++rank) text += text_of(all[rank].item<double>()) + " ";
    return text.substr(0, text.size() - 1);
  }
  std::string apart() const {
    const torch::Tensor all = context_.group().all_gather(net_->last->bias.detach());
    return text_of((all.amax(0) - all.amin(0)).max().item<double>()) + " apart";
  }
  bool is_same(const torch::Tensor& tensor) const {
    const torch::Tensor all = context_.group().all_gather(tensor.detach());
    return at::equal(all[0], all[context_.world_size() - 1]);
  }

  void say(const char* what, const std::string& result) const {
    if (context_.is_main()) std::printf("%-32s %s\n", what, result.c_str());
  }

  const lockstep::Context& context_;
  Net net_;
  lockstep::DistributedDataParallel<Net> model_{net_, context_};
  torch::optim::SGD optimizer_{net_->parameters(), 0.01};
};

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(argc, argv, [&] {
    const lockstep::Context context({.seed = 1});
    if (context.world_size() < 2)
      throw lockstep::Error("start it with two ranks or more: lockstep run -n 2 -- " + std::string(argv[0]));
    Editing editing(context);
    editing.change_a_bias();
    editing.add_a_layer();
    editing.forget_the_other_ranks();
    editing.differ_for_a_while();
    return 0;
  });
}
