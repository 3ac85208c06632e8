#include "collectives/shm/backend/store_exchange.h"

#include "base/clock.h"
#include "base/error.h"
#include "collectives/cause.h"

namespace lockstep::shm_engine {
namespace {

std::string missing_ranks(c10d::Store& store, const std::vector<std::string>& keys) {
  std::string missing;
  for (size_t rank = 0; rank < keys.size(); ++rank)
    if (!store.check({keys[rank]})) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  return missing;
}

}  // namespace

shm::AllGather exchange_over(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                             std::chrono::milliseconds timeout) {
  return [store = std::move(store), rank, world_size, timeout, round = 0](const std::string& mine) mutable {
    const std::string prefix = "shm/" + std::to_string(round++) + "/";
    std::vector<std::string> keys;
    for (int r = 0; r < world_size; ++r) keys.push_back(prefix + std::to_string(r));
    // A store may refuse empty values, so every text gets a mark in front.
    store->set(keys[static_cast<size_t>(rank)], "=" + mine);
    const Deadline deadline(timeout);
    try {
      store->wait(keys, timeout);
    } catch (const std::exception& cause) {
      if (!deadline.passed()) throw Error("the ranks of a group could not meet: " + cause_of(cause));
      throw Error("forming a group of " + std::to_string(world_size) + " ranks: after " +
                  std::to_string(timeout.count() / 1000) + " s rank(s) " + missing_ranks(*store, keys) +
                  " had not come; look at their output, or give the group a longer timeout");
    }
    std::vector<std::string> texts;
    for (const auto& key : keys) texts.push_back(store->get_to_str(key).substr(1));
    return texts;
  };
}

}  // namespace lockstep::shm_engine
