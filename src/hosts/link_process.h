#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "hosts/key.h"
#include "hosts/link_address.h"
#include "hosts/link_plan.h"

namespace lockstep::hosts {

struct LinkNews {
  std::string text;
  bool is_failure = false;  ///< ranks here wait for a link that cannot be made: the start must end
  bool operator==(const LinkNews&) const = default;
};

/// The process that carries the encrypted links of an agent's machine, one thread for each connection between ranks
/// (link_carrier.h). The agent itself keeps one thread, which starts ranks. The process ends with this object.
class LinkProcess {
 public:
  /// Listens on `port` (0: any) of this machine's `address`. Throws LaunchError.
  /// REQUIRES: the process has no other thread.
  LinkProcess(const Key& key, const std::string& address, int port);
  ~LinkProcess();
  LinkProcess(const LinkProcess&) = delete;
  LinkProcess& operator=(const LinkProcess&) = delete;

  int port() const { return port_; }
  /// Closes the links of an earlier start, and begins with those of `plan`.
  void begin(const LinkPlan& plan);
  /// Returns when ranks here can connect to `end`. Throws LaunchError with the reason if they cannot.
  void open(const LinkEnd& end);

  /// The descriptor to poll for news; -1 once the process has ended, which would wake the agent without end.
  int fd() const { return gone_ ? -1 : control_.get(); }
  /// About links, since the last call.
  std::vector<LinkNews> take_news();

 private:
  /// Sends an order and returns the reason why it could not be carried out; empty: it was.
  std::string order(const std::string& text);
  /// Keeps a message that is not an answer.
  bool keep(const std::string& text);
  /// Receives one message. Returns false if there is none, or the process is gone.
  bool receive(std::string& text, bool waits);

  int port_ = 0;
  FileDescriptor control_;
  pid_t pid_ = -1;
  bool gone_ = false;
  int unanswered_ = 0;  ///< orders; an answer that came too late is not the next one's
  std::vector<LinkNews> news_;
};

/// First letters of the messages between an agent and its link process.
constexpr char kLinkBegin = 'B', kLinkOpen = 'O';   ///< orders, each with one answer
constexpr char kLinkAnswer = 'A', kLinkNews = 'N';  ///< why it could not be carried out; what has happened
constexpr char kLinkFailure = 'F';                  ///< why ranks wait for a link that cannot be made

/// Carries connections between ranks of different machines, until `control` is closed. A rank connects to the loopback
/// address of the other machine; the relay here opens a link, TLS 1.3 by the run's key, to the port `listener` of the
/// relay there, which connects to the rank. So nothing that ranks send leaves a machine in the clear, and engines do
/// not know.
void run_link_carrier(FileDescriptor control, FileDescriptor listener, const Key& key);

}  // namespace lockstep::hosts
