#include "reducer/data_agreement.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/rank_names.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"

// Ranks exchange a hash of the passes that their loaders have begun with the next reduction. Only if hashes differ, at
// most once per pass, do they send the data behind it.

namespace lockstep {
namespace {

using PassFacts = std::vector<std::string>;  ///< "seed 3"

/// A rank's message.
struct Said {
  bool cut = false;
  std::vector<PassFacts> passes;
  std::vector<std::string> shards;  ///< of each pass: "0 of 2"
};

std::string encode(const NewPasses& passes) {
  std::string text = passes.cut ? "cut\n" : "all\n";
  for (const DataPass& pass : passes.list) {
    text += std::to_string(pass.rank) + " of " + std::to_string(pass.world_size);
    for (const std::string& fact : pass.facts) text += '\t' + fact;
    text += '\n';
  }
  return text;
}

Said decode(const std::string& text) {
  Said said;
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line);
  said.cut = line == "cut";
  while (std::getline(lines, line)) {
    std::istringstream parts(line);
    std::string part;
    std::getline(parts, part, '\t');
    said.shards.push_back(part);
    said.passes.emplace_back();
    while (std::getline(parts, part, '\t')) said.passes.back().push_back(part);
  }
  return said;
}

/// The passes of `all` that are not in `others`, each counted as often as it occurs.
std::vector<PassFacts> without(std::vector<PassFacts> all, const std::vector<PassFacts>& others) {
  for (const PassFacts& other : others)
    if (const auto found = std::find(all.begin(), all.end(), other); found != all.end()) all.erase(found);
  return all;
}

/// The first fact in which two passes differ, from each.
std::pair<std::string, std::string> first_fact_of(const PassFacts& a, const PassFacts& b) {
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    const std::string left = i < a.size() ? a[i] : "nothing", right = i < b.size() ? b[i] : "nothing";
    if (left != right) return {left, right};
  }
  return {};
}

bool is_epoch(const std::string& fact) { return fact.starts_with("epoch "); }

/// The two epochs, if one rank has begun a pass of a loader that the other also uses, in an epoch that the other has
/// not reached: it has read from the loader outside the loop, so its epochs run ahead.
std::optional<std::pair<std::string, std::string>> epoch_ahead(const std::vector<PassFacts>& only,
                                                               const std::vector<PassFacts>& others) {
  for (const PassFacts& pass : only)
    for (const PassFacts& other : others) {
      if (pass.size() != other.size()) continue;
      const auto differs = [](const std::string& a, const std::string& b) {
        return a != b && !(is_epoch(a) && is_epoch(b));
      };
      const auto [one, two] = std::mismatch(pass.begin(), pass.end(), other.begin(), std::not_fn(differs));
      if (one == pass.end() && pass != other) return first_fact_of(pass, other);
    }
  return std::nullopt;
}

/// How the passes of two ranks differ; none if one has begun all of the other's passes, and perhaps more of its own
/// loaders: then only some ranks use a loader, for example to evaluate.
std::optional<std::pair<std::string, std::string>> difference(const Said& a, const Said& b) {
  const auto only_a = without(a.passes, b.passes), only_b = without(b.passes, a.passes);
  if (!a.cut && !b.cut) {
    if (const auto ahead = epoch_ahead(only_a, b.passes)) return ahead;
    if (const auto ahead = epoch_ahead(only_b, a.passes)) return std::pair(ahead->second, ahead->first);
  }
  if (only_a.empty() || only_b.empty()) return std::nullopt;
  if ((a.cut || b.cut) && a.passes.size() != b.passes.size()) return std::nullopt;
  return first_fact_of(only_a.back(), only_b.back());
}

[[noreturn]] void refuse(const std::string& text) {
  own_page().fail(RankFailure::kMismatch, -1, text);
  throw Error(text);
}

void check_shards(const std::vector<Said>& ranks) {
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    for (size_t other = 0; other < rank; ++other) {
      const auto &mine = ranks[rank].shards, &theirs = ranks[other].shards;
      if (mine.empty() || theirs.empty() || mine.back() != theirs.back()) continue;
      // A pass of a world of one belongs to a loader that shares with no rank; one of another size belongs to another
      // group.
      if (!mine.back().ends_with(" of " + std::to_string(ranks.size()))) continue;
      refuse("the loaders of rank " + std::to_string(other) + " and rank " + std::to_string(rank) +
             " both read shard " + mine.back() +
             ", so its samples are seen twice and those of another shard never. Make every loader from the Context, or "
             "from Shard(context.rank(), context.world_size())");
    }
}

}  // namespace

bool reads_of_another(const NewPasses& passes, const Group& group) {
  return std::any_of(passes.list.begin(), passes.list.end(), [&](const DataPass& pass) {
    return pass.world_size == group.world_size() && pass.rank != group.rank();
  });
}

bool differ_in_data(const std::vector<Facts>& rows) {
  uint64_t known = 0;
  for (const Facts& row : rows) {
    if (row.odd_shard || (known != 0 && row.data != 0 && row.data != known)) return true;
    if (row.data != 0) known = row.data;
  }
  return false;
}

void compare_passes(const Group& group, const NewPasses& mine, bool within_join) {
  const OperationLabel label("a comparison of loaders");
  std::vector<Said> ranks;
  for (const std::string& text : group.all_gather_bytes(encode(mine))) ranks.push_back(decode(text));
  if (within_join)  // within join(), ranks may take batches of other sizes
    for (Said& said : ranks)
      for (PassFacts& pass : said.passes)
        std::erase_if(pass, [](const std::string& fact) { return fact.starts_with("batch_size "); });
  const Said* first = nullptr;
  size_t number = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].passes.empty()) continue;
    if (first == nullptr) first = &ranks[rank], number = rank;
    const auto found = difference(*first, ranks[rank]);
    if (!found) continue;
    refuse("the loaders of the ranks would deal out different epochs, so samples would be missed or seen twice: `" +
           found->first + "` on rank " + std::to_string(number) + " and `" + found->second + "` on rank " +
           std::to_string(rank) +
           ". Every rank needs the same dataset, seed and options, and a sampler with the same order, drawn from a "
           "seed that all ranks share. A rank that reads data of its own makes its loader with Shard(0, 1)");
  }
  check_shards(ranks);
}

}  // namespace lockstep
