#include "collectives/mpi/mpi_store.h"

#include <algorithm>

#include "base/error.h"

namespace lockstep::mpi_engine {

std::vector<uint8_t> MpiStore::get(const std::string& key) {
  wait({key}, timeout_);
  const std::string value = pump_->board().get(key).value_or("");
  return {value.begin(), value.end()};
}

int64_t MpiStore::add(const std::string& key, int64_t value) {
  pump_->add(key, value);
  return std::stoll(pump_->board().get(key).value_or("0"));
}

bool MpiStore::deleteKey(const std::string& key) {
  const bool was_there = pump_->board().get(key).has_value();
  pump_->board().erase(key);
  return was_there;
}

bool MpiStore::check(const std::vector<std::string>& keys) {
  pump_->look_for_notes();
  return std::all_of(keys.begin(), keys.end(), [&](const auto& key) { return pump_->board().get(key).has_value(); });
}

void MpiStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  const Deadline deadline(timeout);
  for (const auto since = Clock::now(); !check(keys); pump_->make(since))
    if (deadline.passed()) throw Error("some ranks did not arrive within " + std::to_string(timeout.count()) + " ms");
}

}  // namespace lockstep::mpi_engine
