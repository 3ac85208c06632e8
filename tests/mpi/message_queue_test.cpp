#include "collectives/mpi/message_queue.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <stdexcept>

#include "collectives/mpi/mover.h"
#include "collectives/mpi/notes.h"

namespace lockstep::mpi_engine {
namespace {

/// An MPI whose messages are over when a test says so.
class ScriptedPort final : public Port {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 3; }
  bool takes_any_thread() const override { return true; }
  const char* thread_level() const override { return "MPI_THREAD_MULTIPLE"; }
  bool is_over() const override { return false; }
  int largest_tag() const override { return 100; }
  Handle everybody() const override { return 7; }
  Handle open(const std::vector<int>&) override { return 8; }
  void close(Handle) override {}
  Handle send(Handle, const void*, size_t, int to, int tag) override { return start(to, tag); }
  Handle receive(Handle, void* data, size_t bytes, int from, int tag) override {
    if (!notes.empty()) std::copy_n(notes.begin()->second.begin(), bytes, static_cast<char*>(data));
    if (!notes.empty()) notes.erase(notes.begin());
    return start(from, tag);
  }
  bool test(Handle& message) override {
    if (broken.contains(message)) throw std::runtime_error("the connection is gone");
    return done.contains(message);
  }
  void give_up(Handle& message, bool) override { given_up.insert(message); }
  std::optional<Arrival> arrival(Handle, int) override {
    if (notes.empty()) return std::nullopt;
    return Arrival{notes.begin()->first, notes.begin()->second.size()};
  }

  Handle last = 0;
  std::set<Handle> done, broken, given_up;
  std::multimap<int, std::string> notes;  // that have come, by their rank
  bool refuses = false;
  bool is_quick = false;  // what starts is over

 private:
  Handle start(int, int) {
    if (refuses) throw std::runtime_error("no such rank");
    ++last;
    if (is_quick) done.insert(last);
    return last;
  }
};

MessagePtr message_to(int peer, int tag = 5) {
  auto message = std::make_shared<Message>();
  message->peer = peer;
  message->tag = tag;
  message->is_sent = true;
  return message;
}

TEST(MessageQueue, AMessageMovesUntilItIsOver) {
  ScriptedPort port;
  MessageQueue queue(port);
  const MessagePtr message = message_to(1);
  queue.post(message);
  EXPECT_FALSE(queue.is_moving());
  EXPECT_TRUE(queue.move());
  EXPECT_TRUE(queue.is_moving());
  EXPECT_TRUE(queue.is_sending(5));
  EXPECT_FALSE(queue.is_sending(6));
  EXPECT_FALSE(queue.move());
  port.done.insert(message->handle);
  EXPECT_TRUE(queue.move());
  EXPECT_EQ(message->state, Message::State::kArrived);
  EXPECT_FALSE(queue.is_moving());
}

TEST(MessageQueue, WhatMpiRefusesOrLosesHasItsError) {
  ScriptedPort port;
  MessageQueue queue(port);
  const MessagePtr refused = message_to(9), lost = message_to(1);
  port.refuses = true;
  queue.post(refused);
  queue.move();
  EXPECT_EQ(refused->state, Message::State::kFailed);
  EXPECT_EQ(refused->error, "no such rank");
  port.refuses = false;
  queue.post(lost);
  queue.move();
  port.broken.insert(lost->handle);
  queue.move();
  EXPECT_EQ(lost->error, "the connection is gone");
  EXPECT_FALSE(queue.is_moving());
}

TEST(MessageQueue, AMessageIsTakenBackUntilItIsStarted) {
  ScriptedPort port;
  MessageQueue queue(port);
  const MessagePtr posted = message_to(1), started = message_to(2);
  queue.post(started);
  queue.move();
  queue.post(posted);
  EXPECT_TRUE(queue.take_back(posted));
  EXPECT_EQ(posted->error, "given up");
  EXPECT_FALSE(queue.take_back(started));
  EXPECT_FALSE(started->is_over());
  queue.give_up();
  EXPECT_TRUE(started->is_over());
  EXPECT_TRUE(port.given_up.contains(started->handle));
}

TEST(Notes, OneGoesToEveryOtherRankAndThoseThatComeAreRead) {
  ScriptedPort port;
  port.is_quick = true;
  Board board, other;
  Notes notes(port, board, /*rank=*/1, /*world_size=*/3);
  const std::vector<MessagePtr> sent = notes.messages_of(board.set("here", "1"));
  ASSERT_EQ(sent.size(), 2u);
  EXPECT_EQ(sent[0]->peer, 2);
  EXPECT_EQ(sent[1]->peer, 0);
  EXPECT_EQ(sent[0]->communicator, port.everybody());
  EXPECT_FALSE(notes.read());
  port.notes.emplace(0, other.set("there", "2"));
  EXPECT_TRUE(notes.read());
  EXPECT_EQ(board.get("there"), "2");
  EXPECT_EQ(board.get("here"), "1");
}

TEST(Mover, PollsFromWakeUntilNothingMoves) {
  std::atomic<int> polls{0};
  Mover mover([&] { return ++polls % 3 != 0; });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(polls, 0);
  for (const int expected : {3, 6}) {
    mover.wake();
    const Deadline deadline(std::chrono::seconds(10));
    while (polls < expected && !deadline.passed()) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(polls, expected);
  }
  mover.end();
}

}  // namespace
}  // namespace lockstep::mpi_engine
