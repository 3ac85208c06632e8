#include "collectives/gloo/calls.h"

#include <algorithm>
#include <sstream>
#include <thread>

#include "base/clock.h"
#include "collectives/rank_names.h"
#include "rank_page/rank_board.h"

namespace lockstep::gloo_engine {
namespace {

/// More than a program has under way at once.
constexpr size_t kHistory = 64;

}  // namespace

Call Calls::add(std::string text) {
  for (const char letter : text) hash_ = (hash_ ^ static_cast<unsigned char>(letter)) * 16777619u;  // FNV-1a
  history_.push_back({++count_, std::move(text)});
  if (history_.size() > kHistory) history_.pop_front();
  return history_.back();
}

std::string Calls::Account::packed() const {
  std::ostringstream text;
  text << has_failed << ' ' << now.number << ' ' << now.text << '\n';
  for (const Call& call : history) text << call.number << ' ' << call.text << '\n';
  return text.str();
}

Calls::Account Calls::Account::unpacked(const std::string& bytes) {
  Account account;
  std::istringstream text(bytes);
  const auto read = [&](Call& call) {
    text >> call.number;
    text.get();
    return static_cast<bool>(std::getline(text, call.text));
  };
  text >> account.has_failed;
  read(account.now);
  for (Call call{}; read(call);) account.history.push_back(call);
  return account;
}

const std::string* Calls::Account::text_of(uint64_t number) const {
  for (const Call& call : history)
    if (call.number == number) return &call.text;
  return now.number == number ? &now.text : nullptr;
}

Calls::Accounts Calls::exchange(const Account& own) const {
  Accounts accounts(static_cast<size_t>(world_size_));
  accounts[static_cast<size_t>(rank_)] = own;
  try {
    store_->set(key(rank_), own.packed());
    for (int rank = 0; rank < world_size_; ++rank)
      if (rank != rank_ && store_->check({key(rank)}))
        accounts[static_cast<size_t>(rank)] = Account::unpacked(store_->get_to_str(key(rank)));
  } catch (const std::exception&) {
    // The store is gone, with the rank or the launcher that served it: what is known by now must do.
  }
  return accounts;
}

/// Of the first call that two ranks know differently, as shared memory says it. A call keeps its number for good, so
/// what a rank told long ago is as true as what it tells now.
std::string Calls::mismatch(const Accounts& accounts) {
  std::optional<uint64_t> first;
  for (const auto& account : accounts)
    for (const Call& call : account ? account->history : std::deque<Call>())
      for (const auto& other : accounts) {
        const std::string* text = other ? other->text_of(call.number) : nullptr;
        if (text != nullptr && *text != call.text) first = std::min(first.value_or(call.number), call.number);
      }
  if (!first) return "";
  std::vector<std::string> texts;
  for (const auto& account : accounts) {
    const std::string* text = account ? account->text_of(*first) : nullptr;
    texts.push_back(text ? *text : "");
  }
  std::string said = "ranks disagree on operation " + std::to_string(*first) + ":";
  for (size_t rank = 0; rank < texts.size(); ++rank)
    if (!texts[rank].empty() && std::find(texts.begin(), texts.begin() + static_cast<long>(rank), texts[rank]) ==
                                    texts.begin() + static_cast<long>(rank))
      said += (said.back() == ':' ? " " : ", ") + ranks_with(texts, texts[rank]) + " called " + texts[rank];
  return said;
}

std::string Calls::places(const Accounts& accounts) {
  std::vector<std::string> places;
  for (const auto& account : accounts) {
    if (!account)
      places.emplace_back("said nothing: ended, or does something else");
    else
      places.push_back((account->has_failed ? "failed in operation " : "last seen waiting in operation ") +
                       std::to_string(account->now.number) + ", " + account->now.text);
  }
  std::string said;
  for (size_t rank = 0; rank < places.size(); ++rank)
    if (std::find(places.begin(), places.begin() + static_cast<long>(rank), places[rank]) ==
        places.begin() + static_cast<long>(rank))
      said += (said.empty() ? "" : "; ") + ranks_with(places, places[rank]) + " " + places[rank];
  return "where the ranks are: " + said;
}

std::string Calls::compare(const Call& call) {
  if (mismatch(exchange(own_account(call, /*has_failed=*/false))).empty()) return "";
  // The others come to the same within the time of their own look; then all can be named.
  return after_failure(call, std::chrono::milliseconds(500));
}

std::string Calls::after_failure(const Call& call, std::chrono::milliseconds patience) {
  const Deadline deadline(patience);
  const Account own = own_account(call, /*has_failed=*/true);
  Accounts accounts = exchange(own);
  const auto says_more = [](const auto& account) { return !account || !account->has_failed; };
  while (std::any_of(accounts.begin(), accounts.end(), says_more) && !deadline.passed()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    accounts = exchange(own);
  }
  std::string different = mismatch(accounts);
  if (different.empty()) return places(accounts);
  own_page().fail(RankFailure::kMismatch, -1, different);
  return different;
}

}  // namespace lockstep::gloo_engine
