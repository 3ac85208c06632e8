#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/context.h>

#include "base/clock.h"
#include "support/ranks.h"

// send and recv that do not match, on every engine: who is told what, and how soon.

namespace lockstep::wrong_messages {
namespace {

using lockstep::testing::Engine;
using lockstep::testing::run_ranks;
using std::chrono::milliseconds;

const Engine kTried[] = {{2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}, {3, "hierarchical", "aab"}};

std::string text_of_error(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

class WrongMessages : public ::testing::TestWithParam<Engine> {};
INSTANTIATE_TEST_SUITE_P(Engines, WrongMessages, ::testing::ValuesIn(kTried),
                         [](const auto& instance) { return lockstep::testing::name_of(instance.param); });

void expect_refused(const Group& group, int64_t sent, int64_t expected) {
  const int last = group.world_size() - 1;
  const auto started = Clock::now();
  if (group.rank() == 0) {
    (void)text_of_error([&] { group.send(at::ones({sent}), last, 7); });
    EXPECT_LT(seconds_since(started), 5);
  }
  if (group.rank() != last) return;
  const std::string text = text_of_error([&] { group.recv(at::zeros({expected}), 0, 7); });
  EXPECT_LT(seconds_since(started), 5);
  EXPECT_NE(text.find(std::to_string(sent) + " elements of float32 sent, " + std::to_string(expected)),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("expected (tag 7)"), std::string::npos) << text;
}

TEST_P(WrongMessages, OneOfAnotherSizeIsRefusedAlsoWhereOneSideIsEmpty) {
  run_ranks(GetParam(), [](Context& context) {
    const std::pair<int, int> sizes[] = {{4, 0},    {0, 4},    {4, 5},       {5, 4},       {1, 0},
                                         {0, 1},    {900, 0},  {0, 900},     {3000, 2999}, {2999, 3000},
                                         {4096, 1}, {1, 4096}, {70000, 9000}};
    for (const auto& [sent, expected] : sizes) {
      expect_refused(context.group().split(0), sent, expected);
      context.group().barrier();
    }
  });
}

TEST_P(WrongMessages, AnEmptyOneIsReceivedAndTheNextOneIsRight) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    const int last = context.world_size() - 1;
    if (context.rank() == 0) {
      group.send(at::zeros({0}), last, 7);
      group.send(at::full({3}, 5.0), last, 7);
    }
    if (context.rank() == last) {
      const at::Tensor next = at::zeros({3});
      group.recv(at::zeros({0, 4}), 0, 7);
      group.recv(next, 0, 7);
      EXPECT_EQ(next[2].item<float>(), 5.0f);
    }
    group.barrier();
  });
}

/// A program may ask whether a message is done, and need not keep its Work.
TEST_P(WrongMessages, NoneArePolledAndDroppedOnes) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    const int last = context.world_size() - 1;
    const auto poll = [](const Work& work) {
      const auto started = Clock::now();
      while (!work.is_completed() && seconds_since(started) < 20) std::this_thread::sleep_for(milliseconds(1));
      EXPECT_TRUE(work.is_completed());
      work.wait();
    };
    for (const int64_t size : {int64_t{4}, int64_t{300'000}}) {
      const at::Tensor received = at::zeros({size});
      if (context.rank() == 0) poll(group.send_async(at::full({size}, 3.0), last, 5));
      if (context.rank() == last) {
        poll(group.recv_async(received, 0, 5));
        EXPECT_TRUE(received.eq(3).all().item<bool>());
      }
      group.barrier();
      std::vector<at::Tensor> many;
      if (context.rank() == 0)
        for (int i = 0; i < 20; ++i)
          static_cast<void>(group.send_async(at::full({size}, static_cast<double>(i), at::kFloat), last, 6));
      if (context.rank() == last)
        for (int i = 0; i < 20; ++i) {
          group.recv(received, 0, 6);
          EXPECT_EQ(received[size - 1].item<float>(), static_cast<float>(i));
        }
      group.barrier();
      // One that is received after its Work has gone.
      if (context.rank() == last) static_cast<void>(group.recv_async(received, 0, 8));
      if (context.rank() == 0) group.send(at::full({size}, 9.0), last, 8);
      group.barrier();
      if (context.rank() == last) {
        EXPECT_THROW(group.send(received, last), c10::Error) << "to itself";
        EXPECT_THROW(group.recv(received, last), c10::Error) << "from itself";
      }
      EXPECT_THROW(group.send(received, context.rank() == 0 ? 1 : 0, -1), c10::Error) << "a negative tag";
    }
    // Nobody receives these; the group ends all the same.
    if (context.rank() == 0) static_cast<void>(group.send_async(at::ones({4}), last, 10));
    if (context.rank() == last) {
      EXPECT_FALSE(group.recv_async(at::zeros({4}), 0, 11).is_completed());
    }
  });
}

TEST_P(WrongMessages, NoneAreThoseOfAutogradsZeros) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    const at::Tensor zero = at::_efficientzerotensor({4}, at::kFloat), received = at::ones({4});
    const int last = context.world_size() - 1;
    if (context.rank() == 0) group.send(zero, last);
    if (context.rank() == last) {
      group.recv(received, 0);
      EXPECT_EQ(received.sum().item<float>(), 0);
    }
    EXPECT_EQ(group.all_gather(zero).sum().item<float>(), 0);
    EXPECT_NE(text_of_error([&] { group.all_reduce(zero); }).find("which has no memory to be written to"),
              std::string::npos);
    group.barrier();
  });
}

struct Program {
  const char* name;
  std::function<void(const Group&)> body;
  std::vector<std::string> said;  ///< on rank 0 and the last rank, L; empty: it ends well
};

const std::vector<Program>& programs() {
  static const at::Tensor some = at::ones({4}), much = at::ones({100'000});
  const auto is_last = [](const Group& group) { return group.rank() == group.world_size() - 1; };
  const auto outside = [is_last](const Group& group) { return group.rank() != 0 && !is_last(group); };
  static const std::vector<Program> kPrograms{
      {"both receive",
       [=](const Group& group) {
         if (!outside(group)) group.recv(some.clone(), group.rank() == 0 ? group.world_size() - 1 : 0, 7);
       },
       {"ranks wait for each other's messages", "rank 0 waits for a message from rank L with tag 7",
        "rank L waits for a message from rank 0 with tag 7"}},
      {"both send",
       [=](const Group& group) {
         if (!outside(group)) group.send(much, group.rank() == 0 ? group.world_size() - 1 : 0, 3);
       },
       {"rank 0 waits until rank L receives its message with tag 3",
        "rank L waits until rank 0 receives its message with tag 3"}},
      {"other tags",
       [=](const Group& group) {
         if (group.rank() == 0) group.send(some, group.world_size() - 1, 1);
         if (is_last(group)) group.recv(some.clone(), 0, 2);
         group.barrier();
       },
       {"rank L waits for a message from rank 0 with tag 2", "tag 1|barrier()"}},
      {"a recv against a collective",
       [=](const Group& group) {
         if (is_last(group)) return group.recv(some.clone(), 0, 4);
         group.all_reduce(some.clone());
       },
       {"rank L waits for a message from rank 0 with tag 4", "all_reduce("}},
      {"a ring",
       [=](const Group& group) {
         const int n = group.world_size();
         group.recv(some.clone(), (group.rank() + n - 1) % n, 5);
       },
       {"rank 0 waits for a message from rank L with tag 5"}},
      {"a late sender",
       [=](const Group& group) {
         if (group.rank() == 0) {
           std::this_thread::sleep_for(milliseconds(4000));
           group.send(some, group.world_size() - 1, 1);
         }
         if (is_last(group)) group.recv(some.clone(), 0, 1);
       },
       {}},
      {"a late receiver",
       [=](const Group& group) {
         if (group.rank() == 0) {
           std::this_thread::sleep_for(milliseconds(4000));
           group.recv(much.clone(), group.world_size() - 1, 1);
         }
         if (is_last(group)) group.send(much, 0, 1);
       },
       {}},
      {"messages that were started in another order",
       [=](const Group& group) {
         const int n = group.world_size();
         if (group.rank() == 0) {
           const Work first = group.send_async(some, n - 1, 1), second = group.send_async(some * 2, n - 1, 2);
           std::this_thread::sleep_for(milliseconds(3000));
           first.wait(), second.wait();
         }
         if (is_last(group)) {
           const at::Tensor two = some.clone();
           group.recv(two, 0, 2);
           EXPECT_EQ(two[0].item<float>(), 2.0f);
           std::this_thread::sleep_for(milliseconds(2500));
           group.recv(two, 0, 1);
           EXPECT_EQ(two[0].item<float>(), 1.0f);
         }
       },
       {}},
      {"a message beside a collective whose last rank is late",
       [=](const Group& group) {
         const at::Tensor sum = some.clone();
         if (is_last(group) && group.world_size() > 2) std::this_thread::sleep_for(milliseconds(3500));
         const Work pending = group.all_reduce_async(sum);
         if (group.rank() == 0) group.send(some, 1, 1);
         if (group.rank() == 1) group.recv(some.clone(), 0, 1);
         pending.wait();
         EXPECT_EQ(sum[0].item<float>(), static_cast<float>(group.world_size()));
       },
       {}},
  };
  return kPrograms;
}

/// "L" in a part is the last rank; one of the parts between bars is enough.
bool says(const std::string& text, std::string part, int last) {
  for (size_t at = 0; (at = part.find("rank L", at)) != std::string::npos;)
    part.replace(at, 6, "rank " + std::to_string(last));
  std::istringstream parts(part);
  for (std::string one; std::getline(parts, one, '|');)
    if (text.find(one) != std::string::npos) return true;
  return false;
}

TEST_P(WrongMessages, RanksThatWaitForEachOtherAreTold) {
  run_ranks(GetParam(), [](Context& context) {
    for (const Program& program : programs()) {
      SCOPED_TRACE(program.name);
      const int last = context.world_size() - 1;
      const Group group = context.group().split(0);
      const auto started = Clock::now();
      const std::string text = text_of_error([&] { program.body(group); });
      const bool concerned = context.rank() == 0 || context.rank() == last;
      if (program.said.empty()) {
        EXPECT_EQ(text, "");
      }
      if (!program.said.empty() && concerned) {
        EXPECT_LT(seconds_since(started), 5);
        for (const std::string& part : program.said) EXPECT_TRUE(says(text, part, last)) << part << ": " << text;
      }
      context.group().barrier();
    }
  });
}

TEST_P(WrongMessages, OneEndsTheGroup) {
  run_ranks(GetParam(), [](Context& context) {
    const int last = context.world_size() - 1;
    const Group group = context.group().split(0);
    text_of_error([&] {
      if (context.rank() == 0) group.send(at::ones({4}), last, 5);
      if (context.rank() == last) group.recv(at::zeros({5}), 0, 5);
    });
    const auto started = Clock::now();
    const std::string text = text_of_error([&] { group.all_reduce(at::ones({3})); });
    EXPECT_LT(seconds_since(started), 5);
    EXPECT_NE(text, "");
    if (context.rank() == last) {
      EXPECT_NE(text.find("4 elements of float32 sent, 5"), std::string::npos) << text;
    }
    context.group().barrier();
  });
}

/// Whoever waits for a message of a rank that has left is told so, and which messages of it nobody has received.
TEST_P(WrongMessages, OfARankThatHasLeftAreNamed) {
  run_ranks(GetParam(), [](Context& context) {
    const int last = context.world_size() - 1;
    Group group = context.group().split(0);
    if (context.rank() == 0) {
      static_cast<void>(group.send_async(at::ones({4}), last, 5));
      static_cast<void>(group.send_async(at::ones({4}), last, 6));
      group = context.group();  // leaves the other one
    }
    if (context.rank() == last) {
      const auto started = Clock::now();
      const std::string text = text_of_error([&] { group.recv(at::zeros({4}), 0, 7); });
      EXPECT_LT(seconds_since(started), 8);
      for (const std::string& part : {std::string("rank 0 has "), std::string(" left the group"),
                                      "rank 0 has sent a message with tags 5, 6, which rank " + std::to_string(last) +
                                          " has not received. Every send needs a recv with the same tag."})
        EXPECT_NE(text.find(part), std::string::npos) << part << "\nis not in: " << text;
    }
    context.group().barrier();
  });
}

}  // namespace
}  // namespace lockstep::wrong_messages
