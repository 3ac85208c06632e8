#include <lockstep/replay_buffer.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <lockstep/checkpointer.h>
#include <torch/torch.h>

#include "rank_page/rank_board.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep::replay_buffer_test {
namespace {

using namespace testing;  // NOLINT

/// The text of what `body` throws; "" if it throws nothing.
std::string said_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

NamedTensors columns() { return {{"place", at::empty({2})}, {"number", at::empty({}, at::kLong)}}; }

/// Samples numbered from `first` on.
NamedTensors samples(int64_t first, int64_t count) {
  const at::Tensor numbers = at::arange(first, first + count);
  return {{"number", numbers}, {"place", at::stack({numbers, numbers + 0.5}, 1).to(at::kFloat)}};
}

std::vector<int64_t> numbers_in(const ReplayBuffer& buffer) {
  const at::Tensor numbers = buffer.state_dict()["samples.number"];
  return {numbers.data_ptr<int64_t>(), numbers.data_ptr<int64_t>() + numbers.numel()};
}
std::vector<int64_t> range(int64_t first, int64_t last) {
  std::vector<int64_t> all;
  for (int64_t number = first; number < last; ++number) all.push_back(number);
  return all;
}

class ReplayBufferOn : public ::testing::TestWithParam<Engine> {};
INSTANTIATE_TEST_SUITE_P(Engines, ReplayBufferOn,
                         ::testing::Values(Engine{1, ""}, Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(ReplayBufferOn, EachRankDrawsFromItsOwn) {
  run_ranks(GetParam(), [](Context& context) {
    const int64_t own = 1000 * context.rank();
    ReplayBuffer buffer(columns(), context, {.capacity = 10, .batch_size = 400, .seed = 3});
    buffer.add(samples(own, 4 + context.rank()));
    const StateDict batch = buffer.sample();
    EXPECT_EQ(batch["place"].sizes(), (std::vector<int64_t>{400, 2}));
    EXPECT_TRUE(batch["place"].select(1, 0).equal(batch["number"].to(at::kFloat)));
    EXPECT_TRUE(std::get<0>(at::_unique(batch["number"])).equal(at::arange(own, own + 4 + context.rank())))
        << "400 draws find each of a few samples";
    EXPECT_FALSE(buffer.sample()["number"].equal(batch["number"]));
    if (context.world_size() == 1) return;
    const at::Tensor all = context.group().all_gather(batch["number"] - own);
    EXPECT_FALSE(all[0].equal(all[1])) << "ranks draw differently";
  });
}

TEST_P(ReplayBufferOn, ARunThatResumesDrawsAsIfItHadNotStopped) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "run").string();
  run_ranks(GetParam(), [&path](Context& context) {
    const ReplayBufferOptions options{.capacity = 7, .batch_size = 5, .seed = 11};
    const int64_t own = 1000 * context.rank();
    ReplayBuffer buffer(columns(), context, options);
    for (int step = 0; step < 5; ++step) {
      buffer.add(samples(own + 3 * step, 3));
      static_cast<void>(buffer.sample());
    }
    Checkpointer saver(path, context.group());
    saver.add("experience", buffer);
    saver.save(5);
    saver.finish();

    ReplayBuffer again(columns(), context, options);
    Checkpointer loader(path, context.group());
    loader.add("experience", again);
    ASSERT_TRUE(loader.resume());
    EXPECT_EQ(again.added(), 15);
    EXPECT_EQ(again.draws(), 5);
    EXPECT_EQ(numbers_in(again), range(own + 8, own + 15));
    for (int step = 5; step < 12; ++step) {
      for (ReplayBuffer* one : {&buffer, &again}) one->add(samples(own + 3 * step, step % 4));
      EXPECT_TRUE(again.sample()["place"].equal(buffer.sample()["place"])) << step;
    }
  });
}

TEST_P(ReplayBufferOn, WhatDiffersByRankIsToldToAll) {
  if (GetParam().world_size == 1) GTEST_SKIP() << "nothing differs";
  run_ranks(GetParam(), [](Context& context) {
    const bool odd = context.rank() == context.world_size() - 1;
    const auto said = [&](const NamedTensors& of_rank, const ReplayBufferOptions& options) {
      return said_by([&] { ReplayBuffer(of_rank, context, options); });
    };
    const auto expect = [](const std::string& text, const std::string& part) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    };
    expect(said(columns(), {.capacity = odd ? 5 : 6}), "capacity: 6");
    expect(said(columns(), {.batch_size = odd ? 5 : 6}), "batch_size: 6");
    expect(said(columns(), {.seed = odd ? 5 : 6}), "seed: 6");
    expect(said({{"place", at::empty({odd ? 2 : 3})}}, {}), "place: Float [3]");
    expect(said({{odd ? "reward" : "place", at::empty({2})}}, {}), "rank " + std::to_string(context.world_size() - 1));
    expect(said(columns(), {.capacity = odd ? 0 : 6}), "capacity: 6");
    expect(said(columns(), {.batch_size = odd ? -1 : 6}), "batch_size: 6");
    expect(said({{"place", odd ? at::Tensor() : at::empty({2})}}, {}), "place: undefined");
    expect(said({{"place", odd ? at::zeros({2}).to_sparse() : at::empty({2})}}, {}), "place: Float [2] (Sparse)");
    expect(said(odd ? NamedTensors{} : columns(), {}), "place: Float [2]");
    EXPECT_EQ(own_page().read(context.world_size()).failure, RankFailure::kMismatch) << "for the launcher";
    EXPECT_EQ(said(columns(), {}), "") << "the group is as it was";
  });
}

TEST(ReplayBufferOfOtherRanks, IsNamedAsResumedBesideWhatIsNot) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "run").string();
  const auto with_checkpointer = [&path](Context& context, const std::function<void(Checkpointer&)>& use) {
    ReplayBuffer buffer(columns(), context, {.capacity = 6, .batch_size = 4});
    if (context.world_size() > 1) buffer.add(samples(100 * context.rank(), 2));
    int64_t own = context.rank();
    Checkpointer checkpointer(path, context.group());
    checkpointer.add("experience", buffer).add("own", own, Checkpointer::Scope::kEachRank);
    use(checkpointer);
    EXPECT_EQ(buffer.size(), context.world_size() > 1 ? 2 : 4);
  };
  run_ranks({2, "shm"}, [&](Context& context) {
    with_checkpointer(context, [](Checkpointer& checkpointer) {
      checkpointer.save(5);
      checkpointer.finish();
    });
  });
  run_ranks({1, ""}, [&](Context& context) {
    with_checkpointer(context, [](Checkpointer& checkpointer) {
      ::testing::internal::CaptureStderr();
      const bool resumed = checkpointer.resume();
      const std::string said = ::testing::internal::GetCapturedStderr();
      EXPECT_TRUE(resumed);
      EXPECT_NE(said.find("saved by 2 ranks and is resumed on 1. Not resumed is each rank's own state of: random "
                          "states, `own`. Resumed from the states of all ranks that saved: `experience`"),
                std::string::npos)
          << said;
    });
  });
}

class ReplayBufferTest : public ::testing::Test {
 protected:
  Context context_{ContextOptions{.announce = false}};
  ReplayBuffer buffer_{columns(), context_, {.capacity = 6, .batch_size = 4}};
};

TEST_F(ReplayBufferTest, TheOldestLeave) {
  std::vector<int64_t> expected;
  int64_t next = 0;
  for (const int64_t count : {0, 4, 1, 3, 6, 2, 11, 5}) {
    buffer_.add(samples(next, count));
    next += count;
    EXPECT_EQ(numbers_in(buffer_), range(std::max<int64_t>(0, next - 6), next));
    EXPECT_EQ(buffer_.size(), std::min<int64_t>(6, next));
    EXPECT_EQ(buffer_.added(), next);
  }
}

TEST_F(ReplayBufferTest, AnotherNumberOfRanksGetsTheSamplesDealtOutByAge) {
  std::vector<StateDict> saved;
  for (const int64_t count : {6, 2, 4}) {
    ReplayBuffer buffer(columns(), context_, {.capacity = 6});
    buffer.add(samples(100 * static_cast<int64_t>(saved.size()), count));
    for (int64_t draw = 0; draw < count; ++draw) static_cast<void>(buffer.sample());
    saved.push_back(buffer.state_dict());
  }
  ReplayBuffer large(columns(), context_, {.capacity = 20});
  large.load_from_ranks(saved);
  EXPECT_EQ(numbers_in(large), (std::vector<int64_t>{0, 1, 2, 200, 3, 201, 4, 100, 202, 5, 101, 203}));
  EXPECT_EQ(large.draws(), 6);
  buffer_.load_from_ranks(saved);
  EXPECT_EQ(numbers_in(buffer_), (std::vector<int64_t>{4, 100, 202, 5, 101, 203})) << "the newest";
}

TEST_F(ReplayBufferTest, SaysWhatIsWrongAndChangesNothing) {
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect(said_by([&] { static_cast<void>(buffer_.sample()); }), "this rank has no samples yet");
  buffer_.add(samples(0, 3));
  expect(said_by([&] { buffer_.add({{"number", at::arange(3)}}); }), "add: 1 column, but the constructor was given 2");
  expect(said_by([&] { buffer_.add({{"number", at::arange(3)}, {"number", at::arange(3)}}); }), "occurs twice");
  expect(said_by([&] { buffer_.add({{"number", at::arange(3)}, {"reward", at::arange(3)}}); }), "no column `reward`");
  expect(said_by([&] {
           buffer_.add({{"number", at::arange(3)}, {"place", at::zeros({4, 2})}});
         }),
         "`place` has 4 samples, and `number` has 3");
  expect(said_by([&] {
           buffer_.add({{"number", at::arange(3)}, {"place", at::zeros({3, 3})}});
         }),
         "are Float [3], but the column's are Float [2]");
  expect(said_by([&] {
           buffer_.add({{"number", at::arange(3)}, {"place", at::zeros({3, 2}, at::kMeta)}});
         }),
         "samples of `place` are on meta, but the column is on cpu");
  expect(said_by([&] { buffer_.add({{"number", at::ones({3})}, {"place", at::zeros({3, 2})}}); }), "Float []");
  expect(said_by([&] { buffer_.add({{"number", at::Tensor()}, {"place", at::zeros({3, 2})}}); }), "first dimension");
  expect(said_by([&] {
           buffer_.add({{"number", at::arange(3)}, {"place", at::zeros({3, 2}).to_sparse()}});
         }),
         "are Float [2] (Sparse), but the column's are Float [2]");
  expect(said_by([&] {
           ReplayBuffer({{"place", at::zeros({2}).to_sparse()}}, context_);
         }),
         "the column `place` has the layout Sparse; give a dense tensor");
  for (const NamedTensors& wrong :
       {NamedTensors{}, {{"", at::empty({2})}}, {{"a", at::Tensor()}}, {{"a", at::empty({2})}, {"a", at::empty({2})}}})
    EXPECT_NE(said_by([&] { ReplayBuffer(wrong, context_); }), "");
  expect(said_by([&] { ReplayBuffer(columns(), context_, {.capacity = 0}); }), "capacity is 0");
  expect(said_by([&] { ReplayBuffer(columns(), context_, {.batch_size = -1}); }), "batch_size is -1");

  const StateDict good = buffer_.state_dict();
  StateDict other = good;
  other.erase("samples.place");
  other.insert("samples.reward", at::zeros({3}));
  const std::string columns_differ = said_by([&] { buffer_.load_state_dict(other); });
  expect(columns_differ, "`place` is missing");
  expect(columns_differ, "`reward` is unknown");
  other = good;
  other["samples.place"] = at::zeros({3, 5});
  expect(said_by([&] { buffer_.load_state_dict(other); }), "`place` is Float [5], expected Float [2]");
  other = good;
  other["samples.place"] = good["samples.place"].to_sparse();
  expect(said_by([&] { buffer_.load_state_dict(other); }), "`place` is Float [2] (Sparse), expected Float [2]");
  other = good;
  other["samples.place"] = at::zeros({4, 2});
  expect(said_by([&] { buffer_.load_from_ranks({good, other}); }), "samples, expected");
  other = good;
  other.erase("draws");
  expect(said_by([&] { buffer_.load_state_dict(other); }), "no number `draws`");
  for (const int64_t added : {int64_t{1}, std::numeric_limits<int64_t>::max()}) {
    other = good;
    other["added"].fill_(added);
    expect(said_by([&] { buffer_.load_state_dict(other); }), "counts of samples and draws do not fit its 3 samples");
    other["added"].fill_(3);  // a StateDict's tensors are shared
  }
  EXPECT_EQ(numbers_in(buffer_), range(0, 3));
  EXPECT_EQ(buffer_.draws(), 0);
}

}  // namespace
}  // namespace lockstep::replay_buffer_test
