#include "collectives/gloo/connecting.h"

#include <algorithm>
#include <exception>
#include <future>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <lockstep/error.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/clock.h"
#include "base/interruption.h"
#include "base/library_thread.h"
#include "base/machine_name.h"
#include "collectives/cause.h"
#include "collectives/gloo/blocked_sigpipe.h"
#include "collectives/shm/backend/c10d_meeting_store.h"

// Gloo connects each rank to one peer after another, in rank order. A connection whose packets are lost holds up both
// ranks, and every rank that waits for one of these two. Each rank therefore tells where it listens, and in case of
// trouble to whom it has connected. A pair is at fault if each of the two is the first that the other has no connection
// to: if the lowest rank without a connection waits for j, then j waits for this rank, so there is such a pair.

namespace lockstep::gloo_engine {
namespace {

constexpr std::chrono::milliseconds kBetweenGlances(100), kBetweenQuestions(500), kAnswer(3000), kLongestSilence(30000);

/// What a rank tells in case of trouble.
struct Told {
  bool has_failed = false, is_silent = false;
  std::vector<int> connected_to;

  std::string text() const {
    std::string words =
        std::to_string(static_cast<int>(has_failed)) + ' ' + std::to_string(static_cast<int>(is_silent));
    for (const int peer : connected_to) words += ' ' + std::to_string(peer);
    return words;
  }
  static Told of(const std::string& text) {
    Told told;
    std::istringstream words(text);
    words >> told.has_failed >> told.is_silent;
    for (int peer = 0; words >> peer;) told.connected_to.push_back(peer);
    return told;
  }
};

using AllTold = std::vector<std::optional<Told>>;  // by rank

bool has_connected(const AllTold& all, int from, int to) {
  const auto& told = all[static_cast<size_t>(from)];
  return told && std::find(told->connected_to.begin(), told->connected_to.end(), to) != told->connected_to.end();
}

/// The first rank to which `rank` has no connection, or -1.
int first_missing(const AllTold& all, int rank) {
  for (int peer = 0; peer < static_cast<int>(all.size()); ++peer)
    if (peer != rank && !has_connected(all, rank, peer) && !has_connected(all, peer, rank)) return peer;
  return -1;
}

/// Pairs that wait for each other, where both have waited for long or one has failed.
std::vector<std::pair<int, int>> pairs_at_fault(const AllTold& all) {
  std::vector<std::pair<int, int>> pairs;
  for (int low = 0; low < static_cast<int>(all.size()); ++low) {
    const int high = first_missing(all, low);
    if (high < low || first_missing(all, high) != low) continue;
    const auto &one = all[static_cast<size_t>(low)], &other = all[static_cast<size_t>(high)];
    // A rank that does not answer is stopped, and may not have tried.
    if (!one || !other) continue;
    if (one->has_failed || other->has_failed || (one->is_silent && other->is_silent)) pairs.emplace_back(low, high);
  }
  return pairs;
}

/// What every rank throws.
struct TroubleOfAll : Error {
  using Error::Error;
};

class Watch {
 public:
  explicit Watch(const Connecting& ranks)
      : ranks_(ranks),
        store_(c10::make_intrusive<c10d::PrefixStore>("connecting", ranks.store)),
        silence_(std::min(kLongestSilence, ranks.timeout / 2)) {
    std::string at = host_name();
    for (const std::string& end : ranks.port->ends()) at += ' ' + end;
    store_.set(key("at", ranks.rank), at);
    store_.add("here", 1);
  }

  /// Throws TroubleOfAll if some pair cannot connect.
  void look(bool is_connected) {
    if (is_judged_ || Clock::now() - last_look_ < kBetweenQuestions) return;
    last_look_ = Clock::now();
    if (!all_are_here_) {
      if (store_.add("here", 0) < ranks_.world_size) return;
      all_are_here_ = true;
      last_made_ = Clock::now();
    }
    if (store_.check("trouble")) return judge({.is_silent = waited() >= silence_ / 2});
    if (is_connected) return;
    const size_t made = made_by_rank().size();
    if (std::exchange(made_, made) != made) last_made_ = Clock::now();
    if (waited() < silence_) return;
    store_.set("trouble", "=");
    judge({.is_silent = true});
  }

  /// After this rank has connected: waits until all have. Throws TroubleOfAll if one cannot.
  void wait_for_all() {
    if (store_.add("connected", 1) == ranks_.world_size) return store_.set("all", "=");
    for (const Deadline deadline(std::min(ranks_.timeout, kLongestTimeout));;) {
      const auto begin = Clock::now();
      try {
        return store_.wait({"all"}, kBetweenQuestions);
      } catch (const Error&) {
        if (Clock::now() - begin < kBetweenQuestions / 2) throw;  // not a timeout
      }
      check_for_interruption();
      look(/*is_connected=*/true);
      if (deadline.passed()) give_up();
    }
  }

  /// When the timeout has passed.
  [[noreturn]] void give_up() {
    const std::string why = "after " + std::to_string(ranks_.timeout.count() / 1000) + " s not all ranks are connected";
    tell_failure(why);
    throw TroubleOfAll("forming a group of " + std::to_string(ranks_.world_size) + " ranks: " + why);
  }

  /// Tells all ranks. Throws TroubleOfAll if the reason is that some pair cannot connect.
  void tell_failure(const std::string& cause) {
    if (is_judged_) return;
    store_.set("trouble", "=forming a group of " + std::to_string(ranks_.world_size) + " ranks: rank " +
                              std::to_string(ranks_.rank) + " could not connect to the others: " + cause);
    judge({.has_failed = true});
  }

 private:
  static std::string key(const char* what, int rank) { return std::string(what) + '/' + std::to_string(rank); }
  std::chrono::milliseconds waited() const {
    return std::chrono::floor<std::chrono::milliseconds>(Clock::now() - last_made_);
  }

  /// A rank's host and the ends on which it listens.
  std::vector<std::string> place_of(int rank) {
    std::istringstream words(store_.get(key("at", rank)));
    std::vector<std::string> place;
    for (std::string word; words >> word;) place.push_back(word);
    return place;
  }

  std::vector<Connection> made_by_rank() const {
    try {
      return ranks_.port->made();
    } catch (const LimitError&) {
      return {};  // what needs descriptors fails by itself
    }
  }

  std::vector<int> connected_to() {
    const auto made = made_by_rank();
    std::vector<int> peers;
    for (int rank = 0; rank < ranks_.world_size; ++rank) {
      if (rank == ranks_.rank) continue;
      const auto place = place_of(rank);
      const auto leads_there = [&](const Connection& one) {
        return std::find(place.begin(), place.end(), one.to) != place.end();
      };
      if (std::any_of(made.begin(), made.end(), leads_there)) peers.push_back(rank);
    }
    return peers;
  }

  /// Compares what all ranks tell, once. Throws TroubleOfAll, unless nothing is wrong but slow.
  void judge(Told own) {
    is_judged_ = true;
    const bool all_came = all_are_here_ || store_.add("here", 0) == ranks_.world_size;
    if (all_came) {
      own.connected_to = connected_to();
      store_.set(key("told", ranks_.rank), own.text());
      if (const auto pairs = pairs_at_fault(all_told()); !pairs.empty()) throw_for(pairs);
    }
    if (const std::string trouble = store_.get("trouble").substr(1); !trouble.empty() && !own.has_failed)
      throw TroubleOfAll(trouble);
  }

  AllTold all_told() {
    AllTold all(static_cast<size_t>(ranks_.world_size));
    const Deadline deadline(kAnswer);
    for (int rank = 0; rank < ranks_.world_size; ++rank) try {
        store_.wait({key("told", rank)}, std::chrono::milliseconds(std::max(1, deadline.remaining_ms())));
        all[static_cast<size_t>(rank)] = Told::of(store_.get(key("told", rank)));
      } catch (const Error&) {
        // It does not answer.
      }
    return all;
  }

  std::string name_of(int rank) {
    const auto place = place_of(rank);
    std::string name = "rank " + std::to_string(rank) + " (" + place.front();
    if (place.size() > 1) name += ", " + place[1].substr(0, place[1].rfind(':'));
    return name + ")";
  }

  [[noreturn]] void throw_for(const std::vector<std::pair<int, int>>& pairs) {
    constexpr size_t kNamed = 4;
    std::string names;
    for (size_t i = 0; i < std::min(kNamed, pairs.size()); ++i)
      names += (i == 0 ? "" : "; ") + name_of(pairs[i].first) + " and " + name_of(pairs[i].second) +
               " cannot connect to each other";
    if (pairs.size() > kNamed) names += "; nor can " + std::to_string(pairs.size() - kNamed) + " other pairs";
    throw TroubleOfAll(
        "forming a group of " + std::to_string(ranks_.world_size) + " ranks: " + names +
        ". `lockstep doctor --hosts` tests the links between machines. Let these machines connect to each other "
        "on any port, or start the run with `lockstep run --encrypt --relay MACHINE`, where MACHINE is one to "
        "which both can connect");
  }

  const Connecting& ranks_;
  shm_engine::C10dMeetingStore store_;
  const std::chrono::milliseconds silence_;
  bool all_are_here_ = false, is_judged_ = false;
  size_t made_ = 0;  ///< connections by this rank, as last seen
  Clock::time_point last_made_ = Clock::now(), last_look_ = last_made_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> connect_all(const Connecting& ranks,
                                              std::function<c10::intrusive_ptr<c10d::Backend>()> connect) {
  Watch watch(ranks);
  const auto promise = std::make_shared<std::promise<c10::intrusive_ptr<c10d::Backend>>>();
  auto result = promise->get_future();
  std::thread thread = library_thread([promise, connect = std::move(connect)] {
    const BlockedSigpipe blocked;
    try {
      promise->set_value(connect());
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  });
  try {
    const Deadline deadline(std::min(ranks.timeout, kLongestTimeout));
    while (result.wait_for(kBetweenGlances) != std::future_status::ready) {
      check_for_interruption();
      watch.look(/*is_connected=*/false);
      if (deadline.passed()) watch.give_up();
    }
  } catch (...) {
    thread.detach();
    throw;
  }
  thread.join();
  try {
    auto engine = result.get();
    watch.wait_for_all();
    return engine;
  } catch (const TroubleOfAll&) {
    throw;
  } catch (const std::exception& failure) {
    watch.tell_failure(cause_of(failure));
    throw;
  }
}

}  // namespace lockstep::gloo_engine
