#include <variant>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "collectives/operand_checks.h"
#include "communicator.h"

// torchcomms' operations in c10d's terms, and the functions by which torchcomms finds them in this library.

namespace lockstep::torchcomms {
namespace {

using namespace torch::comms;  // NOLINT
using at::Tensor;
using torch::comms::ReduceOp;
using Engine = c10d::Backend;
using Lists = std::vector<std::vector<Tensor>>;
using Tensors = std::vector<Tensor>;
using Work = c10::intrusive_ptr<TorchWork>;
using Works = EngineWork::Works;

/// What an operation has besides its tensors.
struct Call {
  bool async_op;
  milliseconds timeout;
  int root = 0;
  const ReduceOp* op = nullptr;
};

c10d::ReduceOp engines_op(const ReduceOp& op) {
  using Op = c10d::ReduceOp;
  constexpr Op::RedOpType kTypes[] = {Op::SUM, Op::PRODUCT, Op::MIN,        Op::MAX, Op::BAND,
                                      Op::BOR, Op::BXOR,    Op::PREMUL_SUM, Op::AVG};  // in torchcomms' order
  Op own;
  own.op_ = kTypes[static_cast<size_t>(op.type())];
  const auto supplement = [](const auto& factor) { return c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(factor); };
  if (op.factor()) own.supplement_ = std::visit(supplement, *op.factor());
  return own;
}

class Operations final : public Communicator {
 public:
  Work send(const Tensor& tensor, int dst, bool async_op, const SendOptions& o) override {
    Tensors tensors{tensor};
    return run(async_op, o.timeout, [&](Engine& engine) { return Works{engine.send(tensors, dst, o.tag)}; });
  }

  Work recv(Tensor& tensor, int src, bool async_op, const RecvOptions& o) override {
    Tensors tensors{tensor};
    return run(async_op, o.timeout, [&](Engine& engine) { return Works{engine.recv(tensors, src, o.tag)}; });
  }

  /// Messages between two ranks meet in order, and may meet those of send() and recv() with tag 0.
  Work batch_op_issue(const std::vector<BatchSendRecv::P2POp>& ops, bool async_op, const BatchP2POptions& o) override {
    return run(async_op, o.timeout, [&](Engine& engine) {
      TORCH_CHECK_VALUE(!ops.empty(), "batch_op_issue: the batch is empty");
      Works works;
      for (const auto& op : ops) {
        Tensors tensors{op.tensor};
        const bool sends = op.type == BatchSendRecv::P2POp::OpType::SEND;
        works.push_back(sends ? engine.send(tensors, op.peer, 0) : engine.recv(tensors, op.peer, 0));
      }
      return works;
    });
  }

  Work broadcast(Tensor& tensor, int root, bool async_op, const BroadcastOptions& o) override {
    return start<c10d::BroadcastOptions>(&Engine::broadcast, {async_op, o.timeout, root}, Tensors{tensor});
  }

  Work all_reduce(Tensor& tensor, const ReduceOp& op, bool async_op, const AllReduceOptions& o) override {
    return start<c10d::AllreduceOptions>(&Engine::allreduce, {async_op, o.timeout, 0, &op}, Tensors{tensor});
  }

  Work reduce(const Tensor& tensor, int root, const ReduceOp& op, bool async_op, const ReduceOptions& o) override {
    return start<c10d::ReduceOptions>(&Engine::reduce, {async_op, o.timeout, root, &op}, Tensors{tensor});
  }

  Work all_gather(const Tensors& outputs, const Tensor& input, bool async_op, const AllGatherOptions& o) override {
    return start<c10d::AllgatherOptions>(&Engine::allgather, {async_op, o.timeout}, Lists{outputs}, Tensors{input});
  }

  /// An all_to_all in which a rank sends the same to all.
  Work all_gather_v(const Tensors& outputs, const Tensor& input, bool async_op, const AllGatherOptions& o) override {
    const auto size = static_cast<size_t>(getSize()), rank = static_cast<size_t>(getRank());
    const bool in_place = outputs.size() == size && outputs[rank].defined() && outputs[rank].is_alias_of(input);
    Tensors inputs(size, in_place ? input.clone() : input);
    return start<c10d::AllToAllOptions>(&Engine::alltoall, {async_op, o.timeout}, Tensors(outputs), inputs);
  }

  Work all_gather_single(Tensor& output, const Tensor& input, bool async_op, const AllGatherSingleOptions& o) override {
    return start<c10d::AllgatherOptions>(&Engine::_allgather_base, {async_op, o.timeout}, output, Tensor(input));
  }

  Work reduce_scatter(Tensor& output, const Tensors& inputs, const ReduceOp& op, bool async_op,
                      const ReduceScatterOptions& o) override {
    const Call call{async_op, o.timeout, 0, &op};
    return start<c10d::ReduceScatterOptions>(&Engine::reduce_scatter, call, Tensors{output}, Lists{inputs});
  }

  /// A reduce to each rank in turn.
  Work reduce_scatter_v(Tensor& output, const Tensors& inputs, const ReduceOp& op, bool async_op,
                        const ReduceScatterOptions& o) override {
    const auto size = static_cast<size_t>(getSize()), rank = static_cast<size_t>(getRank());
    return run(async_op, o.timeout, [&](Engine& engine) {
      TORCH_CHECK_VALUE(inputs.size() == size && inputs[rank].sizes() == output.sizes(), "reduce_scatter_v: there are ",
                        inputs.size(), " inputs for ", size, " ranks, or input ", rank, " is unlike the output");
      check_lists_apart("reduce_scatter_v", {output}, inputs, 0, rank);
      output.copy_(inputs[rank]);
      Works works;
      for (size_t root = 0; root < size; ++root) {
        Tensors tensors{root == rank ? output : inputs[root]};
        const auto own = options_for<c10d::ReduceOptions>({async_op, o.timeout, static_cast<int>(root), &op});
        works.push_back(engine.reduce(tensors, own));
      }
      return works;
    });
  }

  Work reduce_scatter_single(Tensor& output, const Tensor& input, const ReduceOp& op, bool async_op,
                             const ReduceScatterSingleOptions& o) override {
    const Call call{async_op, o.timeout, 0, &op};
    return start<c10d::ReduceScatterOptions>(&Engine::_reduce_scatter_base, call, output, Tensor(input));
  }

  Work all_to_all_single(Tensor& output, const Tensor& input, bool async_op, const AllToAllSingleOptions& o) override {
    std::vector<int64_t> even;
    return start<c10d::AllToAllOptions>(&Engine::alltoall_base, {async_op, o.timeout}, output, Tensor(input), even,
                                        even);
  }

  Work all_to_all_v_single(Tensor& output, const Tensor& input, const std::vector<uint64_t>& output_splits,
                           const std::vector<uint64_t>& input_splits, bool async_op,
                           const AllToAllvSingleOptions& o) override {
    std::vector<int64_t> outputs(output_splits.begin(), output_splits.end());
    std::vector<int64_t> inputs(input_splits.begin(), input_splits.end());
    const Call call{async_op, o.timeout};
    return start<c10d::AllToAllOptions>(&Engine::alltoall_base, call, output, Tensor(input), outputs, inputs);
  }

  Work all_to_all(const Tensors& outputs, const Tensors& inputs, bool async_op, const AllToAllOptions& o) override {
    return start<c10d::AllToAllOptions>(&Engine::alltoall, {async_op, o.timeout}, Tensors(outputs), Tensors(inputs));
  }

  Work barrier(bool async_op, const BarrierOptions& o) override {
    return start<c10d::BarrierOptions>(&Engine::barrier, {async_op, o.timeout});
  }

  /// On other ranks than the root the list is not looked at; so in gather().
  Work scatter(Tensor& output, const Tensors& inputs, int root, bool async_op, const ScatterOptions& o) override {
    const Lists lists(root == getRank() ? 1 : 0, inputs);
    return start<c10d::ScatterOptions>(&Engine::scatter, {async_op, o.timeout, root}, Tensors{output}, Lists(lists));
  }

  Work gather(const Tensors& outputs, const Tensor& input, int root, bool async_op, const GatherOptions& o) override {
    const Lists lists(root == getRank() ? 1 : 0, outputs);
    return start<c10d::GatherOptions>(&Engine::gather, {async_op, o.timeout, root}, Lists(lists), Tensors{input});
  }

 private:
  template <typename Options>
  Options options_for(const Call& call) const {
    Options own;
    own.asyncOp = call.async_op;
    own.timeout = limit(call.timeout);
    if constexpr (requires { own.rootRank; }) own.rootRank = call.root;
    if constexpr (requires { own.reduceOp; }) own.reduceOp = engines_op(*call.op);
    return own;
  }

  template <typename Options, typename Method, typename... Operands>
  Work start(Method method, const Call& call, Operands&&... operands) {
    const auto own = options_for<Options>(call);
    return run(call.async_op, call.timeout, [&](Engine& engine) { return Works{(engine.*method)(operands..., own)}; });
  }
};

TorchCommBackend* new_comm() { return make_communicator()->keep(); }
void destroy_comm(TorchCommBackend* made) { static_cast<Communicator*>(made)->let_go(); }
/// That of the headers which this was compiled with; torchcomms refuses another than its own.
const char* supported_version() { return TORCHCOMM_BACKEND_ABI_VERSION; }

}  // namespace

std::shared_ptr<Communicator> make_communicator() { return std::make_shared<Operations>(); }

}  // namespace lockstep::torchcomms

extern "C" __attribute__((visibility("default"))) torch::comms::DynamicLoaderInterface
create_dynamic_loader_lockstep() {
  using namespace lockstep::torchcomms;  // NOLINT
  return {new_comm, destroy_comm, supported_version};
}
