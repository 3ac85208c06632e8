// A training that saves to memory after every step and kills itself once: dies_and_goes_on FOLDER STEPS [STEP RANK
// PLACE]. Each rank prints the step from which it goes on, each step when it is done, and in the end a hash of what it
// has.
//
// PLACE: "forward", "save" (some of its part of the state is written, and the rest cannot be read), "all" (every rank
// in its forward pass), "hold" (it does not die but stays there), or "diverge" (its copy of the model changes, which
// all ranks find; the next start stays there).

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace {

constexpr int64_t kPages = 64, kPage = 4096;

/// A state in pages of its own, of which the last quarter can be made unreadable: whoever copies it dies of SIGSEGV.
struct Pages {
  char* start =
      static_cast<char*>(::mmap(nullptr, kPages* kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  at::Tensor tensor = at::from_blob(start, {kPages * kPage / 4}, at::kFloat);
  void close() { ::mprotect(start + kPages / 4 * 3 * kPage, kPages / 4 * kPage, PROT_NONE); }
};

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(argc, argv, [&] {
    lockstep::Context context(argc, argv, {.seed = 7});
    const int64_t steps = std::atoll(argv[2]), die_at = argc > 5 ? std::atoll(argv[3]) : -1;
    const std::string place = argc > 5 ? argv[5] : "";
    const bool victim = argc > 5 && (place == "all" || context.rank() == std::atoi(argv[4]));
    torch::nn::Sequential net(torch::nn::Linear(64, 256), torch::nn::BatchNorm1d(256), torch::nn::ReLU(),
                              torch::nn::Dropout(0.2), torch::nn::Linear(256, 8));
    lockstep::DistributedDataParallel<torch::nn::Sequential> model(net, context);
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
    Pages pages;
    lockstep::Checkpointer checkpointer(argv[1], context.group(), {.every_steps = 10, .memory_every_n_steps = 1});
    const auto numbers = [](at::Tensor& tensor) {
      return lockstep::Checkpointer::Part{
          .save = [&tensor] { return c10::IValue(tensor); },
          .load = [&tensor](const c10::IValue& state) { tensor.copy_(state.toTensor()); }};
    };
    checkpointer.add("model", model).add("optimizer", optimizer).add("pages", numbers(pages.tensor));
    checkpointer.add("own", numbers(pages.tensor), lockstep::Checkpointer::Scope::kEachRank);
    checkpointer.resume();
    int64_t step = checkpointer.resumed_step();
    const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
    const bool died = restarts != nullptr && std::atoi(restarts) > 0;
    std::cout << std::fixed << "begins at " << step << " " << seconds() << std::endl;
    const auto die = [&](const char* where) {
      const bool in_forward = place == "all" || place == "hold";
      const bool here = place == where || (in_forward && std::string(where) == "forward");
      if (died || !victim || step + 1 != die_at || !here) return;
      std::cout << "dies " << seconds() << std::endl;
      if (place == "hold")
        for (;;) ::pause();
      if (place == "save")
        pages.close();
      else
        ::kill(::getpid(), SIGKILL);
    };
    while (step < steps) {
      if (place == "diverge" && step + 1 == die_at) {
        while (died) ::pause();
        const at::NoGradGuard no_grad;
        if (victim) net->parameters().front().add_(1);
        model.check_divergence();
      }
      optimizer.zero_grad();
      const bool is_virtual = context.virtual_ranks() > 0;
      const auto block = is_virtual ? context.virtual_block() : lockstep::Context::Block{0, 1};
      for (int one = block.first; one < block.last; ++one) {
        if (is_virtual) context.enter_virtual_rank(one);
        const at::Tensor input = torch::rand({16, 64});
        if (one == block.first) die("forward");
        model(input).square().sum().backward();
      }
      optimizer.step();
      pages.tensor.add_(torch::rand({1}).item<float>() + static_cast<float>(context.world_size()));
      if (context.world_size() > 1) context.group().all_reduce(pages.tensor);
      pages.tensor.remainder_(1000);
      die("save");
      checkpointer.step(++step);
      std::cout << "step " << step << " " << seconds() << std::endl;
    }
    checkpointer.finish();
    lockstep::StateDict all = lockstep::with_prefix("model.", lockstep::state_dict(*net));
    all.update(lockstep::with_prefix("optimizer.", lockstep::state_dict(optimizer)));
    all.insert("pages", pages.tensor);
    all.insert("next", torch::rand({4}));
    std::cout << "ends with " << lockstep::hash(all) << std::endl;
    return 0;
  });
}
