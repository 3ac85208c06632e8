#include "train/scaler_troubles.h"

#include <c10/util/StringUtil.h>

#include "base/text.h"

namespace lockstep {
namespace {

std::string passes_of(size_t number) { return counted(number, "backward pass", "backward passes"); }

}  // namespace

std::string trouble_of_gradients(const char* call, const TensorSet& parameters, const KnownGradients& known,
                                 const ScaledPasses& scaled) {
  if (known.held_back > 0)
    return std::string("called ") + call + " while the gradients of " +
           counted(known.held_back, "backward pass", "backward passes") +
           " of accumulate() wait in .grad and are not reduced yet; call it when step_complete() is true, or after "
           "reduce_gradients()";
  if (known.shares > 0)
    return std::string("called ") + call + " after the backward of " +
           counted(known.shares, "virtual rank", "virtual ranks") +
           ", but not of all for which this rank works; call it once, after the backward of the last one";
  if (known.drops)
    return "set NonFinitePolicy::kSkip, which removes the gradients before the scaler can see infinity in them; use "
           "either the scaler or the policy";
  size_t present = 0, twice = 0, used = 0, early = 0, others = 0, beside = 0;
  for (const RecordedPass& pass : known.passes) {
    const auto scale = scaled.scale_of(pass.number);
    if (scale == ScaledPasses::Scale::kPresent) ++(pass.unscaled ? twice : present);
    if (scale == ScaledPasses::Scale::kEarlier) ++(pass.unscaled ? used : early);
    if (scale == ScaledPasses::Scale::kNone && ScaledPasses::known_to_any(pass.number)) ++others;
    if (scaled.reached_beside(pass.number, parameters) || scaled.reached_beside(pass.number, known.leaves)) ++beside;
  }
  if (twice > 0) return kDividedTwice;
  if (others > 0)
    return "called " + std::string(call) + " with gradients of " + passes_of(others) +
           " whose loss another GradScaler had scaled; give each optimizer to the scaler that scales its loss";
  if (early > 0 || (used > 0 && present == 0))
    return "called " + std::string(call) + " after update(), with gradients of " + passes_of(early + used) +
           " from before it; call update() once, after the step() of every optimizer, and run a backward before the "
           "next step()";
  if (used > 0)
    return "added the gradients of " + passes_of(present) + " to those of " + passes_of(used) +
           " that a step had used, which have another scale; call zero_grad() before the first backward of each step";
  if (beside > 0)
    return "added a value without scale() to a loss that scale() had scaled, in " + passes_of(beside) +
           ", so its gradients would be divided by a scale that they do not have; call scale() on the whole sum";
  if (known.edits.stepped) return trouble_of_step_beside(known.edits.stepped_name);
  if (known.edits.changed)
    return "changed the gradient of parameter " + known.edits.changed_name +
           " between backward() and unscale(), as clipping does, when it still had the scale; call "
           "scaler.unscale(optimizer) first";
  return "";
}

std::string trouble_of_later_passes(size_t passes) {
  return "ran " + (passes > 0 ? passes_of(passes) : std::string("backward")) +
         " through scale() between unscale() and step() of the optimizer, so its gradients have parts that still have "
         "the scale; run every backward that reaches its parameters before unscale()";
}

std::string trouble_of(const ScaledPasses::Wrong& wrong, float present) {
  if (wrong.stale)
    return c10::str("ran the backward of a loss that has the scale ", *wrong.stale,
                    ", when that of the scaler had become ", present,
                    ", as update() and load_state_dict() change it; call scale() and backward() of a loss between the "
                    "same two updates");
  if (wrong.nonlinear == kCheckpointed)
    return "gave checkpoint() a value that was computed from a loss that scale() had scaled, so it is unknown whether "
           "its gradients are those of the loss times the scale; call scale() last, on the value on which backward() "
           "is called";
  if (!wrong.nonlinear.empty())
    return "ran the backward of a scaled loss to which " + wrong.nonlinear +
           " was applied, so its gradients are not those of the loss times the scale; call scale() last, on the value "
           "on which backward() is called";
  if (wrong.is_of_two)
    return "ran a backward in which two GradScalers had scaled the loss, so it would be divided by the scale of only "
           "one of them; let one scaler scale the value on which backward() is called";
  return "";
}

std::string trouble_of_new_scale(const std::string& call) {
  return "called " + call +
         " between backward() and the scaler's step, so gradients would be divided by another scale than theirs; call "
         "it before backward(), or clear the gradients first, by zero_grad()";
}

std::string trouble_of_step_beside(const std::string& parameter) {
  return "changed parameter " + parameter +
         " between backward() and the scaler's step, as optimizer.step() does, which uses gradients that still have "
         "the scale; call only scaler.step(optimizer), and change parameters in other ways, as by clamp_() and "
         "load_state_dict(), after it";
}

}  // namespace lockstep
