#include "rank_page/page_group.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <unistd.h>

#include "base/rank_names.h"

namespace lockstep {
namespace {

constexpr int kBits = 64;

/// FNV-1a, which is the same in every process of the run.
uint64_t hash(std::string_view text) {
  uint64_t value = 14695981039346656037u;
  for (const char byte : text) value = (value ^ static_cast<unsigned char>(byte)) * 1099511628211u;
  return value | 1;  // 0 is no group
}

/// The bits of all of them, or none if one has no bit.
uint64_t bits_of(const std::vector<int>& ranks) {
  uint64_t bits = 0;
  for (const int rank : ranks) {
    if (rank < 0 || rank >= kBits) return 0;
    bits |= uint64_t{1} << rank;
  }
  return bits;
}

}  // namespace

PageGroup::PageGroup(std::string name, std::vector<int> ranks)
    : name_(std::move(name)), ranks_(std::move(ranks)), bits_(bits_of(ranks_)) {
  std::string identity = name_ + ":";
  for (const int rank : ranks_) identity += std::to_string(rank) + ",";
  id_ = hash(identity);
  place_ = own_page().add_group(id_, bits_, name_);
}

PageGroup& PageGroup::operator=(PageGroup&& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(ranks_, other.ranks_);
  std::swap(id_, other.id_);
  std::swap(bits_, other.bits_);
  other.collectives_ = collectives_.exchange(other.collectives_);
  std::swap(place_, other.place_);
  return *this;
}

PageGroup::~PageGroup() {
  if (place_ != RankPage::kNoGroup) own_page().remove_group(place_);
}

PageGroup PageGroup::part(int number, const std::vector<int>& ranks) const {
  if (ranks_.empty()) return {};
  std::vector<int> launched;
  launched.reserve(ranks.size());
  for (const int rank : ranks) launched.push_back(ranks_[static_cast<size_t>(rank)]);
  const std::string name = (name_.empty() ? "subgroup " : name_ + ".") + std::to_string(number);
  return {name, std::move(launched)};
}

std::string PageGroup::names_of_ranks() const {
  if (name_.empty() || ranks_.size() < 2) return "";
  std::vector<int> here(ranks_.size());
  std::iota(here.begin(), here.end(), 0);
  std::string ranks = rank_names(here);
  ranks.front() = 'R';
  const bool ascend = std::is_sorted(ranks_.begin(), ranks_.end());
  std::string all;
  for (const int rank : ranks_) all += (all.empty() ? "" : ", ") + std::to_string(rank);
  return "\n" + ranks + " of " + name_ + " are " + (ascend ? rank_names(ranks_) : "ranks " + all) + " of all.";
}

uint64_t PageGroup::bit(int rank) const { return bits_ == 0 ? 0 : uint64_t{1} << ranks_[static_cast<size_t>(rank)]; }

PageGroup page_group_of_all(int rank, int world_size) {
  const RankBoard* board = launchers_board();
  if (board != nullptr && (board->world_size() != world_size || rank_of_process(::getpid()) != rank)) return {};
  std::vector<int> ranks(static_cast<size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return {"", std::move(ranks)};
}

}  // namespace lockstep
