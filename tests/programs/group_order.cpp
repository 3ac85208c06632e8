// Several groups that ranks use in different orders, and programs that only look like that: group_order WHAT [BACKEND].

#include <chrono>
#include <cstring>
#include <iostream>
#include <optional>
#include <string>
#include <thread>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace {

using lockstep::Context;
using lockstep::Group;

bool is(const char* word, const char* other) { return std::strcmp(word, other) == 0; }

/// Longer than a cycle of groups is borne.
void be_late() { std::this_thread::sleep_for(std::chrono::seconds(12)); }

/// Throws if the sum is wrong.
void sum(const Group& group) {
  const at::Tensor one = at::ones({4});
  group.all_reduce(one);
  TORCH_CHECK(one[3].item<float>() == static_cast<float>(group.world_size()));
}

/// The group of all ranks and one of the same ranks, in another order on rank 0.
void use_two_groups(const Context& context) {
  const Group& all = context.group();
  const Group same = all.split(0);
  sum(all), sum(same), sum(all);
  sum(context.is_main() ? all : same);
  sum(context.is_main() ? same : all);
}

/// Rank r begins with the group of itself and the next rank.
void go_round(const Context& context) {
  std::optional<Group> pairs[3];
  for (int first = 0; first < 3; ++first) pairs[first] = context.group().subgroup({first, (first + 1) % 3});
  const int rank = context.rank();
  sum(*pairs[rank]);
  sum(*pairs[(rank + 2) % 3]);
}

/// Each rank starts one collective and waits for the other one first.
void start_and_cross(const Context& context) {
  const Group a = context.group().split(0), b = context.group().split(0);
  const at::Tensor one = at::ones({4});
  const lockstep::Work started = (context.is_main() ? a : b).all_reduce_async(one);
  sum(context.is_main() ? b : a);
  started.wait();
}

/// Rank 1 waits for rank 0, which is late, and rank 2 for rank 1.
void wait_in_a_row(const Context& context) {
  const auto first = context.group().subgroup({0, 1}), second = context.group().subgroup({1, 2});
  if (context.rank() == 0) be_late();
  if (first) sum(*first);
  if (second) sum(*second);
}

/// Rank 1 waits in a collective that rank 2 calls later, after one that rank 1 calls later. In shared memory a
/// collective begins with the calls of all ranks; elsewhere rank 1 may get what it needs from the root, or need
/// nothing.
void use_a_root(const Context& context, const char* what) {
  const Group& all = context.group();
  const auto last = all.subgroup({1, 2});
  const at::Tensor one = at::ones({4});
  if (context.rank() == 2) sum(*last);
  if (is(what, "broadcast")) all.broadcast(one, 0);
  if (is(what, "reduce")) all.reduce(one, 0);
  if (is(what, "gather")) all.gather(one, 0);
  if (context.rank() == 1) sum(*last);
}

/// Rank 0, the root, is alone in a broadcast; the others are in another group.
void be_alone_at_the_root(const Context& context) {
  const Group& all = context.group();
  const Group same = all.split(0);
  const at::Tensor one = at::ones({4});
  if (!context.is_main()) sum(same);
  all.broadcast(one, 0);
  if (context.is_main()) sum(same);
}

/// Rank 0 waits in one group while a thread of its own, which has called none, comes late to the other.
void use_a_helper(const Context& context) {
  const Group a = context.group().split(0), b = context.group().split(0);
  std::thread helper;
  if (context.is_main())
    helper = std::thread([&] {
      be_late();
      sum(b);
    });
  else
    sum(b);
  sum(a);
  if (helper.joinable()) helper.join();
}

/// Two threads with a group each. On each rank another one of them is late, and sleeps.
void use_two_threads(const Context& context, bool in_main) {
  const Group a = context.group().split(0), b = context.group().split(0);
  const auto use = [&](const Group& group, bool late) {
    if (late) be_late();
    sum(group);
  };
  std::thread second([&] { use(b, context.is_main()); });
  if (in_main) {
    use(a, !context.is_main());
  } else {
    std::thread first([&] { use(a, !context.is_main()); });
    first.join();
  }
  second.join();
}

}  // namespace

int main(int argc, char** argv) {
  const char* what = argv[1];
  const Context context(argc, argv, {.backend = argc > 2 ? argv[2] : "", .announce = false});
  if (is(what, "two")) use_two_groups(context);
  if (is(what, "ring")) go_round(context);
  if (is(what, "crossed")) start_and_cross(context);
  if (is(what, "row")) wait_in_a_row(context);
  if (is(what, "broadcast") || is(what, "reduce") || is(what, "gather")) use_a_root(context, what);
  if (is(what, "alone")) be_alone_at_the_root(context);
  if (is(what, "helper")) use_a_helper(context);
  if (is(what, "threads")) use_two_threads(context, false);
  if (is(what, "thread_and_main")) use_two_threads(context, true);
  context.group().barrier();
  std::cout << "rank " << context.rank() << " is done" << std::endl;
}
