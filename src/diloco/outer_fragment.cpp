#include "diloco/outer_fragment.h"

#include <algorithm>
#include <sstream>
#include <typeinfo>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>

#include <lockstep/checkpoint.h>
#include <lockstep/error.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "base/rank_names.h"
#include "base/weights_set.h"
#include "collectives/cause.h"
#include "collectives/storages.h"
#include "data_parallel/divergence.h"
#include "diloco/exchange.h"
#include "rank_page/operation_label.h"

namespace lockstep::diloco {
namespace {

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const DiLoCoOptions& options, const at::Tensor& copy) {
  if (options.outer_optimizer) {
    auto made = options.outer_optimizer({copy});
    TORCH_CHECK(made != nullptr, "DiLoCo: outer_optimizer returned null; return an optimizer of the given tensors");
    std::vector<const c10::TensorImpl*> held;
    for (const auto& group : made->param_groups())
      for (const at::Tensor& tensor : group.params()) held.push_back(tensor.unsafeGetTensorImpl());
    TORCH_CHECK(held == std::vector<const c10::TensorImpl*>{copy.unsafeGetTensorImpl()},
                "DiLoCo: outer_optimizer returned an optimizer of tensors other than those it was given, which would "
                "not move the outer copy; return an optimizer of the given tensors");
    (void)lockstep::state_dict(*made);  // fails for one whose state is not known
    return made;
  }
  const auto sgd = torch::optim::SGDOptions(options.outer_lr)
                       .momentum(options.outer_momentum)
                       .nesterov(options.nesterov && options.outer_momentum > 0);
  // Its kernels have the same bits on every processor.
  return std::make_unique<ZeroRedundancyOptimizer<torch::optim::SGD>>(std::vector<at::Tensor>{copy}, sgd);
}

}  // namespace

OuterFragment::OuterFragment(Fragment fragment, const Machines& machines, const DiLoCoOptions& options)
    : fragment_(std::move(fragment)) {
  slice_ = padded_slice((fragment_.elements() + machines.slices() - 1) / machines.slices(), machines.count());
  if (machines.owns_slice()) {
    copy_ = fragment_.read(machines.here().rank() * slice_, slice_);
    const OperationLabel label("the outer copy of a DiLoCo");
    machines.rail().broadcast(copy_, machines.in_rail(0));
  }
  // Ranks without a slice make one as well, which is compared with the others'.
  // What is wrong on some ranks alone is told when all have made theirs.
  problem_ = failure_of([&] { optimizer_ = make_optimizer(options, copy_.defined() ? copy_ : at::zeros({1})); });
  if (!copy_.defined() || !options.error_feedback) return;
  rest_ = at::zeros_like(copy_);
  mean_rest_ = at::zeros_like(copy_);
}

std::string OuterFragment::describe() const {
  std::ostringstream text;
  text << "outer_optimizer " << c10::demangle(typeid(*optimizer_).name()) << ' '
       << optimizer_state_dict(*optimizer_).toGenericDict().at("param_groups");
  return text.str();
}

std::string OuterFragment::kind_of_optimizer() const { return c10::demangle(typeid(*optimizer_).name()); }

at::Tensor OuterFragment::pseudo_gradient(const Machines& machines) const {
  if (!copy_.defined()) return {};
  const at::NoGradGuard no_grad;
  at::Tensor difference = copy_ - fragment_.read(machines.here().rank() * slice_, slice_);
  if (rest_.defined()) difference += rest_;
  return difference;
}

void OuterFragment::step(const at::Tensor& mean) {
  copy_.mutable_grad() = mean;
  optimizer_->step();
  copy_.mutable_grad() = at::Tensor();
}

uint64_t OuterFragment::hash() const { return copy_.defined() ? hash_of(copy_) : 0; }

at::Tensor OuterFragment::whole(const Machines& machines) const {
  const at::NoGradGuard no_grad;
  if (machines.here().world_size() == 1) return copy_;
  const OperationLabel label("the outer copy of a DiLoCo");
  const at::Tensor all = machines.here().all_gather(copy_.defined() ? copy_ : at::zeros({slice_}));
  return all.flatten().narrow(0, 0, machines.slices() * slice_);
}

at::Tensor OuterFragment::learned(const Machines& machines) const {
  const int64_t elements = fragment_.elements();
  const at::NoGradGuard no_grad;
  const at::Tensor outer = whole(machines).narrow(0, 0, elements);
  at::Tensor difference = fragment_.read(0, elements) - outer;
  machines.here().barrier();  // another rank may write parameters that they share
  return difference;
}

void OuterFragment::move(const Machines& machines, const at::Tensor& learned) const {
  const at::NoGradGuard no_grad;
  const at::Tensor moved = whole(machines).narrow(0, 0, learned.numel()) + learned;
  fragment_.write(moved, /*keep=*/0, /*writes_shared=*/machines.here().rank() == 0);
  machines.here().barrier();
  note_weights_set(storages_of(fragment_.parameters()));
}

StateDict OuterFragment::state_dict() const {
  StateDict state;
  state.insert("sent_at", at::scalar_tensor(sent_at_, at::kLong));
  if (!copy_.defined()) return state;
  state.insert("outer", copy_.detach().clone());
  if (rest_.defined()) {
    state.insert("rest", rest_.clone());
    state.insert("mean_rest", mean_rest_.clone());
  }
  for (const auto& item : lockstep::state_dict(*optimizer_))
    state.insert("optimizer." + item.key(), item.value().clone());
  return state;
}

void OuterFragment::check(const StateDict& state) const {
  const auto shape_of = [&](const char* name) {
    const at::Tensor* found = state.find(name);
    std::ostringstream text;
    found != nullptr ? text << found->sizes() : text << "nothing";
    return text.str();
  };
  for (const auto& [name, own] :
       {std::pair("outer", &copy_), std::pair("rest", &rest_), std::pair("mean_rest", &mean_rest_)}) {
    std::ostringstream expected;
    own->defined() ? expected << own->sizes() : expected << "nothing";
    if (shape_of(name) != expected.str())
      throw Error("the state of DiLoCo has " + shape_of(name) + " as `" + name + "`, and " + expected.str() +
                  " was expected; make the DiLoCo with the options of the run that saved it");
  }
}

void OuterFragment::load_state_dict(const StateDict& state) {
  const at::NoGradGuard no_grad;
  sent_at_ = state["sent_at"].item<int64_t>();
  if (!copy_.defined()) return;
  lockstep::load_state_dict(*optimizer_, without_prefix("optimizer.", state));
  copy_.copy_(state["outer"]);
  if (!rest_.defined()) return;
  rest_.copy_(state["rest"]);
  mean_rest_.copy_(state["mean_rest"]);
}

void check_made(const Group& group, const std::vector<OuterFragment>& fragments) {
  std::string own;
  for (const OuterFragment& fragment : fragments)
    if (own.empty()) own = fragment.problem();
  const OperationLabel label("making a DiLoCo");
  const auto problems = group.all_gather_bytes(own);
  const auto first = std::find_if(problems.begin(), problems.end(), [](const auto& one) { return !one.empty(); });
  if (first == problems.end()) return;
  const bool on_all = std::all_of(problems.begin(), problems.end(), [&](const auto& one) { return one == *first; });
  TORCH_CHECK(!on_all, *first);
  throw Error("DiLoCo: the outer optimizer could not be made on " + ranks_with(problems, *first) + ": " + *first);
}

}  // namespace lockstep::diloco
