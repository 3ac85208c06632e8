#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "base/shared_segment.h"
#include "rendezvous/key_value_frame.h"

namespace lockstep {

/// One process's end of the key-value store that the ranks of a machine share (KeyValueServer), with the operations of
/// c10d::Store. Any thread may call: a thread that waits for a key does not block the others.
///
/// Throws lockstep::Error when a wait times out (the text names the missing keys), when a key or value exceeds its
/// limit (kMaxKeyBytes, kMaxValueBytes), or when the store refuses (with its text). Once the server is gone or does not
/// answer, every call throws. Nothing waits forever; a timeout of 0 checks once. In a child of fork() every call
/// throws: the connection belongs to its parent.
class KeyValueClient {
 public:
  using Bytes = std::vector<uint8_t>;
  using Timeout = std::chrono::milliseconds;

  /// `socket` is connected to a server. It is made close-on-exec, however it was inherited: a program that this process
  /// starts must not keep the connection open.
  explicit KeyValueClient(FileDescriptor socket);

  void set(const std::string& key, const Bytes& value);
  Bytes get(const std::string& key, Timeout timeout);
  /// Adds to the decimal number that `key` holds (0 if it does not exist), and returns the sum.
  int64_t add(const std::string& key, int64_t amount);
  /// Sets the value to `desired` if it equals `expected` (a missing key equals an empty value). Returns the value then
  /// held, or `expected` if the key is missing and was not set.
  Bytes compare_set(const std::string& key, const Bytes& expected, const Bytes& desired);
  /// Deletes the key. Returns whether it existed.
  bool delete_key(const std::string& key);
  /// Whether all keys exist.
  bool check(const std::vector<std::string>& keys);
  /// Waits until all keys exist.
  void wait(const std::vector<std::string>& keys, Timeout timeout);
  int64_t num_keys();
  /// Appends bytes to the value, which is created if it is missing.
  void append(const std::string& key, const Bytes& value);

 private:
  struct Reply {
    KeyValueReply code;
    std::vector<std::string> fields;
  };
  using Fields = std::vector<std::string_view>;

  /// Sends a request and waits for the reply; kMissing is possible only after `timeout`, for requests that wait for
  /// keys.
  Reply ask(KeyValueRequest request, const Fields& fields, Timeout timeout);
  /// Sends a request that is answered at once, and returns the first field of the reply.
  std::string ask_now(KeyValueRequest request, const Fields& fields);
  Reply ask_keys(KeyValueRequest request, const Fields& keys, Timeout timeout);
  void send(uint32_t id, KeyValueRequest request, const Fields& fields);
  /// The reply to `id`, or nothing when the deadline passes first.
  std::optional<Reply> await(uint32_t id, const Deadline& deadline);
  /// Receives available bytes and stores the complete replies.
  /// Not analysed: it releases the caller's lock meanwhile.
  void receive(MutexLock& lock, const Deadline& deadline) LOCKSTEP_REQUIRES(mutex_) LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS;
  [[noreturn]] void fail(const std::string& reason);

  const FileDescriptor socket_;
  const unsigned fork_generation_ = fork_generation();
  Mutex send_mutex_;  // frames go out whole
  Mutex mutex_;
  std::condition_variable changed_;
  std::map<uint32_t, std::optional<Reply>> awaited_ LOCKSTEP_GUARDED_BY(mutex_);  // by id
  uint32_t next_id_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::string broken_ LOCKSTEP_GUARDED_BY(mutex_);      // the reason why the connection is unusable
  bool receiving_ LOCKSTEP_GUARDED_BY(mutex_) = false;  // one thread receives for all that wait
  std::string inbox_;                                   // owned by the receiving thread
};

}  // namespace lockstep
