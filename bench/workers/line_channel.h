#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace lockstep::bench {

/// Lines over one connected Unix socket. Whoever reads sleeps in the kernel: a worker that is not measured costs
/// nothing.
class LineChannel {
 public:
  /// Takes the descriptor over.
  explicit LineChannel(int fd) : fd_(fd) {}
  LineChannel(LineChannel&& other) noexcept;
  LineChannel& operator=(LineChannel&&) = delete;
  ~LineChannel();

  /// Connects to whoever listens on `path`; throws std::runtime_error.
  static LineChannel connect(const std::string& path);

  /// False when the other side is gone.
  bool send(const std::string& line);
  /// The next line without its end; nothing when the other side is gone or `timeout` has passed.
  std::optional<std::string> receive(std::optional<std::chrono::milliseconds> timeout = std::nullopt);
  /// The process at the other end.
  int peer_pid() const;

 private:
  int fd_;
  std::string buffer_;  ///< received after the last line that was returned
};

}  // namespace lockstep::bench
