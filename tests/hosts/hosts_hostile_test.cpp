#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <random>

#include "base/environment.h"
#include "hosts/channel.h"
#include "hosts/hosts_launched.h"

// Strangers at the rendezvous while a run goes on: wrong keys, random bytes, replays, damaged greetings, silence.

namespace lockstep::hosts {
namespace {

using std::chrono::milliseconds;

class Stranger {
 public:
  Stranger(const Endpoint& endpoint, const Tls& wrong, const std::string& greeting, std::mt19937& random) {
    std::string why;
    FileDescriptor socket = connect_to(endpoint, Deadline(milliseconds(2000)), why);
    if (!socket) return;
    const unsigned kind = random() % 5;
    if (kind == 0) {
      channel_ = std::make_unique<Channel>(std::move(socket), wrong);
      channel_->act();
      return;
    }
    std::string bytes = greeting;  // 1: a replay of somebody's first message
    if (kind == 2) bytes.resize(random() % bytes.size());
    if (kind == 3)
      for (char& byte : bytes = std::string(1 + random() % 2000, '\0')) byte = static_cast<char>(random());
    if (kind == 4) bytes.clear();
    [[maybe_unused]] const ssize_t sent = ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    socket_ = std::move(socket);
  }
  bool got_in() {
    if (channel_) channel_->act();
    return channel_ && channel_->is_open();
  }
  bool connected() const { return channel_ || socket_; }

 private:
  FileDescriptor socket_;
  std::unique_ptr<Channel> channel_;
};

/// The first message of an agent that has the key.
std::string greeting_of(const Key& key) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) != 0) return "";
  const FileDescriptor other(ends[1]);
  const Tls tls(key, Side::kAgent);
  Channel channel(FileDescriptor(ends[0]), tls);
  channel.act();
  std::string bytes(4096, '\0');
  bytes.resize(static_cast<size_t>(std::max<ssize_t>(0, ::recv(ends[1], bytes.data(), bytes.size(), 0))));
  return bytes;
}

/// Peak memory of a process, in bytes.
size_t peak_of(pid_t pid) {
  const std::string status = read_file("/proc/" + std::to_string(pid) + "/status");
  const size_t at = status.find("VmHWM:");
  return at == std::string::npos ? 0 : std::stoull(status.substr(at + 6)) << 10;
}

void attack(int attempts, size_t most_at_once) {
  ::signal(SIGPIPE, SIG_IGN);
  const Rendezvous rendezvous;
  const auto command = [&](int node) {
    return rendezvous.options(2, node,
                              {"--tee", "all", "sh", "-c",
                               "echo up; i=0; while [ $i -lt 600 ]; do sleep 0.1; [ -e " +
                                   (rendezvous.folder.path() / "enough").string() + " ] && exit 0; done; exit 9"});
  };
  Launched first(command(0)), second(command(1));
  ASSERT_TRUE(all_say(first, "up"));
  const size_t before = peak_of(first.pid());
  const Endpoint endpoint = parse_endpoint("test", rendezvous.place);
  const Tls wrong(Key::generate(), Side::kAgent);
  const std::string replay = greeting_of(Key::from_file(rendezvous.key_file));
  ASSERT_GT(replay.size(), 100u);
  std::mt19937 random(7);
  std::deque<Stranger> at_once;
  int connected = 0;
  for (int i = 0; i < attempts; ++i) {
    Stranger& stranger = at_once.emplace_back(endpoint, wrong, replay, random);
    connected += stranger.connected() ? 1 : 0;
    if (i % 100 == 0) {
      for (Stranger& one : at_once) ASSERT_FALSE(one.got_in());
    }
    if (at_once.size() <= most_at_once) continue;
    ASSERT_FALSE(at_once.front().got_in());
    at_once.pop_front();
  }
  EXPECT_GT(connected, attempts * 9 / 10);
  // Meanwhile an agent with the key still gets an answer.
  Launched late(command(1));
  const auto told = late.wait();
  EXPECT_EQ(told.exit_code, 46);
  EXPECT_TRUE(contains(told.err, "has its node 1 already")) << told.err;
  EXPECT_LT(peak_of(first.pid()), before + (32 << 20)) << "whatever came, it was not kept";
  at_once.clear();
  std::ofstream(rendezvous.folder.path() / "enough") << "x";
  const auto result = first.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(second.wait().exit_code, 0);
  EXPECT_TRUE(contains(result.err, "connections without this run's key turned away, the last from 127.0.0.1"))
      << result.err;
}

TEST(HostsHostile, StrangersNeitherGetInNorDisturbARun) {
  const bool nightly = Environment::from_process().lockstep_nightly.has_value();
  attack(nightly ? 100000 : 4000, nightly ? 1000 : 200);
}

TEST(HostsDoor, AFewHundredStrangersNeitherGetInNorDisturbARun) { attack(400, 100); }

}  // namespace
}  // namespace lockstep::hosts
