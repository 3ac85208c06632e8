#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <random>
#include <sstream>

#include "base/environment.h"
#include "hosts/channel.h"
#include "hosts/hosts_launched.h"

// Strangers at the rendezvous while a run goes on: wrong keys, random bytes, replays, damaged and slow greetings,
// silence. The ranks of the run meet in its store, which the coordinator serves, at each step.

namespace lockstep::hosts {
namespace {

using std::chrono::milliseconds;

class Stranger {
 public:
  Stranger(const Endpoint& endpoint, const Tls& wrong, const std::string& greeting, std::mt19937& random) {
    std::string why;
    FileDescriptor socket = connect_to(endpoint, Deadline(milliseconds(2000)), why);
    if (!socket) return;
    const unsigned kind = random() % 6;
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
    if (kind == 5) {  // a byte whenever it is looked at
      unsent_ = bytes;
      bytes.clear();
    }
    [[maybe_unused]] const ssize_t sent = ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    socket_ = std::move(socket);
  }
  bool got_in() {
    if (channel_) channel_->act();
    if (!unsent_.empty() && ::send(socket_.get(), unsent_.data(), 1, MSG_NOSIGNAL | MSG_DONTWAIT) == 1)
      unsent_.erase(0, 1);
    return channel_ && channel_->is_open();
  }
  bool connected() const { return channel_ || socket_; }

 private:
  FileDescriptor socket_;
  std::unique_ptr<Channel> channel_;
  std::string unsent_;
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

int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now().time_since_epoch()).count();
}

/// The steps that a store_rank wrote down, in the order of their times, of those that ended between two instants.
std::vector<int64_t> steps_between(const std::string& times, int64_t from_us, int64_t to_us) {
  std::istringstream text(times);
  std::vector<int64_t> found;
  for (int64_t ended = 0, took = 0; text >> ended >> took;)
    if (ended >= from_us && ended < to_us) found.push_back(took);
  std::sort(found.begin(), found.end());
  return found;
}

/// Prints the steps' times without and with strangers. A coordinator that works, or waits, for strangers shows in all
/// steps; one that they hold up once, in the longest.
void judge_steps(const std::string& times, int64_t attack_us, int64_t end_us) {
  const auto alone = steps_between(times, 0, attack_us), attacked = steps_between(times, attack_us, end_us);
  ASSERT_GE(alone.size(), 50u);
  ASSERT_GE(attacked.size(), 10u);
  const auto median = [](const std::vector<int64_t>& steps) { return steps[steps.size() / 2]; };
  std::printf("median step: %.2f ms alone (%zu steps), %.2f ms during the attack (%zu steps, the longest %.1f ms)\n",
              static_cast<double>(median(alone)) * 1e-3, alone.size(), static_cast<double>(median(attacked)) * 1e-3,
              attacked.size(), static_cast<double>(attacked.back()) * 1e-3);
  // The strangers share the cores with the ranks here, so a step waits for their time slices too. It took 0.4 s while a
  // turn of the coordinator carried on as many handshakes as there were.
  EXPECT_LT(median(attacked), 2 * median(alone) + 150000);
  EXPECT_LT(attacked.back(), 2500000) << "a stranger may be silent for 3 s, and nobody may wait for it";
}

void attack(int attempts, size_t most_at_once, bool judges_steps) {
  ::signal(SIGPIPE, SIG_IGN);
  const Rendezvous rendezvous;
  const std::string enough = rendezvous.folder.path() / "enough", times = rendezvous.folder.path() / "times";
  const auto command = [&](int node) {
    return rendezvous.options(2, node, {"--tee", "all", LOCKSTEP_BIN_DIR "/store_rank", "steps", enough, times});
  };
  Launched first(command(0)), second(command(1));
  ASSERT_TRUE(all_say(first, "3\n"));
  if (judges_steps) std::this_thread::sleep_for(milliseconds(2000));
  const size_t before = peak_of(first.pid());
  const Endpoint endpoint = parse_endpoint("test", rendezvous.place);
  const Tls wrong(Key::generate(), Side::kAgent);
  const std::string replay = greeting_of(Key::from_file(rendezvous.key_file));
  ASSERT_GT(replay.size(), 100u);
  std::mt19937 random(7);
  std::deque<Stranger> at_once;
  int connected = 0;
  const int64_t began_us = now_us();
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
  if (judges_steps) judge_steps(read_file(times), began_us, now_us());
  EXPECT_GT(connected, attempts * 9 / 10);
  // Meanwhile an agent with the key still gets an answer.
  Launched late(command(1));
  const auto told = late.wait();
  EXPECT_EQ(told.exit_code, 46);
  EXPECT_TRUE(contains(told.err, "has its node 1 already")) << told.err;
  EXPECT_LT(peak_of(first.pid()), before + (32 << 20)) << "whatever came, it was not kept";
  at_once.clear();
  std::ofstream(enough) << "x";
  const auto result = first.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(second.wait().exit_code, 0);
  EXPECT_TRUE(contains(result.err, "connections without this run's key turned away, the last from 127.0.0.1"))
      << result.err;
}

TEST(HostsHostile, StrangersNeitherGetInNorDisturbARun) {
  const bool nightly = Environment::from_process().lockstep_nightly.has_value();
  attack(nightly ? 100000 : 4000, nightly ? 1000 : 200, true);
}

TEST(HostsDoor, AFewHundredStrangersNeitherGetInNorDisturbARun) { attack(400, 100, false); }

}  // namespace
}  // namespace lockstep::hosts
