#include "python_names.h"

#include <array>
#include <cctype>
#include <regex>
#include <string_view>
#include <utility>

namespace lockstep::python {
namespace {

/// Phrases that are replaced as a whole, before single names.
constexpr std::array<std::pair<std::string_view, std::string_view>, 17> kPhrases{{
    {"DistributedDataParallelOptions::reduction = GradientReduction::kWeightedMean",
     "lockstep.attach(..., reduction=\"weighted_mean\")"},
    {"GradientReduction::kWeightedMean", "reduction=\"weighted_mean\""},
    {"GradientReduction::kMean", "reduction=\"mean\""},
    {"Use kSum", "Use reduction=\"sum\""},
    {"`buffers kNone`", "`buffers \"none\"`"},
    {"JoinOptions::shadow", "the shadow of join()"},
    {"hold a no_sync() guard", "use no_sync()"},
    {"model.clip_grad_norm()", "replica.clip_grad_norm()"},
    {"DistributedDataParallel attaches to it or refresh() is called", "attach() or refresh() is called"},
    {"after DistributedDataParallel attached", "after attach()"},
    {"without DistributedDataParallel", "without attach()"},
    {"already attached to a DistributedDataParallel; destroy that one first",
     "already attached to a Replica; detach() that one first"},
    {" (c10d::Reducer)", ""},
    {"that DistributedDataParallel follows", "that a Replica follows"},
    {"DiLoCoOptions: ", "DiLoCo: "},
    {"make the DistributedDataParallel with the group's on_this_machine()",
     "attach in a group of one machine's ranks: lockstep.attach(model, machine)"},
    {"make it with the group on which on_this_machine() was called",
     "make it with a group of the ranks of all machines"},
}};

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
}

/// "FollowRankZero" as "follow_rank_zero".
std::string with_underscores(const std::string& name) {
  std::string result;
  for (const char letter : name) {
    if (std::isupper(static_cast<unsigned char>(letter)) != 0 && !result.empty()) result += '_';
    result += static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  }
  return result;
}

/// Constants, with their enum before them or without; alone only those that no layer of a model is called like.
void name_constants(std::string& text) {
  static const std::regex constant(R"((?:\b\w+::k([A-Z]\w*)|\bk(Mean|Sum|WeightedMean|FollowRankZero|And|Or)\b))");
  std::string result;
  auto after = text.cbegin();
  for (std::sregex_iterator one(text.begin(), text.end(), constant), end; one != end; ++one) {
    result.append(after, (*one)[0].first);
    result += '"' + with_underscores((*one)[1].matched ? (*one)[1].str() : (*one)[2].str()) + '"';
    after = (*one)[0].second;
  }
  result.append(after, text.cend());
  text = std::move(result);
}

/// Which DistributedDataParallel is meant is said before it.
void name_replicas(std::string& text) {
  constexpr std::string_view kName = "DistributedDataParallel", kTorchs = "torch's ";
  for (size_t at = 0; (at = text.find(kName, at)) != std::string::npos;) {
    const bool is_torchs = at >= kTorchs.size() && text.compare(at - kTorchs.size(), kTorchs.size(), kTorchs) == 0;
    if (is_torchs)
      at += kName.size();
    else
      text.replace(at, kName.size(), "Replica");
  }
}

}  // namespace

std::string with_names_of_python(std::string text) {
  for (const auto& [from, to] : kPhrases) replace_all(text, from, to);
  name_constants(text);
  static const std::regex option(R"(\b\w+Options::(\w+))"), member(R"((\w)::(\w))"), function(R"(\bautograd\.grad\b)");
  text = std::regex_replace(text, option, "$1");
  text = std::regex_replace(text, member, "$1.$2");
  text = std::regex_replace(text, function, "torch.autograd.grad");
  name_replicas(text);
  return text;
}

}  // namespace lockstep::python
