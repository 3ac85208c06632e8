#include "train/scaler_refusals.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

#include <lockstep/error.h>

#include "base/rank_names.h"

namespace lockstep {
namespace {

/// The messages of ranks once one of them is in trouble: one of these, and a predicate.
constexpr char kIsInTrouble = '!', kRanUnscaled = '-', kRanScaled = '+', kNothing = '.';

[[noreturn]] void refuse_unscaled(const std::vector<std::string>& told, const std::function<std::string(size_t)>& who) {
  std::string text;
  bool any_scaled = false, others = false;
  size_t scaled = 0;
  for (size_t rank = 0; rank < told.size(); ++rank) {
    any_scaled = any_scaled || told[rank].front() == kRanScaled || told[rank].find(" of ") != std::string::npos;
    if (told[rank].front() == kRanScaled) {
      others = true;
      scaled = rank;
    }
    const auto here = told.begin() + static_cast<std::ptrdiff_t>(rank);
    if (told[rank].front() != kRanUnscaled || std::find(told.begin(), here, told[rank]) != here) continue;
    text += (text.empty() ? "" : ", ") + who(rank) + " " + told[rank].substr(1);
  }
  throw Error(
      "GradScaler: " + text + " without scale() since the last update()" +
      (others ? ", and " + who(scaled) + " with it" : "") +
      (any_scaled ? ", so the gradients have different scales."
                  : ", so the gradients do not have the scale by which they would be divided.") +
      " Call scaler.scale(loss).backward() on every rank and in every pass; one without a batch calls "
      "skip_step() in place of its backward; a Pipeline, which runs backward itself, goes without a GradScaler");
}

}  // namespace

void refuse(const std::optional<Group>& ranks, const std::string& trouble, const std::string& unscaled, bool scaled) {
  const std::string own = !trouble.empty()    ? kIsInTrouble + trouble
                          : !unscaled.empty() ? kRanUnscaled + unscaled
                                              : std::string(1, scaled ? kRanScaled : kNothing);
  const auto told = ranks ? ranks->all_gather_bytes(own) : std::vector<std::string>{own};
  const auto who = [&](size_t rank) { return ranks ? ranks_with(told, told[rank]) : std::string("this rank"); };
  for (size_t rank = 0; rank < told.size(); ++rank)
    if (told[rank].front() == kIsInTrouble) throw Error("GradScaler: " + who(rank) + " " + told[rank].substr(1));
  refuse_unscaled(told, who);
}

void refuse_disabled_on_some(const Group& ranks, bool is_enabled) {
  const std::string enabled = "enabled = true", disabled = "enabled = false";
  const auto told = ranks.all_gather_bytes(is_enabled ? enabled : disabled);
  throw Error("GradScaler: " + ranks_with(told, disabled) + " made it with " + disabled + ", and " +
              ranks_with(told, enabled) + " with " + enabled +
              ", so gradients with the scale would be averaged with gradients without it; make it with the same "
              "options on every rank");
}

void refuse_different_calls(const Group& ranks, const char* call) {
  const auto calls = ranks.all_gather_bytes(call);
  throw Error("GradScaler: " + ranks_with(calls, std::string(kUnscale)) + " called unscale(), and " +
              ranks_with(calls, std::string(kStep)) +
              " step() without it; call unscale() before step() on every rank or on none");
}

void refuse_different_optimizers(const Group& ranks, const char* call, const std::string& first, size_t parameters,
                                 uint64_t identity) {
  const std::string own = first + (parameters > 1 ? " and " + std::to_string(parameters - 1) + " more" : "");
  const auto names = ranks.all_gather_bytes(own), told = ranks.all_gather_bytes(own + '\n' + std::to_string(identity));
  // The last rank's, and the first that differs.
  const auto other =
      std::find_if(told.begin(), told.end(), [&](const std::string& each) { return each != told.back(); });
  const std::string& one_name = names.back();
  const std::string& other_name = other == told.end() ? one_name : names[static_cast<size_t>(other - told.begin())];
  throw Error("GradScaler: " + ranks_with(told, told.back()) + " called " + call + " with the optimizer of parameter " +
              one_name + ", and " + ranks_with(told, other == told.end() ? told.back() : *other) + " with that of " +
              (one_name == other_name ? "another model with parameters of the same names" : "parameter " + other_name) +
              "; call " + call + " with the same optimizers in the same order on every rank");
}

void refuse_cleared(const Group& ranks, bool cleared) {
  const auto told = ranks.all_gather_bytes(cleared ? "cleared" : "kept");
  throw Error(
      "GradScaler: " + ranks_with(told, std::string("cleared")) +
      " cleared gradients between backward() and the scaler's step, as zero_grad() does, but not the same ones on "
      "every rank, so the ranks would take different steps; call zero_grad() before backward(), or after step(), on "
      "every rank");
}

}  // namespace lockstep
