#include "diloco/island_state.h"

#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/checkpoint.h>
#include <lockstep/error.h>

#include "diloco/state_bytes.h"

namespace lockstep::diloco {
namespace {

std::string name_of_other(size_t i) { return "other." + std::to_string(i); }

/// Before the names of a fragment's tensors.
std::string prefix_of(size_t fragment) { return fragment == 0 ? "" : std::to_string(fragment) + "."; }

std::vector<int64_t> numbers_of(const StateDict& state, const std::string& name) {
  const at::Tensor* const found = state.find(name);
  if (found == nullptr || found->scalar_type() != at::kLong || found->dim() != 1)
    throw Error("DiLoCo: the outer state of another machine has no `" + name +
                "`; give all machines the same Lockstep");
  return {found->const_data_ptr<int64_t>(), found->const_data_ptr<int64_t>() + found->numel()};
}

/// Throws Error unless a state has a tensor like `own`, which is the `i`th that is not trained.
void check_other(const StateDict& state, size_t i, const at::Tensor& own) {
  const at::Tensor* const found = state.find(name_of_other(i));
  if (found != nullptr && found->sizes() == own.sizes() && found->scalar_type() == own.scalar_type()) return;
  throw Error(
      "DiLoCo: the outer state of another machine has other frozen parameters or buffers than this one's model; "
      "give all machines the same model");
}

}  // namespace

std::string bytes_of_island_state(const std::vector<OuterFragment>& fragments, const EmptyRounds& empty_rounds,
                                  const std::vector<at::Tensor>& others) {
  StateDict state;
  for (size_t fragment = 0; fragment < fragments.size(); ++fragment)
    for (const auto& item : fragments[fragment].state_dict())
      state.insert(prefix_of(fragment) + item.key(), item.value());
  for (size_t fragment = 0; fragment < fragments.size(); ++fragment) {
    const auto found = empty_rounds.of_fragment.find(fragment);
    state.insert(
        prefix_of(fragment) + "empty_rounds",
        at::tensor(found == empty_rounds.of_fragment.end() ? std::vector<int64_t>() : found->second, at::kLong));
  }
  for (size_t i = 0; i < others.size(); ++i) state.insert(name_of_other(i), others[i].detach().cpu());
  return bytes_of_state(state);
}

void load_island_state(const std::string& bytes, std::vector<OuterFragment>& fragments, EmptyRounds& empty_rounds,
                       const std::vector<at::Tensor>& others) {
  const at::NoGradGuard no_grad;
  const StateDict state = state_of_bytes(bytes);
  const auto of_fragment = [&](size_t fragment) {
    return fragment == 0 ? state : without_prefix(prefix_of(fragment), state);
  };
  for (size_t fragment = 0; fragment < fragments.size(); ++fragment) fragments[fragment].check(of_fragment(fragment));
  for (size_t i = 0; i < others.size(); ++i) check_other(state, i, others[i]);
  EmptyRounds empty;
  for (size_t fragment = 0; fragment < fragments.size(); ++fragment)
    empty.of_fragment[fragment] = numbers_of(of_fragment(fragment), "empty_rounds");
  for (size_t fragment = 0; fragment < fragments.size(); ++fragment) {
    fragments[fragment].load_state_dict(of_fragment(fragment));
    if (const at::Tensor& rest = fragments[fragment].rest(); rest.defined()) at::Tensor(rest).zero_();
  }
  empty_rounds = std::move(empty);
  for (size_t i = 0; i < others.size(); ++i) others[i].detach().copy_(state[name_of_other(i)]);
}

}  // namespace lockstep::diloco
