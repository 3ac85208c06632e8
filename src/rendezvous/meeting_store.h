#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace lockstep {

/// The key-value store in which ranks meet, independent of its implementation. Its calls throw the store's exceptions,
/// whose text has the reason.
class MeetingStore {
 public:
  virtual ~MeetingStore() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// The value of a key that exists.
  virtual std::string get(const std::string& key) = 0;
  /// Adds to the number that `key` holds (0 if it does not exist), and returns the sum.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  virtual bool check(const std::string& key) = 0;
  /// Waits until all keys exist. Throws when the timeout has passed.
  virtual void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) = 0;
};

}  // namespace lockstep
