#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "collectives/shm/local_world.h"
#include "collectives/stuck_ranks.h"

// Ranks that wait for each other's messages are told; ranks that only wait for long are not.

namespace lockstep::shm {
namespace {

using std::chrono::milliseconds;

constexpr size_t kLarge = 100'000;  // more than a channel holds

void send(Communicator& group, int to, int64_t tag, size_t bytes = 8) {
  const std::vector<std::byte> data(bytes);
  group.wait(*group.send(data.data(), bytes, to, tag), kTestTimeout);
}
void receive(Communicator& group, int from, int64_t tag, size_t bytes = 8) {
  std::vector<std::byte> data(bytes);
  group.wait(*group.receive(data.data(), bytes, from, tag), kTestTimeout);
}
void barrier(Communicator& group) { group.run({}, kTestTimeout); }
WorkPtr start_barrier(Communicator& group) { return group.start({}); }

struct Program {
  const char* name;
  int ranks;
  std::function<void(Communicator&)> body;
  std::vector<std::string> said;  ///< on every rank; empty: it ends well
};
void PrintTo(const Program& program, std::ostream* out) { *out << program.name; }

const Program kPrograms[] = {
    {"BothReceive",
     2,
     [](Communicator& group) { receive(group, 1 - group.rank(), 7); },
     {"ranks wait for each other's messages", "rank 0 waits for a message from rank 1 with tag 7",
      "rank 1 waits for a message from rank 0 with tag 7", "Every send needs a recv with the same tag"}},
    {"BothSendMuch",
     2,
     [](Communicator& group) { send(group, 1 - group.rank(), 3, kLarge); },
     {"rank 0 waits until rank 1 receives its message with tag 3",
      "rank 1 waits until rank 0 receives its message with tag 3"}},
    {"OtherTags",
     2,
     [](Communicator& group) {
       if (group.rank() == 0)
         send(group, 1, 1);
       else
         receive(group, 0, 2);
       barrier(group);
     },
     {"rank 0 waits in operation 1, barrier()",
      "rank 1 waits for a message from rank 0 with tag 2 and has one with tag 1"}},
    {"OtherTagsOfMuch",
     2,
     [](Communicator& group) {
       if (group.rank() == 0) {
         send(group, 1, 1, kLarge);
         receive(group, 1, 5);
       } else {
         receive(group, 0, 2, kLarge);
       }
     },
     {"rank 0 waits for a message from rank 1 with tag 5", "with tag 2 and has one with tag 1"}},
    {"ReceiveAgainstACollective",
     3,
     [](Communicator& group) {
       if (group.rank() == 2)
         receive(group, 0, 4);
       else
         barrier(group);
     },
     {"rank 0 waits in operation 1, barrier()", "rank 1 waits in operation 1, barrier()",
      "rank 2 waits for a message from rank 0 with tag 4"}},
    {"ARing",
     3,
     [](Communicator& group) { receive(group, (group.rank() + 2) % 3, 0); },
     {"rank 0 waits for a message from rank 2 with tag 0", "rank 1 waits for a message from rank 0 with tag 0",
      "rank 2 waits for a message from rank 1 with tag 0"}},
    {"AllReceiveOfAnybody",
     3,
     [](Communicator& group) { receive(group, kAnySource, 9); },
     {"rank 0 waits for a message from any rank with tag 9"}},
    {"TwoAreStuckAndTheThirdWaitsForThem",
     3,
     [](Communicator& group) {
       if (group.rank() < 2) receive(group, 1 - group.rank(), 1);
       barrier(group);
     },
     {"rank 0 waits for a message from rank 1 with tag 1", "rank 2 waits in operation 1, barrier()"}},
    {"ALateSender",
     2,
     [](Communicator& group) {
       if (group.rank() == 0) std::this_thread::sleep_for(milliseconds(4000));
       if (group.rank() == 0)
         send(group, 1, 1);
       else
         receive(group, 0, 1);
     },
     {}},
    {"ALateReceiver",
     2,
     [](Communicator& group) {
       if (group.rank() == 0) std::this_thread::sleep_for(milliseconds(4000));
       if (group.rank() == 1)
         send(group, 0, 1, kLarge);
       else
         receive(group, 1, 1, kLarge);
     },
     {}},
    {"TagsInAnotherOrderWithAPauseBetween",
     2,
     [](Communicator& group) {
       if (group.rank() == 0) {
         send(group, 1, 1);
         std::this_thread::sleep_for(milliseconds(4000));
         send(group, 1, 2);
       } else {
         receive(group, 0, 2);
         receive(group, 0, 1);
       }
     },
     {}},
    {"AMessageBesideACollectiveThatWaits",
     3,
     [](Communicator& group) {
       const WorkPtr pending = start_barrier(group);
       if (group.rank() == 0) send(group, 1, 1);
       if (group.rank() == 1) receive(group, 0, 1);
       if (group.rank() == 2) std::this_thread::sleep_for(milliseconds(3500));
       group.wait(*pending, kTestTimeout);
     },
     {}},
    {"AReceiveWhosePeerWaitsForTheThird",
     3,
     [](Communicator& group) {
       if (group.rank() == 0) receive(group, 1, 1);
       if (group.rank() == 1) receive(group, 2, 1), send(group, 0, 1);
       if (group.rank() == 2) std::this_thread::sleep_for(milliseconds(3500)), send(group, 1, 1);
     },
     {}},
    {"AnybodyIsEnough",
     3,
     [](Communicator& group) {
       if (group.rank() == 0) receive(group, kAnySource, 1), send(group, 1, 1);
       if (group.rank() == 1) receive(group, 0, 1);
       if (group.rank() == 2) std::this_thread::sleep_for(milliseconds(3500)), send(group, 0, 1);
     },
     {}},
    {"AnotherThreadSends",
     2,
     [](Communicator& group) {
       if (group.rank() == 1) return receive(group, 0, 1), send(group, 0, 2);
       group.with_waiter([](Waiter& waiter) { waiter.expect_several_callers(); });
       std::thread other([&] {
         std::this_thread::sleep_for(milliseconds(3500));
         send(group, 1, 1);
       });
       receive(group, 1, 2);
       other.join();
     },
     {}},
    {"TwoThreadsThatHaveCalledBefore",
     2,
     [](Communicator& group) {
       if (group.rank() == 1) return receive(group, 0, 0), receive(group, 0, 1), send(group, 0, 2);
       std::thread other([&] {
         send(group, 1, 0);
         std::this_thread::sleep_for(milliseconds(3500));
         send(group, 1, 1);
       });
       receive(group, 1, 2);
       other.join();
     },
     {}},
};

class Stuck : public ::testing::TestWithParam<Program> {};
INSTANTIATE_TEST_SUITE_P(Programs, Stuck, ::testing::ValuesIn(kPrograms),
                         [](const auto& instance) { return std::string(instance.param.name); });

TEST_P(Stuck, IsToldToEveryRankAndNothingElseIs) {
  const Program& program = GetParam();
  with_group(program.ranks, [&](Communicator& group) {
    const auto started = Clock::now();
    std::string text;
    try {
      program.body(group);
    } catch (const Error& error) {
      text = error.what();
    }
    if (program.said.empty()) {
      EXPECT_EQ(text, "") << "rank " << group.rank();
    } else {
      EXPECT_LT(seconds_since(started), 5) << "rank " << group.rank();
      for (const std::string& part : program.said)
        EXPECT_NE(text.find(part), std::string::npos) << part << ": " << text;
    }
  });
}

TEST(Stuck, AMessageThatNeverComesIsNamedWithItsTagWhenItsSenderHasLeft) {
  with_group(2, [](Communicator& group) {
    if (group.rank() == 0) return group.leave();
    try {
      receive(group, 0, 11);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1 called a recv from rank 0 with tag 11"), std::string::npos)
          << error.what();
    }
  });
}

TEST(StuckRanks, AreThoseThatNeedCallsOfOneAnother) {
  using Found = std::vector<bool>;
  EXPECT_EQ(stuck_ranks({{{1}}, {{0}}}), Found({true, true}));
  EXPECT_EQ(stuck_ranks({{{1}}, {}}), Found({false, false}));
  EXPECT_EQ(stuck_ranks({{{1}}, {{2}}, {}}), Found({false, false, false}));
  EXPECT_EQ(stuck_ranks({{{1}}, {{0}}, {{0, 1}}, {}}), Found({true, true, true, false}));
  EXPECT_EQ(stuck_ranks({{{1, 2}}, {{0}}, {}}), Found({true, true, false}));
  EXPECT_EQ(stuck_ranks({{{1, 2}, true}, {{0}}, {}}), Found({false, false, false}));
  EXPECT_EQ(stuck_ranks({{{1, 2}, true}, {{0}}, {{0}}}), Found({true, true, true}));
}

}  // namespace
}  // namespace lockstep::shm
