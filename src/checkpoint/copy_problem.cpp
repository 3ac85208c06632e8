#include "checkpoint/copy_problem.h"

#include <sstream>

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

namespace lockstep {
namespace {

std::string layout_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.layout();
  return text.str();
}

}  // namespace

std::string problem_of_given(const at::Tensor& given) {
  if (!given.defined()) return "an undefined tensor given";
  if (given.is_meta()) return "given on the meta device, which holds no values";
  if (given.is_nested()) return "a nested tensor given, which has no shape; pad it first";
  return "";
}

std::string problem_of_copy(const at::Tensor& given, const at::Tensor& own, const std::string& where) {
  if (const std::string problem = problem_of_given(given); !problem.empty()) return problem;
  if (!own.defined()) return "undefined in " + where;
  if (own.is_meta()) return "on the meta device in " + where + ", which holds no values; move it first, by to_empty()";
  if (given.layout() != own.layout()) return layout_of(given) + " given, " + layout_of(own) + " in " + where;
  if (given.is_quantized() != own.is_quantized())
    return std::string(given.is_quantized() ? "quantized" : "not quantized") + " as given, but " +
           (own.is_quantized() ? "quantized" : "not") + " in " + where + "; dequantize() it first";
  if (own.layout() == at::kStrided && at::has_internal_overlap(own) == at::MemOverlap::Yes)
    return "its elements share memory in " + where + " (expand()), so they cannot be set one by one; clone it first";
  return "";
}

}  // namespace lockstep
