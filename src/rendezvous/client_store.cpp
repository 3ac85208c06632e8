#include "rendezvous/client_store.h"

#include <thread>

#include "base/clock.h"

namespace lockstep {
namespace {

constexpr std::chrono::seconds kLastWords{2};

}  // namespace

void ClientStore::set(const std::string& key, const std::string& value) {
  client_.set(key, {value.begin(), value.end()});
}

std::string ClientStore::get(const std::string& key) {
  const auto value = client_.get(key, std::chrono::seconds(10));
  return {value.begin(), value.end()};
}

bool ClientStore::is_there() {
  try {
    client_.check({"meet/bell"});
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void ClientStore::leave(int world_size) noexcept {
  try {
    const Deadline deadline(kLastWords);
    for (auto left = client_.add("left", 1); serves() && left < world_size && !deadline.passed();
         left = client_.add("left", 0))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } catch (const std::exception&) {
    // The serving rank is gone, or never came.
  }
}

}  // namespace lockstep
