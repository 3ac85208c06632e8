"""Where a block of C++ in the documents stands: what comes before and after it, and what its lines of `...` mean."""

import dataclasses


@dataclasses.dataclass
class Block:
    """A block that is the body of a function, or with `call` some declarations and what calls them."""
    before: str = ""
    after: str = ""
    dots: tuple = ()  # for each line that is `...`, in order
    call: str = ""
    exit_code: int = 0


CONTEXT = "lockstep::Context context(argc, argv, {.seed = 42});\n"
NET = CONTEXT + "Net net;\n"
MODEL = NET + "lockstep::DistributedDataParallel model(net, context);\n"
SGD = MODEL + "torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));\n"
DATA = "at::Tensor data = torch::rand({8, 1, 28, 28}), target = torch::arange(8);\n"
TRAIN = "auto train = loader(context);\n"
STEP = "optimizer.zero_grad(); cross_entropy(model(data), target).backward(); optimizer.step();\n"
CHECKPOINTER = 'lockstep::Checkpointer checkpointer("checkpoints", context.group());\n'
NAMES = "using enum lockstep::Split;\nusing lockstep::datasets::FashionMNIST;\n"

# Page -> its blocks, in order, without those that are programs of their own or fragments.
BLOCKS = {
    "checkpoints": [
        Block(NET, after='holds(lockstep::load("net.pt").tensors.size() == 4, "the file holds the model");'),
        Block(SGD + DATA + STEP),
        Block(SGD + TRAIN + 'const std::string run_dir = "run"; int64_t step = 0;\n', dots=(STEP,),
              after='holds(step == 10 * train.size(), "all steps were made");'),
    ],
    "common_mistakes": [
        Block(after='lockstep::assert_equal_across_ranks(context.group(), "target", target);'),
        Block(call=NET + 'if (context.is_main()) lockstep::save(lockstep::with_prefix("module.", lockstep::state_dict(*net)), "from_python.pt");\n'
              "context.group().barrier();\nload_weights_of_ddp(net);"),
        Block(call=SGD + DATA + "lockstep::Ema ema(*net);\ncross_entropy(model(data), target).backward();\nstep(optimizer, ema, net, data);"),
        Block(call=SGD + DATA + "add_a_layer(model, optimizer);\n" + STEP),
        Block(call=SGD + DATA + "watch(model);\n" + STEP),
    ],
    "communication_hooks": [
        Block(MODEL + DATA, after="cross_entropy(model(data), target).backward();"),
        Block(MODEL + DATA, after="cross_entropy(model(data), target).backward();"),
        Block(call=MODEL + DATA + "model.register_comm_hook(std::make_shared<InHalf>());\ncross_entropy(model(data), target).backward();"),
        Block(SGD + DATA + CHECKPOINTER + "auto hook = lockstep::power_sgd_hook();\nmodel.register_comm_hook(hook);\n"
              "lockstep::PeriodicModelAverager averager(context.group(), 2);\n" + STEP, after="checkpointer.save(1);\ncheckpointer.finish();"),
    ],
    "data": [
        Block(CONTEXT + 'const std::string path = "cifar";\n', after="for (auto& [data, target] : train) holds(data.size(1) == 3, \"images in colour\");"),
        Block(CONTEXT + "std::vector<at::Tensor> lines;\nfor (int i = 0; i < 16; ++i) lines.push_back(torch::ones({1 + i % 5}));\n"
              "const auto net = [](at::Tensor ids, at::Tensor mask) { return (ids * mask).sum(); };\nconst auto loss = [](at::Tensor sum) { holds(sum.item<double>() > 0, \"ids\"); };\n"),
        Block(CONTEXT + "const std::string folder = mnist(context);\n", after='holds(train.size() > 0, "60000 images");'),
        Block(MODEL + "auto dataset = images(lockstep::kTest);\n"),
    ],
    "distributed_data_parallel": [
        Block(NET + DATA, after='holds(net->first->weight.grad().defined(), "every parameter has a gradient");'),
        Block("class BadBatch {};\n" + SGD + "lockstep::Batch batch{torch::rand({8, 1, 28, 28}), torch::arange(8)};\n"
              "const auto loss_of = [&](at::Tensor scores, at::Tensor targets) { if (context.rank() == 1) throw BadBatch(); return cross_entropy(scores, targets); };\n"),
        Block(SGD + "const lockstep::Group& group = context.group();\nat::Tensor nothing_correct = torch::zeros(1);\n"
              "std::vector<lockstep::Batch> batches(2 + context.rank(), {torch::rand({8, 1, 28, 28}), torch::arange(8)});\n"
              "const auto train = [&](at::Tensor data, at::Tensor target) { " + STEP + "at::Tensor correct = torch::ones(1); group.all_reduce(correct); };\n"),
        Block(SGD + DATA + "model.join([&] {\n  const auto accumulation = model.accumulate(2);\n"
              "  for (int i = 0; i < 2 + context.rank(); ++i) { optimizer.zero_grad(); cross_entropy(model(data), target).backward(); if (model.step_complete()) optimizer.step(); }\n",
              after="});"),
    ],
    "elasticity": [
        Block(SGD + DATA + 'const std::string run_dir = "run";\n', after='checkpointer.add("model", model);\ncheckpointer.resume();\n' + STEP + "checkpointer.step(1);\ncheckpointer.finish();"),
    ],
    "exactness": [
        Block("auto dataset = images();\nconst auto loss_of = cross_entropy;\n"),
    ],
    "from_horovod": [Block(call=NET + "train(context, net, images());")],
    "from_mpi": [Block(call=NET + DATA + "auto batches = loader(context);\ntrain(context, net, batches);\ncross_entropy(net(data), target).backward();\naverage_gradients(net, context.group());")],
    "from_pytorch_ddp": [Block(call=NET + 'train(context, net, "data");')],
    "in_which_order": [
        Block("auto images = before::images(), test_images = before::images(lockstep::kTest);\n", after='holds(step == 10 * train.size(), "all steps were made");'),
    ],
    "large_models": [
        Block(CONTEXT + "torch::nn::Sequential net;\nnet->push_back(lockstep::ShardedUnit<torch::nn::Linear>(4, 4));\n",
              after="model(torch::rand({2, 4}, torch::kBFloat16)).to(torch::kFloat).square().sum().backward();\noptimizer.step();"),
    ],
    "launcher": [
        Block(SGD + TRAIN + CHECKPOINTER + 'checkpointer.add("model", model);\nint64_t step = 0;\n',
              dots=(STEP + "if (++step == 2 && context.is_main()) raise(SIGTERM);",), exit_code=60, after='holds(false, "a run that was asked to stop ends");'),
    ],
    "observing": [
        Block(SGD + TRAIN + "double accuracy = 0.5, lr = 0.1;\n", dots=("optimizer.zero_grad(); auto loss = cross_entropy(model(data), target); loss.backward(); optimizer.step();",)),
        Block(NET + "lockstep::RunLog log(context);\nat::Tensor images = torch::rand({2, 1, 28, 28});\nlog.step(8);\n"),
    ],
    "optimizers": [
        Block(NET + DATA, dots=("at::Tensor loss = cross_entropy(net(data), target);",)),
        Block(NET + DATA, after=STEP),
        Block(NET + "net->to(at::kBFloat16);\n" + DATA.replace("28})", "28}, at::kBFloat16)"), after="cross_entropy(net(data), target).backward();\noptimizer.step();"),
    ],
    "ports": [
        Block(call=NET + DATA + "learn(net, data, target);"),
        Block(call=NET + DATA + "lockstep::DistributedDataParallelOptions options;\noptions.reduction = lockstep::GradientReduction::kWeightedMean;\n"
              "lockstep::DistributedDataParallel model(net, context, options);\nlearn(model, data, target, 8);"),
    ],
    "reinforcement_learning": [
        Block(CONTEXT + CHECKPOINTER + "torch::nn::Linear policy(4, 2);\nlockstep::DistributedDataParallel model(policy, context);\n"
              "torch::optim::SGD optimizer(policy->parameters(), 0.1);\nconst int64_t steps = 3, environments = 6;\n"
              "const auto act = [](int64_t n) { return lockstep::NamedTensors{{\"observation\", torch::rand({n, 4})}, {\"action\", torch::zeros({n}, torch::kLong)}, {\"reward\", torch::rand({n})}}; };\n"
              "const auto loss_of = [](at::Tensor scores, at::Tensor actions, at::Tensor rewards) { return (scores.gather(1, actions.unsqueeze(1)).squeeze(1) - rewards).square().mean(); };\n",
              after='holds(experience.size() == 18 && experience.draws() == 3, "all samples are there");'),
    ],
    "slow_networks": [
        Block(NET + TRAIN, after='holds(diloco.stats().rounds > 0, "machines have synchronised");'),
        Block(NET + CHECKPOINTER + "lockstep::DistributedDataParallel model(net, context.group().on_this_machine());\n"
              "lockstep::DiLoCo diloco(model, context);\ntorch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));\n",
              after="checkpointer.save(1);\ncheckpointer.finish();"),
    ],
    "step": [Block(SGD + DATA + "for (int i = 0; i < 3; ++i) { " + STEP + "}\n", after=STEP)],
    "trainer": [
        Block(NAMES + 'const std::string folder = "data";\n', after='holds(result.epochs >= 1, "epochs were done");'),
    ],
    "training": [
        Block(NET + DATA, after="cross_entropy(net(data), target).backward();\noptimizer.step();"),
        Block(SGD + DATA, dots=("optimizer.zero_grad(); cross_entropy(model(data), target).backward();",)),
        Block(SGD + DATA + CHECKPOINTER + "const auto evaluate = [](Net& net) { net->eval(); };\n", dots=("cross_entropy(model(data), target).backward();", ""),
              after="checkpointer.save(1);\ncheckpointer.finish();"),
        Block("using Net = NormedNet;\n" + CONTEXT + DATA, after="cross_entropy(model(data), target).backward();"),
        Block(CONTEXT + DATA + "using Block = torch::nn::Linear;\nstd::vector<Block> blocks{Block(784, 784), Block(784, 784)};\nBlock head(784, 10);\ndata = data.flatten(1);\n",
              after='holds(blocks[0]->weight.grad().defined(), "gradients came through");'),
        Block(SGD + DATA + "lockstep::LRScheduler scheduler(optimizer, lockstep::step_lr(10));\n", dots=("",)),
    ],
}
