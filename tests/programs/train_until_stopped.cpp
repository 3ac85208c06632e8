// A training that saves and leaves when it is asked to, and can resume: train_until_stopped FOLDER STEPS.
// Each rank prints the step from which it goes on, every tenth step, and the step after which it leaves.

#include <cstdlib>
#include <iostream>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

int main(int argc, char** argv) {
  lockstep::Context context(argc, argv, {.seed = 7});
  torch::nn::Linear net(16, 4);
  lockstep::DistributedDataParallel model(net, context);
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  lockstep::Checkpointer checkpointer(argv[1], context.group(), {.every_steps = 25});
  checkpointer.add("model", *net).add("optimizer", optimizer);
  checkpointer.resume();
  int64_t step = checkpointer.resumed_step();
  std::cout << "begins at " << step << std::endl;
  for (const int64_t steps = std::atoll(argv[2]); step < steps;) {
    optimizer.zero_grad();
    model(torch::rand({8, 16})).sum().backward();
    optimizer.step();
    checkpointer.step(++step);
    if (step % 10 == 0) std::cout << "step " << step << std::endl;
    if (context.stop_requested()) {
      checkpointer.save(step);
      checkpointer.finish();
      std::cout << "leaves after " << step << std::endl;
      return lockstep::kPreempted;
    }
  }
  checkpointer.finish();
  std::cout << "done at " << step << std::endl;
}
