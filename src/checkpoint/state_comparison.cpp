#include "checkpoint/state_comparison.h"

#include <algorithm>
#include <sstream>
#include <string_view>

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/rank_names.h"
#include "checkpoint/sliced_memory.h"

namespace lockstep {
namespace {

std::string text_of_tensor(const at::Tensor& tensor, bool in_slices) {
  if (!tensor.defined()) return "undefined";
  std::ostringstream text;
  text << c10::toString(tensor.scalar_type()) << tensor.sizes();
  if (in_slices && slices_of(tensor.storage()) != nullptr) return text.str();  // there is only one of each slice
  const at::Tensor dense = tensor.detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous();
  StreamHash hash;
  hash.add(dense.const_data_ptr(), dense.nbytes());
  return text.str() + ' ' + hash.digits();
}

std::string text_of_leaf(const c10::IValue& value, bool in_slices) {
  if (value.isTensor()) return text_of_tensor(value.toTensor(), in_slices);
  if (value.isInt()) return std::to_string(value.toInt());
  if (value.isBool()) return value.toBool() ? "true" : "false";
  Hash hash;
  if (value.isDouble()) {  // by its bits: NaN equals itself
    const double number = value.toDouble();
    hash.add(&number, sizeof number);
  } else if (value.isString()) {
    hash.add(value.toStringRef());
  }
  return value.tagKind() + hash.digits();
}

std::string joined(const std::string& name, const std::string& key) { return name.empty() ? key : name + '.' + key; }

/// The containers around a value, from the innermost outwards.
struct Containers {
  const Containers* outer;
  const void* container;

  bool have(const void* other) const { return container == other || (outer != nullptr && outer->have(other)); }
};

void add_lines(const c10::IValue& value, const std::string& name, bool in_slices, const Containers* around,
               std::string& lines) {
  const bool is_container = value.isGenericDict() || value.isList() || value.isTuple();
  const Containers inside{around, is_container ? value.internalToPointer() : nullptr};
  if (is_container && around != nullptr && around->have(inside.container))
    throw Error("`" + name + "` contains itself");
  if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) {
      const bool text = item.key().isString();
      add_lines(item.value(), joined(name, text ? item.key().toStringRef() : std::to_string(item.key().toInt())),
                in_slices, &inside, lines);
    }
    lines += name + "\tdictionary of " + std::to_string(value.toGenericDict().size()) + '\n';
  } else if (value.isList() || value.isTuple()) {
    const auto elements = value.isList() ? value.toList().vec() : value.toTupleRef().elements().vec();
    for (size_t i = 0; i < elements.size(); ++i)
      add_lines(elements[i], joined(name, std::to_string(i)), in_slices, &inside, lines);
    lines += name + "\tlist of " + std::to_string(elements.size()) + '\n';
  } else {
    lines += name + '\t' + text_of_leaf(value, in_slices) + '\n';
  }
}

/// The subject of a line, in words if it has no name: the whole state, or no line at all.
std::string name_of(std::string_view line) {
  if (line.empty()) return "nothing more";
  const std::string name(line.substr(0, line.find('\t')));
  return name.empty() ? "the end of the state" : name;
}

}  // namespace

std::string lines_of_state(const c10::IValue& state, bool in_slices) {
  std::string lines;
  add_lines(state, "", in_slices, nullptr, lines);
  return lines;
}

std::string difference_of_lines(const std::vector<std::string>& ranks) {
  std::vector<std::string_view> rest(ranks.begin(), ranks.end());
  while (std::any_of(rest.begin(), rest.end(), [](std::string_view lines) { return !lines.empty(); })) {
    std::vector<std::string_view> at_this_place;
    for (std::string_view& lines : rest) {
      const size_t end = std::min(lines.find('\n'), lines.size());
      at_this_place.push_back(lines.substr(0, end));
      lines.remove_prefix(std::min(end + 1, lines.size()));
    }
    const auto votes = [&](std::string_view line) {
      return std::count(at_this_place.begin(), at_this_place.end(), line);
    };
    std::string_view usual = at_this_place.front();
    for (const std::string_view line : at_this_place)
      if (votes(line) > votes(usual)) usual = line;
    if (votes(usual) == static_cast<std::ptrdiff_t>(ranks.size())) continue;
    std::vector<bool> odd;
    for (const std::string_view line : at_this_place) odd.push_back(line != usual);
    const auto other =
        std::find_if(at_this_place.begin(), at_this_place.end(), [&](auto line) { return line != usual; });
    const std::string name = name_of(usual), others = name_of(*other);
    if (name == others)
      return name + " on " + rank_names(odd) + " differs from that on " + ranks_with(at_this_place, usual);
    return "some entries are missing, or in another order: " + others + " on " + rank_names(odd) + " is where " + name +
           " is on " + ranks_with(at_this_place, usual);
  }
  return "";
}

std::string difference_of_calls(const std::string& what, const std::vector<std::string>& ranks) {
  for (const std::string& other : ranks)
    if (other != ranks[0])
      return what + ": " + ranks[0] + " on " + ranks_with(ranks, ranks[0]) + " and " + other + " on " +
             ranks_with(ranks, other) + "; every rank must make the same call";
  return "";
}

}  // namespace lockstep
