#include "collectives/shm/backend/handles.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <set>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/interruption.h"
#include "base/machine_name.h"
#include "base/rank_names.h"
#include "collectives/shm/segment/bootstrap.h"
#include "collectives/shm/segment/bootstrap_card.h"
#include "rendezvous/client_store.h"
#include "rendezvous/local_rendezvous.h"
#include "rendezvous/text_exchange.h"

namespace lockstep::shm_engine {
namespace {

using std::chrono::milliseconds;

constexpr char kMark[] = "lockstep";
constexpr milliseconds kWhile{200};     ///< between two looks at whether the program must stop waiting
constexpr milliseconds kLonger{1'000};  ///< for which the others wait for what the host finds out
constexpr size_t kDigits = 6;           ///< of a handle's rank

/// A handle is "lockstep/RANK/RANDOM/MACHINE".
struct Handle {
  std::string random, machine;

  static Handle parse(const std::string& text) {
    const size_t rank = text.find('/');
    const size_t random = rank == std::string::npos ? rank : text.find('/', rank + 1);
    const size_t machine = random == std::string::npos ? random : text.find('/', random + 1);
    if (machine == std::string::npos || text.substr(0, rank) != kMark)
      throw Error("reconfigure(): '" + text +
                  "' is not a handle of a lockstep group; get handles from get_reconfigure_handle()");
    return {text.substr(random + 1, machine - random - 1), text.substr(machine + 1)};
  }
};

class Meeting {
 public:
  Meeting(const std::string& mine, const std::vector<std::string>& handles, int64_t uuid, milliseconds timeout)
      : mine_(mine), uuid_(uuid), timeout_(timeout), deadline_(timeout) {
    for (const std::string& handle : handles) {
      parsed_.push_back(Handle::parse(handle));
      list_ += handle + "\n";
    }
    check(handles);
    rank_ = static_cast<int>(std::find(handles.begin(), handles.end(), mine) - handles.begin());
    host_ = static_cast<int>(std::min_element(handles.begin(), handles.end()) - handles.begin());
  }

  shm::World form() {
    if (size() == 1) return shm::bootstrap(0, 1, [](const std::string& text) { return std::vector{text}; });
    store_ = open();
    // Whether it fails or not: the others may still have to read.
    struct Leaving {
      Meeting& meeting;
      ~Leaving() {
        if (meeting.is_expected_) meeting.store_->leave(meeting.size());
      }
    } leaving{*this};
    rank_ == host_ ? wait_for_others() : wait_for_host();
    shm::BootstrapOptions options;
    options.timeout = std::min(timeout_, options.timeout);
    return shm::bootstrap(rank_, size(), exchange_texts(store_, rank_, size(), timeout_), options);
  }

 private:
  int size() const { return static_cast<int>(parsed_.size()); }
  std::string what() const { return "reconfigure(uuid " + std::to_string(uuid_) + "): "; }
  std::string key(int rank) const { return "list/" + parsed_[static_cast<size_t>(rank)].random; }

  void check(const std::vector<std::string>& handles) const {
    const std::set<std::string> different(handles.begin(), handles.end());
    if (handles.empty() || different.size() != handles.size())
      throw Error(what() + (handles.empty() ? "there are no handles" : "a handle is in the list twice"));
    if (different.count(mine_) == 0) throw Error(what() + "this process's own handle is not in the list");
    const std::string here = Handle::parse(mine_).machine;
    for (const Handle& one : parsed_)
      if (one.machine != here)
        throw Error(what() + "ranks are on several machines (" + here + ", " + one.machine +
                    "); a group can be formed again on one machine only");
  }

  std::string missing(const std::vector<int>& ranks) const {
    const bool one = ranks.size() == 1;
    return what() + "after " + std::to_string(timeout_.count() / 1000) + " s " + rank_names(ranks) +
           (one ? " of the new group has" : " of the new group have") + " not called it with this uuid; check that " +
           (one ? "its process runs" : "their processes run");
  }

  std::shared_ptr<ClientStore> open() const {
    const std::string job = "regroup-" + parsed_[static_cast<size_t>(host_)].random + "-" + std::to_string(uuid_);
    for (;;) {
      try {
        auto found = rendezvous_on_this_machine(job, rank_ == host_ ? 0 : 1, Deadline(kWhile));
        return std::make_shared<ClientStore>(std::move(found.server), std::move(found.socket));
      } catch (const Error& error) {
        if (rank_ == host_) throw Error(what() + error.what());
        if (deadline_.passed()) throw Error(missing({host_}));
      }
      check_for_interruption();
    }
  }

  /// Whether the keys are there before `deadline`.
  bool wait_for(const std::vector<std::string>& keys, const Deadline& deadline) const {
    const auto are_there = [&] {
      return std::all_of(keys.begin(), keys.end(), [&](const auto& key) { return store_->check(key); });
    };
    for (;;) {
      try {
        store_->wait(keys, std::min(kWhile, milliseconds(deadline.remaining_ms())));
        return true;
      } catch (const Error&) {
        if (are_there()) return true;  // throws if the store is gone
        if (deadline.passed()) return false;
      }
      check_for_interruption();
    }
  }

  std::string host() const { return "rank " + std::to_string(host_) + " of the new group"; }

  /// The host compares the lists, and tells all.
  void wait_for_others() const {
    store_->set(key(host_), list_);
    std::vector<std::string> keys;
    for (int rank = 0; rank < size(); ++rank)
      if (rank != host_) keys.push_back(key(rank));
    std::vector<int> late, other;
    const bool all = wait_for(keys, deadline_);
    for (int rank = 0; rank < size(); ++rank) {
      if (rank == host_) continue;
      if (!all && !store_->check(key(rank))) {
        late.push_back(rank);
      } else if (store_->get(key(rank)) != list_) {
        other.push_back(rank);
      }
    }
    const std::string verdict =
        !other.empty() ? what() + rank_names(other) + " of the new group " + (other.size() == 1 ? "was" : "were") +
                             " given other handles than rank " + std::to_string(host_) + ", or in another order"
        : !late.empty() ? missing(late)
                        : "";
    store_->set("verdict", "=" + verdict);
    if (!verdict.empty()) throw Error(verdict);
  }

  void wait_for_host() {
    std::string verdict, list;
    bool came = false;
    try {
      store_->set(key(rank_), list_);
      came = wait_for({"verdict"}, Deadline(milliseconds(deadline_.remaining_ms()) + kLonger));
      if (came) verdict = store_->get("verdict").substr(1);
      if (came) {
        list = store_->get(key(host_));
        is_expected_ = list.find(mine_ + "\n") != std::string::npos;
      }
    } catch (const Error& error) {
      throw Error(what() + host() + " has ended or given up (" + error.what() + ")");
    }
    if (!came)
      throw Error(what() + "after " + std::to_string(timeout_.count() / 1000) + " s " + host() +
                  " is still waiting for other ranks");
    if (!verdict.empty()) throw Error(verdict);
    if (list != list_) throw Error(what() + host() + " was given other handles, or in another order");
  }

  const std::string mine_;
  const int64_t uuid_;
  const milliseconds timeout_;
  const Deadline deadline_;
  std::vector<Handle> parsed_;
  std::string list_;
  int rank_ = -1;
  int host_ = -1;            ///< serves the store: the same one whatever the order of the handles
  bool is_expected_ = true;  ///< by the host, which serves the store until all those have left it
  std::shared_ptr<ClientStore> store_;
};

}  // namespace

std::string new_handle(int rank) {
  std::string digits = std::to_string(rank);
  digits.insert(0, kDigits - std::min(kDigits, digits.size()), '0');
  return std::string(kMark) + "/" + digits + "/" + shm::hex(shm::random_nonce()) + "/" + machine_name();
}

shm::World form_by_handles(const std::string& mine, const std::vector<std::string>& handles, int64_t uuid,
                           std::chrono::milliseconds timeout) {
  return Meeting(mine, handles, uuid, timeout).form();
}

}  // namespace lockstep::shm_engine
