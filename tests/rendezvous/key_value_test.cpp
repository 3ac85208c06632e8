#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <thread>

#include "base/error.h"
#include "base/socket.h"
#include "rendezvous/key_value_client.h"
#include "rendezvous/key_value_server.h"
#include "rendezvous/key_value_server_thread.h"

// Expected values are those of c10d::Store, according to its documentation and TCPStore.

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using Bytes = KeyValueClient::Bytes;

constexpr milliseconds kLong(10000);

Bytes bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string numbered(const char* name, int number) { return std::string(name).append(std::to_string(number)); }

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(KeyValue, SetGetDeleteCheckCount) {
  KeyValueServerThread server;
  KeyValueClient client(server.connect());
  EXPECT_FALSE(client.check({"a"}));
  client.set("a", bytes("1"));
  client.set("b", {});
  client.set("a", Bytes{0, 255, 10});
  EXPECT_EQ(client.get("a", kLong), (Bytes{0, 255, 10}));
  EXPECT_EQ(client.get("b", kLong), Bytes{});
  EXPECT_EQ(client.num_keys(), 2);
  EXPECT_TRUE(client.check({"a", "b"}));
  EXPECT_FALSE(client.check({"a", "c"}));
  EXPECT_TRUE(client.check({}));
  EXPECT_TRUE(client.delete_key("a"));
  EXPECT_FALSE(client.delete_key("a"));
  EXPECT_EQ(client.num_keys(), 1);
}

TEST(KeyValue, AddKeepsDecimalStrings) {
  KeyValueServerThread server;
  KeyValueClient client(server.connect());
  EXPECT_EQ(client.add("n", 5), 5);
  EXPECT_EQ(client.add("n", -7), -2);
  EXPECT_EQ(client.get("n", kLong), bytes("-2"));
  client.set("n", bytes("40"));
  EXPECT_EQ(client.add("n", 2), 42);
  client.set("text", bytes("x"));
  EXPECT_TRUE(contains(error_of([&] { client.add("text", 1); }), "'text'"));
  client.set("n", bytes(std::to_string(INT64_MAX)));
  EXPECT_TRUE(contains(error_of([&] { client.add("n", 1); }), "64 bits"));
  EXPECT_EQ(client.add("n", 0), INT64_MAX) << "a refusal changes nothing and the client stays";
}

TEST(KeyValue, CompareSetAsC10d) {
  KeyValueServerThread server;
  KeyValueClient client(server.connect());
  EXPECT_EQ(client.compare_set("k", bytes("old"), bytes("new")), bytes("old"));
  EXPECT_FALSE(client.check({"k"}));
  EXPECT_EQ(client.compare_set("k", {}, bytes("first")), bytes("first"));
  EXPECT_EQ(client.compare_set("k", bytes("other"), bytes("second")), bytes("first"));
  EXPECT_EQ(client.compare_set("k", bytes("first"), bytes("second")), bytes("second"));
  EXPECT_EQ(client.get("k", kLong), bytes("second"));
}

TEST(KeyValue, AppendMakesAndGrows) {
  KeyValueServerThread server;
  KeyValueClient client(server.connect());
  client.append("log", bytes("ab"));
  client.append("log", bytes("c"));
  EXPECT_EQ(client.get("log", kLong), bytes("abc"));
}

TEST(KeyValue, GetAndWaitWaitForOthers) {
  KeyValueServerThread server;
  KeyValueClient a(server.connect()), b(server.connect());
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(30));
    b.set("x", bytes("1"));
    b.add("y", 1);
    b.append("z", bytes("z"));
  });
  EXPECT_EQ(a.get("x", kLong), bytes("1"));
  a.wait({"x", "y", "z"}, kLong);
  later.join();
}

TEST(KeyValue, TimeoutNamesTheMissingKeysAndLeavesTheClientWhole) {
  KeyValueServerThread server;
  KeyValueClient client(server.connect());
  client.set("here", {});
  const auto start = Clock::now();
  const std::string error = error_of([&] { client.wait({"here", "gone", "lost"}, milliseconds(80)); });
  EXPECT_GE(seconds_since(start), 0.08);
  EXPECT_LT(seconds_since(start), 5);
  EXPECT_TRUE(contains(error, "'gone', 'lost'")) << error;
  EXPECT_FALSE(contains(error, "'here'")) << error;
  EXPECT_TRUE(contains(error, "80 ms")) << error;
  EXPECT_TRUE(contains(error_of([&] { client.get("gone", milliseconds(0)); }), "'gone'"));
  client.set("gone", bytes("back"));
  EXPECT_EQ(client.get("gone", milliseconds(0)), bytes("back"));
}

TEST(KeyValue, AThreadThatWaitsKeepsNoOtherOut) {
  KeyValueServerThread server;
  KeyValueClient client(server.connect());
  std::vector<std::thread> waiters;
  std::atomic<int> done = 0;
  for (int i = 0; i < 4; ++i) {
    waiters.emplace_back([&, i] {
      EXPECT_EQ(client.get(numbered("key", i), kLong), bytes(numbered("v", i)));
      ++done;
    });
  }
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_THROW(client.get("never", milliseconds(20)), Error);
  for (int i = 3; i >= 0; --i) client.set(numbered("key", i), bytes(numbered("v", i)));
  for (auto& waiter : waiters) waiter.join();
  EXPECT_EQ(done, 4);
}

TEST(KeyValue, AddsOfManyThreadsAndClientsSumExactly) {
  for (const int clients : {1, 3, 8}) {
    KeyValueServerThread server;
    std::vector<std::unique_ptr<KeyValueClient>> ends;
    for (int i = 0; i < clients; ++i) ends.push_back(std::make_unique<KeyValueClient>(server.connect()));
    std::vector<std::thread> threads;
    for (int i = 0; i < 2 * clients; ++i) {
      threads.emplace_back([&, i] {
        for (int n = 0; n < 200; ++n) ends[i / 2]->add("sum", i);
        ends[i / 2]->add("arrived", 1);
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(ends[0]->add("sum", 0), 200 * clients * (2 * clients - 1));
    EXPECT_EQ(ends[0]->add("arrived", 0), 2 * clients);
  }
}

TEST(KeyValue, CarriesTheLargestValueAndRefusesMore) {
  KeyValueServerThread server;
  KeyValueClient a(server.connect()), b(server.connect());
  Bytes large(kMaxValueBytes);
  for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<uint8_t>(i % 253);
  std::vector<std::thread> getters;
  for (int i = 0; i < 3; ++i) getters.emplace_back([&] { EXPECT_EQ(b.get("large", kLong), large); });
  a.set("large", large);
  for (auto& getter : getters) getter.join();
  EXPECT_TRUE(contains(error_of([&] { a.append("large", {1}); }), "would grow over"));
  large.push_back(0);
  EXPECT_THROW(a.set("larger", large), Error);
  EXPECT_THROW(a.set(std::string(kMaxKeyBytes + 1, 'k'), {}), Error);
  EXPECT_EQ(a.num_keys(), 1) << "refused calls leave the client whole";
}

TEST(KeyValue, RefusesMoreThanTheStoreHolds) {
  KeyValueServerThread server;
  KeyValueClient client(server.connect());
  const Bytes large(kMaxValueBytes - 16);
  std::string error;
  for (int i = 0; i < 17 && error.empty(); ++i) {
    const auto text = error_of([&] { client.set(numbered("key", i), large); });
    if (text != "no error") error = text;
  }
  EXPECT_TRUE(contains(error, "full")) << error;
  EXPECT_TRUE(client.delete_key("key0"));
  client.set("again", large);
}

TEST(KeyValue, ServerDeathEndsEveryWaitWithItsName) {
  std::optional<KeyValueServerThread> server(std::in_place);
  KeyValueClient client(server->connect());
  client.set("a", {});
  std::vector<std::thread> waiters;
  for (int i = 0; i < 3; ++i)
    waiters.emplace_back(
        [&] { EXPECT_TRUE(contains(error_of([&] { client.get("never", kLong); }), "server is gone")); });
  std::this_thread::sleep_for(milliseconds(20));
  const auto start = Clock::now();
  server.reset();
  for (auto& waiter : waiters) waiter.join();
  EXPECT_LT(seconds_since(start), 1);
  EXPECT_TRUE(contains(error_of([&] { client.set("a", {}); }), "server is gone"));
  EXPECT_TRUE(contains(error_of([&] { client.wait({"a"}, kLong); }), "launcher"));
}

TEST(KeyValue, GarbageDropsOneClientOnly) {
  KeyValueServerThread server;
  KeyValueClient good(server.connect());
  std::mt19937 random(42);
  for (int round = 0; round < 200; ++round) {
    const FileDescriptor bad = server.connect();
    std::string garbage(1 + random() % 200, '\0');
    for (char& byte : garbage) byte = static_cast<char>(random());
    if (round % 2 == 0) {  // a sane length, then nonsense inside
      garbage.resize(std::max<size_t>(garbage.size(), 12));
      const auto length = static_cast<uint32_t>(garbage.size() - 4);
      std::memcpy(garbage.data(), &length, sizeof length);
    }
    try {
      send_all(bad.get(), garbage.data(), garbage.size(), Deadline(kLong));
    } catch (const ConnectionClosed&) {
    }
    EXPECT_EQ(good.add("alive", 1), round + 1);
  }
}

TEST(KeyValue, ADropHasAReasonAndAnEndHasNone) {
  KeyValueServer server;
  auto [bad_end, bad] = make_socket_pair();
  auto [good_end, good] = make_socket_pair();
  EXPECT_EQ(server.add_client(std::move(bad_end)), 0);
  EXPECT_EQ(server.add_client(std::move(good_end)), 1);
  send_all(bad.get(), "\xff\xff\xff\xff", 4, Deadline(kLong));
  good.reset();
  std::vector<pollfd> polled;
  server.append_polled(polled);
  ASSERT_EQ(polled.size(), 2u);
  ASSERT_EQ(::poll(polled.data(), polled.size(), 5000), 2);
  for (const auto& ready : polled) server.handle(ready);
  const auto dropped = server.take_dropped();
  ASSERT_EQ(dropped.size(), 2u);
  EXPECT_TRUE(contains(dropped[0].reason, "4294967295 bytes")) << dropped[0].reason;
  EXPECT_EQ(dropped[1].reason, "");
  char byte;
  EXPECT_THROW(receive_all(bad.get(), &byte, 1, Deadline(kLong)), ConnectionClosed);
  polled.clear();
  server.append_polled(polled);
  EXPECT_TRUE(polled.empty());
}

TEST(KeyValue, AClientThatDiesBeforeItsAnswerEndsNormally) {
  KeyValueServer server;
  auto [dead_end, dead] = make_socket_pair();
  auto [live_end, live] = make_socket_pair();
  server.add_client(std::move(dead_end));
  server.add_client(std::move(live_end));
  const auto serve = [&] {
    std::vector<pollfd> polled;
    server.append_polled(polled);
    ::poll(polled.data(), polled.size(), 5000);
    for (const auto& ready : polled) server.handle(ready);
  };
  std::string get, set;
  append_frame(get, 1, static_cast<uint8_t>(KeyValueRequest::kGet), {"k"});
  append_frame(set, 1, static_cast<uint8_t>(KeyValueRequest::kSet), {"k", "v"});
  send_all(dead.get(), get.data(), get.size(), Deadline(kLong));
  serve();
  dead.reset();
  send_all(live.get(), set.data(), set.size(), Deadline(kLong));
  // The server sees the dead client's end first or answers it first; neither is an error.
  for (int turn = 0; turn < 2; ++turn) serve();
  const auto dropped = server.take_dropped();
  ASSERT_EQ(dropped.size(), 1u);
  EXPECT_EQ(dropped[0].client, 0);
  EXPECT_EQ(dropped[0].reason, "");
}

TEST(KeyValue, AClientThatNeverReadsIsHeldBack) {
  KeyValueServerThread server;
  KeyValueClient good(server.connect());
  good.set("large", Bytes(1 << 20));
  const FileDescriptor greedy = server.connect();
  std::string requests;
  for (uint32_t id = 0; id < 5000; ++id)
    append_frame(requests, id, static_cast<uint8_t>(KeyValueRequest::kGet), {"large"});
  EXPECT_THROW(
      {
        for (;;) send_all(greedy.get(), requests.data(), requests.size(), Deadline(milliseconds(100)));
      },
      Error);
  EXPECT_EQ(good.num_keys(), 1);
}

TEST(KeyValue, AnInheritedSocketGoesNoFurther) {
  KeyValueServerThread server;
  FileDescriptor socket = server.connect();
  const int fd = socket.get();
  ASSERT_EQ(::fcntl(fd, F_SETFD, 0), 0);
  const KeyValueClient client(std::move(socket));
  EXPECT_TRUE(::fcntl(fd, F_GETFD) & FD_CLOEXEC);
}

TEST(KeyValue, AcceptsOwnProcessesFromAListener) {
  UnixListener listener = listen_unix();
  const std::string name = listener.name;
  {
    KeyValueServerThread server(std::move(listener.socket));
    KeyValueClient a(connect_unix(name)), b(connect_unix(name)), c(server.connect());
    a.set("k", bytes("v"));
    EXPECT_EQ(b.get("k", kLong), bytes("v"));
    EXPECT_EQ(c.get("k", kLong), bytes("v"));
  }
  EXPECT_THROW(connect_unix(name), Error);
}

// A client for which there is no descriptor stays in the queue, where poll keeps finding it.
TEST(KeyValue, WithoutDescriptorsTheServerWaitsWithoutSpinning) {
  UnixListener listener = listen_unix();
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  listener.name.copy(address.sun_path + 1, listener.name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + listener.name.size());
  KeyValueServerThread server(std::move(listener.socket));
  FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int lowest_free = ::dup(socket.get());
  ::close(lowest_free);
  const rlimit none{.rlim_cur = static_cast<rlim_t>(lowest_free), .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  ASSERT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
  const std::clock_t start = std::clock();
  std::this_thread::sleep_for(milliseconds(400));
  EXPECT_LT(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC, 0.1);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  KeyValueClient client(std::move(socket));
  client.set("k", bytes("v"));
  EXPECT_EQ(client.get("k", kLong), bytes("v"));
}

// It would write into the middle of its parent's messages.
TEST(KeyValue, AChildOfForkIsTold) {
  KeyValueServerThread server;
  KeyValueClient client(server.connect());
  client.set("k", bytes("v"));
  const pid_t child = ::fork();
  if (child == 0)
    ::_exit(contains(error_of([&] { client.set("k", bytes("w")); }), "belongs to the process that opened it") ? 7 : 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 7);
  EXPECT_EQ(client.get("k", kLong), bytes("v"));
}

}  // namespace
}  // namespace lockstep
