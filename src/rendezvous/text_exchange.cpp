#include "rendezvous/text_exchange.h"

#include <memory>

#include "base/clock.h"
#include "base/error.h"
#include "base/interruption.h"
#include "base/rank_names.h"
#include "rendezvous/generation.h"

namespace lockstep {
namespace {

/// Thrown when the timeout has passed and these ranks have not come.
struct Missing {
  std::vector<int> ranks;
};

class Exchange {
 public:
  Exchange(std::shared_ptr<MeetingStore> store, int rank, int world_size, std::chrono::milliseconds timeout)
      : store_(std::move(store)), rank_(rank), world_size_(world_size), timeout_(timeout) {}

  std::vector<std::string> operator()(const std::string& mine) {
    try {
      return gather(mine);
    } catch (const Missing& missing) {
      throw_missing(missing.ranks);
    } catch (const Interruption&) {
      throw;
    } catch (const std::exception& cause) {
      throw Error(std::string("the ranks of a group could not meet: ") + cause.what());
    }
  }

 private:
  std::vector<std::string> gather(const std::string& mine) {
    if (prefix_.empty()) {
      const Generation generation = agree_on_generation(*store_, rank_, world_size_, timeout_);
      if (!generation.missing.empty()) throw Missing{generation.missing};
      prefix_ = "shm/" + generation.prefix + "/";
    }
    std::vector<std::string> keys;
    for (int r = 0; r < world_size_; ++r) keys.push_back(prefix_ + std::to_string(round_) + "/" + std::to_string(r));
    ++round_;
    // A store may refuse empty values, so every text starts with a mark.
    store_->set(keys[static_cast<size_t>(rank_)], "=" + mine);
    wait_for(keys);
    std::vector<std::string> texts;
    for (const auto& key : keys) texts.push_back(store_->get(key).substr(1));
    return texts;
  }

  void wait_for(const std::vector<std::string>& keys) {
    const Deadline deadline(timeout_);
    try {
      store_->wait(keys, timeout_);
    } catch (const Interruption&) {
      throw;
    } catch (const std::exception&) {
      if (!deadline.passed()) throw;
      Missing missing;
      for (int r = 0; r < world_size_; ++r)
        if (!store_->check(keys[static_cast<size_t>(r)])) missing.ranks.push_back(r);
      throw missing;
    }
  }

  [[noreturn]] void throw_missing(const std::vector<int>& ranks) const {
    throw Error("forming a group of " + std::to_string(world_size_) + " ranks: after " +
                std::to_string(timeout_.count() / 1000) + " s " + rank_names(ranks) +
                (ranks.size() == 1 ? " has" : " have") +
                " not joined; see their output for the reason, or give the group a longer timeout");
  }

  const std::shared_ptr<MeetingStore> store_;
  const int rank_;
  const int world_size_;
  const std::chrono::milliseconds timeout_;
  std::string prefix_;  // empty before the first call, which agrees on it
  int round_ = 0;
};

}  // namespace

TextExchange exchange_texts(std::shared_ptr<MeetingStore> store, int rank, int world_size,
                            std::chrono::milliseconds timeout) {
  auto exchange = std::make_shared<Exchange>(std::move(store), rank, world_size, timeout);
  return [exchange](const std::string& mine) { return (*exchange)(mine); };
}

}  // namespace lockstep
