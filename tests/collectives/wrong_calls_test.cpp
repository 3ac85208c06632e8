#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <lockstep/distributed_data_parallel.h>
#include <torch/torch.h>

#include "base/clock.h"
#include "collectives/group_state.h"
#include "support/ranks.h"

// Calls that used to end well with wrong numbers: dtypes that differ where data are only moved, buffers that overlap,
// lists of subgroups in another order, tensors that a collective changes although a backward needs them.

namespace lockstep::wrong_calls {
namespace {

using lockstep::testing::Engine;
using lockstep::testing::run_ranks;

class WrongCalls : public ::testing::TestWithParam<Engine> {};
const Engine kTried[] = {{2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}, {3, "hierarchical", "aab"}};
INSTANTIATE_TEST_SUITE_P(Engines, WrongCalls, ::testing::ValuesIn(kTried),
                         [](const auto& instance) { return lockstep::testing::name_of(instance.param); });

std::string text_of_error(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& other) {
    return std::string("another kind of exception: ") + other.what();
  }
  return "no error";
}

std::string lower(std::string text) {
  for (char& letter : text) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  return text;
}

bool has(const std::string& text, const std::string& part) { return lower(text).find(part) != std::string::npos; }

struct Moved {
  const char* name;
  std::function<void(const Group&, const at::Tensor&)> call;
};

const std::vector<Moved>& moves() {
  static const std::vector<Moved> kMoves{
      {"broadcast", [](const Group& group, const at::Tensor& data) { group.broadcast(data); }},
      {"broadcast_async", [](const Group& group, const at::Tensor& data) { group.broadcast_async(data).wait(); }},
      {"all_gather", [](const Group& group, const at::Tensor& data) { (void)group.all_gather(data); }},
      {"gather", [](const Group& group, const at::Tensor& data) { (void)group.gather(data); }},
      {"scatter",
       [](const Group& group, const at::Tensor& data) {
         group.scatter(data, at::stack(std::vector<at::Tensor>(static_cast<size_t>(group.world_size()), data)));
       }},
      {"all_to_all",
       [](const Group& group, const at::Tensor& data) {
         (void)group.all_to_all(at::stack(std::vector<at::Tensor>(static_cast<size_t>(group.world_size()), data)));
       }},
  };
  return kMoves;
}

void expect_dtypes_named(Context& context, at::ScalarType odd, const std::string& odd_name, at::ScalarType rest,
                         const std::string& rest_name) {
  const int last = context.world_size() - 1;
  for (const Moved& move : moves()) {
    const Group group = context.group().split(0);
    const bool is_odd = context.rank() == last;
    const at::Tensor data = at::ones({600}, is_odd ? odd : rest);
    const auto started = Clock::now();
    const std::string text = text_of_error([&] {
      move.call(group, data);
      group.barrier();  // a rank that only sends is told by its next operation
    });
    EXPECT_LT(seconds_since(started), 5) << move.name;
    const bool named = has(text, odd_name) && has(text, rest_name);
    EXPECT_TRUE(named || has(text, "where the ranks are"))
        << move.name << " on rank " << context.rank() << ": " << text;
    EXPECT_TRUE(named || !is_odd) << move.name << ": " << text;
    context.group().barrier();
  }
}

TEST_P(WrongCalls, DtypesOfOneSizeAreToldApartWhereDataAreMoved) {
  run_ranks(GetParam(), [&](Context& context) {
    expect_dtypes_named(context, at::kInt, "int32", at::kFloat, "float32");
    expect_dtypes_named(context, at::kBFloat16, "bfloat16", at::kHalf, "float16");
  });
}

TEST_P(WrongCalls, DtypesThatCannotBeReducedAreToldApartToo) {
  run_ranks(GetParam(), [](Context& context) {
    expect_dtypes_named(context, at::kFloat8_e5m2, "float8_e5m2", at::kByte, "uint8");
    const at::Tensor right = at::full({5}, context.rank(), at::kInt).view(at::kFloat).to(at::kFloat8_e4m3fn);
    EXPECT_EQ(context.group().all_gather(right).scalar_type(), at::kFloat8_e4m3fn);
  });
}

TEST_P(WrongCalls, AMessageOfAnotherDtypeIsRefusedByItsReceiver) {
  run_ranks(GetParam(), [](Context& context) {
    const int last = context.world_size() - 1;
    const Group group = context.group().split(0);
    if (context.rank() == 0) (void)text_of_error([&] { group.send(at::ones({4}), last, 7); });
    if (context.rank() == last) {
      const at::Tensor into = at::zeros({4}, at::kInt);
      const std::string text = text_of_error([&] { group.recv(into, 0, 7); });
      EXPECT_TRUE(has(text, "4 elements of float32 sent, 4 of int32 expected (tag 7)") ||
                  has(text, "4 elements of float32 sent, 4 elements of int32 expected (tag 7)"))
          << text;
    }
    context.group().barrier();
  });
}

TEST_P(WrongCalls, BuffersThatOverlapAreRefused) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    const int n = context.world_size(), me = context.rank();
    const at::Tensor rows = at::zeros({n, 4}), more = at::zeros({(n + 1) * 4});
    EXPECT_THROW(group.all_to_all_async(rows, rows).wait(), c10::Error);
    EXPECT_THROW(group.all_to_all_async(more.narrow(0, 4, n * 4).view({n, 4}), more.narrow(0, 0, n * 4).view({n, 4})),
                 c10::Error);
    EXPECT_THROW(group.all_gather_into_tensor(rows, rows[(me + 1) % n]), c10::Error);
    EXPECT_THROW(group.all_gather_into_tensor(rows.view({-1}), rows.view({-1}).narrow(0, 2, 4)), c10::Error);
    if (me == 0) {
      EXPECT_THROW((void)group.gather_async(rows, rows[1]), c10::Error);
      EXPECT_THROW((void)group.scatter_async(rows[1], rows), c10::Error);
    }
    EXPECT_THROW(group.reduce_scatter_tensor(rows[(me + 1) % n], rows), c10::Error);
    EXPECT_THROW(group.all_reduce(at::zeros({1}).expand({4})), c10::Error);
    EXPECT_THROW(group.broadcast(at::zeros({1}).expand({4})), c10::Error);
    // What is in place is right, and nothing was sent before.
    rows[me].fill_(me + 1);
    group.all_gather_into_tensor(rows, rows[me]);
    for (int r = 0; r < n; ++r) EXPECT_EQ(rows[r][3].item<float>(), static_cast<float>(r + 1));
  });
}

/// What torch.distributed hands to an engine of ours does not pass through Group.
TEST_P(WrongCalls, TheEngineItselfRefusesBuffersThatOverlap) {
  if (GetParam().backend == "gloo") return;  // not ours: Group alone uses it
  run_ranks(GetParam(), [](Context& context) {
    const int n = context.world_size(), me = context.rank(), next = (me + 1) % n;
    c10d::Backend& engine = *state_of(context.group()).backend;
    using Tensors = std::vector<at::Tensor>;
    at::Tensor rows = at::zeros({n, 4}), wrong = rows[next], own = rows[me], other = at::zeros({4}),
               folded = at::zeros({1}).expand({4});
    std::vector<int64_t> even;
    Tensors one{other}, few{folded}, all = rows.unbind(), same(static_cast<size_t>(n), other);
    std::vector<Tensors> into{all}, into_same{same};
    EXPECT_THROW(engine._allgather_base(rows, wrong, {}), c10::Error);
    EXPECT_THROW(engine._reduce_scatter_base(wrong, rows, {}), c10::Error);
    EXPECT_THROW(engine.alltoall_base(rows, rows, even, even, {}), c10::Error);
    EXPECT_THROW(engine.allgather(into_same, one, {}), c10::Error);
    Tensors wrong_one{wrong}, own_one{own};
    EXPECT_THROW(engine.allgather(into, wrong_one, {}), c10::Error);
    EXPECT_THROW(engine.reduce_scatter(wrong_one, into, {}), c10::Error);
    Tensors turned = all;
    std::rotate(turned.begin(), turned.begin() + 1, turned.end());
    EXPECT_THROW(engine.alltoall(turned, all, {}), c10::Error);
    if (me == 0) {
      EXPECT_THROW(engine.gather(into, wrong_one, {}), c10::Error);
      EXPECT_THROW(engine.scatter(wrong_one, into, {}), c10::Error);
    }
    EXPECT_THROW(engine.allreduce(few, {}), c10::Error);
    EXPECT_THROW(engine.recv(few, next, 0), c10::Error);
    own.fill_(me + 1);
    engine.allgather(into, own_one, {})->wait();  // in place, and nothing was sent before
    for (int r = 0; r < n; ++r) EXPECT_EQ(rows[r][3].item<float>(), static_cast<float>(r + 1));
  });
}

TEST_P(WrongCalls, TheRootOfAReduceNeedsMemoryForEveryElement) {
  run_ranks(GetParam(), [](Context& context) {
    const at::Tensor folded = at::ones({1}).expand({4});
    if (context.rank() == 0) {
      EXPECT_THROW(context.group().reduce(folded), c10::Error);
    }
    const at::Tensor sum = context.rank() == 0 ? at::ones({4}) : folded;  // the others only read theirs
    context.group().reduce(sum);
    EXPECT_EQ(sum[3].item<float>(), context.rank() == 0 ? static_cast<float>(context.world_size()) : 1.0f);
  });
}

TEST_P(WrongCalls, AllToAllOfTwoDtypesOnOneRankIsRefused) {
  run_ranks(GetParam(), [](Context& context) {
    const int n = context.world_size();
    EXPECT_THROW(context.group().all_to_all_async(at::zeros({n}, at::kInt), at::zeros({n})).wait(), c10::Error);
  });
}

TEST_P(WrongCalls, ListsOfSubgroupsInAnotherOrderAreNamedAtOnce) {
  run_ranks(GetParam(), [](Context& context) {
    const bool is_last = context.rank() == context.world_size() - 1;
    const auto started = Clock::now();
    const std::vector<int> list = is_last ? std::vector<int>{1, 0} : std::vector<int>{0, 1};
    const std::string text = text_of_error([&] { (void)context.group().subgroup(list); });
    EXPECT_LT(seconds_since(started), 5);
    for (const char* part : {"{0, 1}", "{1, 0}", "different lists"}) EXPECT_TRUE(has(text, part)) << text;
    // The group goes on.
    EXPECT_TRUE(context.group().subgroup({0, 1}).has_value() == (context.rank() < 2));
    context.group().barrier();
  });
}

TEST_P(WrongCalls, SplitMakesAGroupForEachColor) {
  run_ranks(GetParam(), [](Context& context) {
    const int n = context.world_size(), me = context.rank();
    const Group part = context.group().split(me % 2);
    EXPECT_EQ(part.world_size(), (n + 1 - me % 2) / 2);
    EXPECT_EQ(part.rank(), me / 2);
    const at::Tensor sum = at::ones({3});
    part.all_reduce(sum);
    EXPECT_EQ(sum[2].item<float>(), static_cast<float>(part.world_size()));
    const Group here = context.group().on_this_machine();
    const bool together = context.group().backend() != "hierarchical";
    EXPECT_EQ(here.world_size(), together ? n : me == n - 1 ? 1 : n - 1);
  });
}

TEST_P(WrongCalls, ABackwardThatNeedsWhatACollectiveChangedIsRefused) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    const auto backward_after = [&](const std::function<void(const at::Tensor&)>& change) {
      const at::Tensor weight = torch::ones({4}, torch::requires_grad()), saved = at::full({4}, 2.0);
      const at::Tensor loss = (weight * saved).sum();
      change(saved);
      loss.backward();
    };
    EXPECT_NO_THROW(backward_after([&](const at::Tensor& saved) { group.all_reduce(saved.clone()); }));
    EXPECT_THROW(backward_after([&](const at::Tensor& saved) { group.all_reduce(saved); }), c10::Error);
    EXPECT_THROW(backward_after([&](const at::Tensor& saved) { group.all_reduce_async(saved).wait(); }), c10::Error);
  });
}

struct Described {
  std::string before, after;  ///< the number of elements, in the call's description
  std::function<void(const Group&, const at::Tensor&)> call;
};

TEST_P(WrongCalls, ACallIsDescribedInOneWayWhereverItIsNamed) {
  run_ranks(GetParam(), [](Context& context) {
    const int n = context.world_size();
    const Described calls[] = {
        {"all_reduce(float64, ", " elements, sum)",
         [](const Group& group, const at::Tensor& one) { group.all_reduce(one); }},
        {"all_gather(float64, ", " elements)",
         [](const Group& group, const at::Tensor& one) { (void)group.all_gather(one); }},
        {"broadcast(float64, ", " elements, root 0)",
         [](const Group& group, const at::Tensor& one) { group.broadcast(one); }},
        {"reduce(float64, ", " elements, sum, root 0)",
         [](const Group& group, const at::Tensor& one) { group.reduce(one); }},
        {"gather(float64, ", " elements, root 0)",
         [](const Group& group, const at::Tensor& one) { (void)group.gather(one); }},
        {"reduce_scatter(float64, ", " elements, sum)",
         [n](const Group& group, const at::Tensor& one) {
           (void)group.reduce_scatter(one.repeat({n, 1}));
         }},
        {"all_to_all(float64, ", " elements)",
         [n](const Group& group, const at::Tensor& one) {
           (void)group.all_to_all(one.repeat({n, 1}));
         }},
    };
    for (const Described& described : calls) {
      const Group group = context.group().split(0);
      const int64_t elements = context.rank() == n - 1 ? 513 : 512;
      const std::string text = text_of_error([&] {
        described.call(group, at::ones({elements}, at::kDouble));
        group.barrier();  // a rank that only sends is told by its next operation
      });
      for (const char* number : {"512", "513"})
        EXPECT_TRUE(has(text, described.before + number + described.after)) << text;
      const std::string arguments = described.before.substr(described.before.find('(')) + std::to_string(elements);
      EXPECT_TRUE(text.rfind("barrier #", 0) == 0 || has(text, arguments + described.after + " failed on")) << text;
      for (const char* word : {"double", " bytes)"}) EXPECT_FALSE(has(text, word)) << text;
      context.group().barrier();
    }
  });
}

/// Rank 1 expects three rows from rank 0, which sends two; or rank 0 sends itself fewer than it expects. The first is
/// too much for Gloo's own all_to_all to notice.
TEST_P(WrongCalls, SplitsThatDoNotMatchMoveNothing) {
  run_ranks(GetParam(), [](Context& context) {
    const int n = context.world_size(), me = context.rank();
    const auto last = static_cast<size_t>(n - 1);
    const auto refused = [&](const std::vector<int64_t>& sends, const std::vector<int64_t>& receives, int width,
                             const std::string& said) {
      const Group group = context.group().split(0);
      const at::Tensor input = at::full({2 * n, width}, 7.0, at::kDouble);
      int64_t rows = 0;
      for (const int64_t one : receives) rows += one;
      at::Tensor output = at::full({rows, width}, -1.0, at::kDouble);
      const auto begin = Clock::now();
      const std::string text = text_of_error([&] { group.all_to_all_async(output, input, sends, receives).wait(); });
      EXPECT_TRUE(has(text, "all_to_all")) << text;
      EXPECT_TRUE(has(text, said)) << text;
      EXPECT_TRUE(has(text, "nothing was moved")) << text;
      EXPECT_LT(seconds_since(begin), 5.0) << text;
      EXPECT_TRUE(output.eq(-1.0).all().item<bool>());
      context.group().barrier();
    };
    const std::vector<int64_t> two(static_cast<size_t>(n), 2);
    std::vector<int64_t> receives = two, sends = two;
    if (me == 1) receives[0] = 3;
    refused(two, receives, 1, "rank 0 sends 2 elements to rank 1, which expects 3");
    refused(two, receives, 3, "rank 0 sends 6 elements to rank 1, which expects 9");
    if (me == 0) sends[0] = 1, sends[last] = 3;
    refused(sends, two, 1, ", which expects 2");  // of two pairs, shared memory names the first that it finds
    refused(two, two, me == 0 ? 2 : 1, "rank 0 sends 4 elements to rank ");
  });
}

TEST_P(WrongCalls, SplitsThatNoTensorHas) {
  run_ranks(GetParam(), [](Context& context) {
    const Group group = context.group();
    const int64_t n = group.world_size(), most = std::numeric_limits<int64_t>::max();
    const at::Tensor input = at::zeros({n});
    const std::vector<int64_t> one(static_cast<size_t>(n), 1);
    std::vector<int64_t> negative = one, huge(static_cast<size_t>(n), most);
    negative[0] = -1, negative[1] = 3;
    const auto said = [&](const std::vector<int64_t>& sends, const std::vector<int64_t>& receives) {
      return text_of_error([&] { (void)group.all_to_all(input, sends, receives); });
    };
    EXPECT_TRUE(has(said(negative, one), "the splits of the input, [-1, 3"));
    EXPECT_TRUE(has(said(one, negative), "the splits of the output, [-1, 3"));
    EXPECT_TRUE(has(said(one, huge), "are not all numbers of rows"));
  });
}

struct Writing {
  const char* name;
  std::function<void(const Group&, const at::Tensor& one, const at::Tensor& rows)> call;
  bool writes_one, writes_rows;  ///< on the rank that it writes on: all, but root 0 alone or all but it
  enum { kEverywhere, kOnRoot, kElsewhere } where = kEverywhere;
};

const std::vector<Writing>& writings() {
  using T = const at::Tensor&;
  static const std::vector<Writing> kWritings{
      {"all_reduce", [](const Group& g, T one, T) { g.all_reduce(one); }, true, false},
      {"all_reduce_async", [](const Group& g, T one, T) { g.all_reduce_async(one).wait(); }, true, false},
      {"broadcast", [](const Group& g, T one, T) { g.broadcast(one); }, true, false, Writing::kElsewhere},
      {"broadcast_async", [](const Group& g, T one, T) { g.broadcast_async(one).wait(); }, true, false,
       Writing::kElsewhere},
      {"reduce", [](const Group& g, T one, T) { g.reduce(one); }, true, false, Writing::kOnRoot},
      {"all_gather_into_tensor", [](const Group& g, T one, T rows) { g.all_gather_into_tensor(rows, one); }, false,
       true},
      {"all_gather_async", [](const Group& g, T one, T rows) { g.all_gather_async(rows, one).wait(); }, false, true},
      {"gather_async", [](const Group& g, T one, T rows) { g.gather_async(rows, one).wait(); }, false, true,
       Writing::kOnRoot},
      {"scatter_async", [](const Group& g, T one, T rows) { g.scatter_async(one, rows).wait(); }, true, false},
      {"reduce_scatter_tensor", [](const Group& g, T one, T rows) { g.reduce_scatter_tensor(one, rows); }, true, false},
      {"reduce_scatter_async", [](const Group& g, T one, T rows) { g.reduce_scatter_async(one, rows).wait(); }, true,
       false},
      {"all_to_all_async", [](const Group& g, T, T rows) { g.all_to_all_async(rows, rows.clone()).wait(); }, false,
       true},
      {"send and recv",
       [](const Group& g, T one, T) {
         for (int peer = 1; peer < g.world_size(); ++peer)
           if (g.rank() == 0) g.send(one, peer);
         if (g.rank() != 0) g.recv(one, 0);
       },
       true, false, Writing::kElsewhere},
      {"send_async and recv_async",
       [](const Group& g, T one, T) {
         for (int peer = 1; peer < g.world_size(); ++peer)
           if (g.rank() == 0) g.send_async(one, peer).wait();
         if (g.rank() != 0) g.recv_async(one, 0).wait();
       },
       true, false, Writing::kElsewhere},
  };
  return kWritings;
}

TEST_P(WrongCalls, WhatACollectiveWritesHasANewVersionAndWhatItReadsHasNot) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    for (const Writing& writing : writings()) {
      SCOPED_TRACE(writing.name);
      const at::Tensor one = at::ones({4}), rows = at::ones({group.world_size(), 4});
      const auto before_one = one._version(), before_rows = rows._version();
      writing.call(group, one, rows);
      const bool here =
          writing.where == Writing::kEverywhere || (writing.where == Writing::kOnRoot) == (group.rank() == 0);
      EXPECT_EQ(one._version() > before_one, here && writing.writes_one);
      EXPECT_EQ(rows._version() > before_rows, here && writing.writes_rows);
    }
  });
}

TEST_P(WrongCalls, OfAGroupWhoseContextIsGone) {
  run_ranks(GetParam(), [](Context& context) {
    const Group group = context.group(), part = group.split(0);
    { const Context gone = std::move(context); }
    const auto expect_refused = [](const char* operation, const std::function<void()>& call) {
      const auto start = Clock::now();
      EXPECT_EQ(text_of_error(call), std::string(operation) +
                                         ": this rank has left the group, because its Context was destroyed; let the "
                                         "Context outlive everything that uses its groups");
      EXPECT_LT(seconds_since(start), 5) << operation;
    };
    for (const Group& left : {group, part}) {
      expect_refused("all_reduce", [&] { left.all_reduce(at::ones({3})); });
      expect_refused("all_reduce", [&] { left.all_reduce_async(at::ones({3})).wait(); });
      expect_refused("barrier", [&] { left.barrier(); });
      expect_refused("all_gather_bytes", [&] { (void)left.all_gather_bytes("one"); });
      expect_refused("send", [&] { left.send(at::ones({3}), left.rank() == 0 ? 1 : 0); });
      expect_refused("subgroup", [&] { (void)left.subgroup({0}); });
    }
  });
}

}  // namespace
}  // namespace lockstep::wrong_calls
