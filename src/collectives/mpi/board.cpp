#include "collectives/mpi/board.h"

namespace lockstep::mpi_engine {
namespace {

// A note: a letter, the key's length, a space, the key and the value.
constexpr char kSet = '=', kAdd = '+';

std::string note_of(char kind, const std::string& key, const std::string& value) {
  return kind + std::to_string(key.size()) + " " + key + value;
}

}  // namespace

std::string Board::set(const std::string& key, const std::string& value) {
  const std::string note = note_of(kSet, key, value);
  apply(note);
  return note;
}

std::string Board::add(const std::string& key, int64_t amount) {
  const std::string note = note_of(kAdd, key, std::to_string(amount));
  apply(note);
  return note;
}

void Board::apply(const std::string& note) {
  const size_t space = note.find(' ');
  const size_t length = std::stoul(note.substr(1, space - 1));
  const std::string key = note.substr(space + 1, length), value = note.substr(space + 1 + length);
  {
    const MutexLock lock(mutex_);
    std::string& held = values_[key];
    if (note.front() == kAdd)
      held = std::to_string((held.empty() ? 0 : std::stoll(held)) + std::stoll(value));
    else
      held = value;
  }
  version_.fetch_add(1, std::memory_order_release);
}

std::optional<std::string> Board::get(const std::string& key) const {
  const MutexLock lock(mutex_);
  const auto found = values_.find(key);
  if (found == values_.end()) return std::nullopt;
  return found->second;
}

void Board::erase(const std::string& key) {
  const MutexLock lock(mutex_);
  values_.erase(key);
}

size_t Board::size() const {
  const MutexLock lock(mutex_);
  return values_.size();
}

}  // namespace lockstep::mpi_engine
