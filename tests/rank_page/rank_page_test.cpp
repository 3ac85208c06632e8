#include "rank_page/rank_page.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <optional>
#include <thread>

#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"
#include "rank_page/wait_on_page.h"

namespace lockstep {
namespace {

void start(RankPage& page, uint64_t sequence, const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  page.start_operation(sequence, "all_reduce", "Float", elements, shape.data(), shape.size(), Clock::now());
}

TEST(RankPage, TellsTheLastOperation) {
  const auto page = std::make_unique<RankPage>();
  EXPECT_EQ(page->read(2).operation.text(), "none");
  start(*page, 12, {64, 10});
  page->set_waits_for(6);
  RankStatus account = page->read(2);
  EXPECT_EQ(account.operation.text(), "all_reduce #12 (Float [64, 10])");
  EXPECT_EQ(account.operation.elements, 640);
  EXPECT_TRUE(account.operation.running);
  EXPECT_EQ(account.waits_for, 6U);
  EXPECT_LT(seconds_since(account.operation.started), 60);
  page->finish_operation(11);
  EXPECT_TRUE(page->read(2).operation.running) << "an earlier one is over";
  page->finish_operation(12);
  account = page->read(2);
  EXPECT_FALSE(account.operation.running);
  EXPECT_EQ(account.waits_for, 0U);
  start(*page, 13, {2, 3, 4, 5, 6, 7, 8, 9});
  EXPECT_EQ(page->read(2).operation.shape.size(), RankPage::kShownDimensions);
  page->start_operation(14, "a name that is far too long", "", 1, nullptr, 0, Clock::now());
  EXPECT_EQ(page->read(2).operation.text(), "a name that is  #14");
}

TEST(RankPage, SaysWhatAnOperationIsFor) {
  const auto page = std::make_unique<RankPage>();
  const int64_t shape[] = {7};
  const auto text_of = [&](std::string_view of, const char* dtype) {
    page->start_operation(12, "all_reduce", dtype, 7, shape, 1, Clock::now(), of);
    return page->read(1).operation.text();
  };
  EXPECT_EQ(text_of("bucket 1 of 2 (a to b)", "Float"), "all_reduce #12 (Float [7]) of bucket 1 of 2 (a to b)");
  EXPECT_EQ(text_of("the buffers", ""), "all_reduce #12 of the buffers");
  EXPECT_EQ(text_of("", "Float"), "all_reduce #12 (Float [7])") << "nothing of the one before";
  text_of(std::string(300, 'x'), "Float");
  EXPECT_EQ(page->read(1).operation.of, std::string(127, 'x'));
}

TEST(RankPage, SaysInWhichGroupARankWaits) {
  const auto page = std::make_unique<RankPage>();
  const int all = page->add_group(5, 7, ""), some = page->add_group(9, 5, "subgroup 0");
  const int64_t shape[] = {7};
  page->start_operation(3, "all_reduce", "Float", 7, shape, 1, Clock::now(), "a bucket", some);
  page->note_collective(some, 4);
  page->begin_wait(some, {.sequence = 3, .collective = 4, .needs = 5});
  RankStatus account = page->read(3);
  EXPECT_EQ(account.operation.text(), "all_reduce #3 (Float [7]) in subgroup 0 (ranks 0, 2) of a bucket");
  EXPECT_TRUE(account.waiting);
  EXPECT_EQ(account.awaited.group, 9u);
  EXPECT_EQ(account.awaited.group, account.operation.group_id);
  EXPECT_EQ(account.awaited.sequence, 3u);
  EXPECT_EQ(account.awaited.collective, 4u);
  EXPECT_EQ(account.awaited.needs, 5u);
  ASSERT_EQ(account.groups.size(), 2u);
  EXPECT_EQ(account.groups[0].text(), "the group of all ranks");
  EXPECT_EQ(account.groups[1].collectives, 4u);
  page->set_waiting(false);
  EXPECT_EQ(page->read(3).awaited.group, 0u);
  page->remove_group(some);
  account = page->read(3);
  EXPECT_EQ(account.groups.size(), 1u);
  EXPECT_EQ(account.operation.text(), "all_reduce #3 (Float [7]) of a bucket");
  page->start_operation(4, "all_reduce", "Float", 7, shape, 1, Clock::now(), "", all);
  EXPECT_EQ(page->read(3).operation.text(), "all_reduce #4 (Float [7])");
  EXPECT_EQ(page->read(3).operation.group_id, 5u);
  int places = 1;
  while (page->add_group(20, 1, "another") != RankPage::kNoGroup) ++places;
  EXPECT_EQ(places, RankPage::kShownGroups);
  page->begin(::getpid());
  EXPECT_TRUE(page->read(3).groups.empty()) << "of the program before";
}

TEST(RankPage, KnowsWhetherOneThreadAloneCalls) {
  const auto page = std::make_unique<RankPage>();
  EXPECT_FALSE(page->read(1).has_one_caller) << "nobody has called";
  const int place = page->add_group(5, 1, "");
  start(*page, 1, {});
  page->begin_wait(place, {});
  EXPECT_TRUE(page->read(1).has_one_caller);
  std::thread([&] { start(*page, 2, {}); }).join();
  EXPECT_FALSE(page->read(1).has_one_caller);
  start(*page, 3, {});
  EXPECT_FALSE(page->read(1).has_one_caller) << "until it is known that no other can";
  page->note_only_caller(thread_number());
  start(*page, 4, {});
  EXPECT_TRUE(page->read(1).has_one_caller);
  std::thread([&] { start(*page, 5, {}); }).join();
  EXPECT_FALSE(page->read(1).has_one_caller);
}

TEST(RankPage, KnowsTheOneThreadThatWaits) {
  EXPECT_EQ(WaitOnPage::only_waiting_thread(), std::nullopt);
  {
    const WaitOnPage first(RankPage::kNoGroup, {}), within(RankPage::kNoGroup, {});
    EXPECT_EQ(WaitOnPage::only_waiting_thread(), thread_number());
    std::thread([] {
      const WaitOnPage second(RankPage::kNoGroup, {});
      EXPECT_EQ(WaitOnPage::only_waiting_thread(), std::nullopt);
    }).join();
    EXPECT_EQ(WaitOnPage::only_waiting_thread(), thread_number());
  }
  EXPECT_EQ(WaitOnPage::only_waiting_thread(), std::nullopt);
  std::thread([] {
    const WaitOnPage only(RankPage::kNoGroup, {});
    EXPECT_EQ(WaitOnPage::only_waiting_thread(), thread_number()) << "in the place of a thread that has ended";
  }).join();
}

// A helper thread's barrier ended the wait of the main thread on the page, and the launcher took a hang for work.
TEST(RankPage, AThreadThatStillWaitsShowsItsWaitAgain) {
  RankPage& page = own_page();
  const int place = page.add_group(5, 3, "subgroup 0"), other = page.add_group(6, 3, "subgroup 1");
  std::optional<WaitOnPage> first;
  first.emplace(place, RankStatus::Awaited{.sequence = 4, .collective = 5, .needs = 3});
  std::thread([&] {
    start(page, 9, {1});
    const WaitOnPage second(other, {.sequence = 9, .collective = 10, .needs = 3});
    EXPECT_EQ(page.read(2).awaited.group, 6u);
    page.finish_operation(9);
  }).join();
  EXPECT_FALSE(page.read(2).waiting);
  std::thread([] { WaitOnPage::show_again(); }).join();
  EXPECT_FALSE(page.read(2).waiting) << "that thread waits for nothing";
  std::thread([] { WaitOnPage::show_any(); }).join();
  EXPECT_EQ(page.read(2).awaited.group, 5u) << "another thread may show it";
  page.set_waiting(false);
  WaitOnPage::show_again();
  const RankStatus account = page.read(2);
  EXPECT_TRUE(account.waiting) << "the first thread still waits";
  EXPECT_EQ(account.awaited.group, 5u);
  EXPECT_EQ(account.awaited.sequence, 4u);
  EXPECT_EQ(account.awaited.collective, 5u);
  EXPECT_EQ(account.awaited.needs, 3u);
  first.reset();
  WaitOnPage::show_again();
  EXPECT_FALSE(page.read(2).waiting);
  for (const int taken : {place, other}) page.remove_group(taken);
}

TEST(RankPage, LabelsNest) {
  EXPECT_EQ(OperationLabel::current(), "");
  const OperationLabel outer("a checkpoint");
  {
    const OperationLabel inner("the buffers");
    EXPECT_EQ(OperationLabel::current(), "the buffers");
    std::thread([] { EXPECT_EQ(OperationLabel::current(), ""); }).join();
  }
  EXPECT_EQ(OperationLabel::current(), "a checkpoint");
}

TEST(RankPage, TheFirstFailureStays) {
  const auto page = std::make_unique<RankPage>();
  EXPECT_EQ(page->read(3).failure, RankFailure::kNone);
  page->fail(RankFailure::kPeer, 2, "rank 2 ended");
  page->fail(RankFailure::kOwn, -1, "and so I did");
  const RankStatus account = page->read(3);
  EXPECT_EQ(account.failure, RankFailure::kPeer);
  EXPECT_EQ(account.peer, 2);
  EXPECT_EQ(account.failure_text, "rank 2 ended");
  EXPECT_EQ(page->read(2).peer, -1) << "there is no such rank";
  const auto long_winded = std::make_unique<RankPage>();
  long_winded->fail(RankFailure::kOwn, -1, std::string(5000, 'x'));
  EXPECT_EQ(long_winded->read(1).failure_text, std::string(1023, 'x'));
  EXPECT_EQ(long_winded->read(1).peer, -1);
}

TEST(RankPage, AnExceptionGivesItsWordsToAFailureWithoutAny) {
  // A destructor sees that an exception passes; only the handler knows its text, which was lost.
  const auto page = std::make_unique<RankPage>();
  page->fail(RankFailure::kOwn, -1, "");
  EXPECT_FALSE(page->read(2).uncaught);
  page->fail_by_exception("out of range", /*uncaught=*/true);
  page->fail_by_exception("another", /*uncaught=*/false);
  RankStatus account = page->read(2);
  EXPECT_EQ(account.failure, RankFailure::kOwn);
  EXPECT_EQ(account.failure_text, "out of range");
  EXPECT_TRUE(account.uncaught);
  const auto victim = std::make_unique<RankPage>();
  victim->fail(RankFailure::kPeer, 1, "");
  victim->fail_by_exception("all_reduce failed", /*uncaught=*/false);
  account = victim->read(2);
  EXPECT_EQ(account.failure, RankFailure::kPeer) << "the first cause stays";
  EXPECT_EQ(account.failure_text, "");
}

TEST(RankPage, AHeartbeatIsABeat) {
  const auto page = std::make_unique<RankPage>();
  const uint64_t beats = page->read(1).beats;
  page->note_error(RankFailure::kStorage, -1, "cannot write y");
  page->heartbeat();
  page->heartbeat();
  const RankStatus account = page->read(1);
  EXPECT_EQ(account.beats, beats + 2);
  EXPECT_EQ(account.heartbeats, 2U);
  EXPECT_LT(seconds_since(account.last_heartbeat), 60);
  EXPECT_FALSE(account.error_is_last) << "the program went on";
}

TEST(RankPage, SaysWhetherAndHowLongItMayWait) {
  const auto page = std::make_unique<RankPage>();
  start(*page, 5, {7});
  start(*page, 6, {7});
  page->finish_operation(6);
  page->set_waiting(true);  // for the first of them
  page->set_waits_for(2);
  RankStatus account = page->read(2);
  EXPECT_TRUE(account.waiting);
  EXPECT_EQ(account.waits_for, 2U);
  page->set_waiting(false);
  EXPECT_FALSE(page->read(2).waiting);
  start(*page, 7, {7});
  EXPECT_EQ(page->read(2).waits_for, 0U) << "it is over";
  EXPECT_EQ(page->read(2).collective_timeout.count(), 0) << "not told";
  page->set_collective_timeout(std::chrono::seconds(90));
  EXPECT_EQ(page->read(2).collective_timeout, std::chrono::seconds(90));
}

TEST(RankPage, AnErrorCountsUntilSomethingIsDone) {
  const auto page = std::make_unique<RankPage>();
  EXPECT_EQ(page->read(1).at_end().failure, RankFailure::kNone);
  page->note_error(RankFailure::kInput, -1, "data folder 'x' is not there");
  EXPECT_EQ(page->read(1).failure, RankFailure::kNone) << "it may be caught";
  EXPECT_EQ(page->read(1).at_end().failure, RankFailure::kInput);
  EXPECT_EQ(page->read(1).at_end().failure_text, "data folder 'x' is not there");
  page->note_error(RankFailure::kStorage, -1, "cannot write y");
  EXPECT_EQ(page->read(1).at_end().failure, RankFailure::kStorage) << "the last one";
  EXPECT_TRUE(page->error_is_last());
  page->count_step();
  EXPECT_FALSE(page->error_is_last());
  EXPECT_EQ(page->read(1).at_end().failure, RankFailure::kNone) << "it was caught, and training went on";
  page->renew_error();
  EXPECT_EQ(page->read(1).at_end().failure, RankFailure::kStorage);
  start(*page, 1, {1});
  EXPECT_EQ(page->read(1).at_end().failure, RankFailure::kNone);
  page->renew_error();
  page->stop_calls().fetch_add(1);
  EXPECT_EQ(page->read(1).at_end().failure, RankFailure::kNone);
}

TEST(RankPage, OfAnExceptionTheWordsTellWhetherItWasTheError) {
  const auto page = std::make_unique<RankPage>();
  page->note_error(RankFailure::kInput, -1, "it is damaged");
  page->count_step();
  page->fail(RankFailure::kOwn, -1, "cannot resume: it is damaged. Delete it");
  EXPECT_EQ(page->read(1).at_end().failure, RankFailure::kInput) << "whatever was done in between";
  EXPECT_EQ(page->read(1).at_end().failure_text, "cannot resume: it is damaged. Delete it");
  const auto other = std::make_unique<RankPage>();
  other->note_error(RankFailure::kInput, -1, "it is damaged");
  other->fail(RankFailure::kOwn, -1, "index out of range");
  EXPECT_EQ(other->read(1).at_end().failure, RankFailure::kOwn) << "that one was caught";
  const auto victim = std::make_unique<RankPage>();
  victim->fail(RankFailure::kPeer, 0, "rank 0 ended");
  victim->note_error(RankFailure::kStorage, -1, "cannot write y");
  EXPECT_EQ(victim->read(1).at_end().failure, RankFailure::kPeer) << "the first cause stays";
  const auto told = std::make_unique<RankPage>();
  told->note_error(RankFailure::kPeer, 2, "rank 2 failed in the function that it runs for all");
  EXPECT_EQ(told->read(3).at_end().peer, 2);
  const auto long_winded = std::make_unique<RankPage>();
  long_winded->note_error(RankFailure::kLimit, -1, std::string(5000, 'x'));
  EXPECT_EQ(long_winded->read(1).at_end().failure_text, std::string(511, 'x'));
}

TEST(RankPage, TellsWhatIsDone) {
  const auto page = std::make_unique<RankPage>();
  RankStatus account = page->read(1);
  EXPECT_EQ(account.steps, 0);
  EXPECT_EQ(account.checkpoint, "");
  const uint64_t beats = account.beats;
  start(*page, 1, {1});
  page->finish_operation(1);
  page->count_step();
  page->note_checkpoint("/run/checkpoints/step_7.pt", 7, Clock::time_point(Clock::duration(5)));
  account = page->read(1);
  EXPECT_EQ(account.beats, beats + 3);
  EXPECT_EQ(account.steps, 1);
  EXPECT_EQ(account.checkpoint, "/run/checkpoints/step_7.pt");
  EXPECT_EQ(account.checkpoint_step, 7);
  EXPECT_EQ(account.checkpoint_time.time_since_epoch().count(), 5);
}

TEST(RankPage, TellsWhatIsInTheLaunchersMemory) {
  const auto page = std::make_unique<RankPage>();
  EXPECT_EQ(page->read(1).memory_step, -1);
  page->note_memory_checkpoint(0);
  EXPECT_EQ(page->read(1).memory_step, 0);
  page->note_memory_checkpoint(6);
  EXPECT_EQ(page->read(1).first_step, 6) << "no step has been made: it goes on from there";
  page->count_step();
  page->note_memory_checkpoint(7);
  const RankStatus account = page->read(1);
  EXPECT_EQ(account.memory_step, 7);
  EXPECT_EQ(account.first_step, 6);
  EXPECT_EQ(account.checkpoint, "");
}

TEST(RankPage, AnythingMayStandInIt) {
  for (const int byte : {0xff, 0x80, 0x01, 0x7f}) {
    alignas(64) std::byte bytes[RankPage::kBytes];
    std::memset(bytes, byte, sizeof bytes);
    const RankStatus account = reinterpret_cast<const RankPage*>(bytes)->read(4);
    EXPECT_LT(account.peer, 4);
    EXPECT_LE(account.operation.shape.size(), RankPage::kShownDimensions);
    EXPECT_LT(account.failure_text.size(), 1024U);
    EXPECT_LE(account.phase, RankStatus::Phase::kLeftByException);
    EXPECT_LE(account.failure, RankFailure::kLimit);
    EXPECT_LT(account.checkpoint.size(), 1024U);
  }
}

TEST(RankBoard, IsReadableAfterItsRankWasKilled) {
  const RankBoard board(3);
  const pid_t rank = ::fork();
  if (rank == 0) {
    // As a rank does it: through the inherited descriptor.
    const auto inherited = RankBoard::open(::dup(board.fd()), 3);
    if (inherited) start(inherited->page(1), 7, {5});
    ::raise(SIGKILL);
  }
  ::waitpid(rank, nullptr, 0);
  EXPECT_EQ(board.page(1).read(3).operation.text(), "all_reduce #7 (Float [5])");
  EXPECT_EQ(board.page(0).read(3).operation.text(), "none");
}

TEST(RankBoard, OpensNothingElse) {
  const RankBoard board(3);
  EXPECT_FALSE(RankBoard::open(::dup(board.fd()), 4)) << "of another number of ranks";
  EXPECT_FALSE(RankBoard::open(::dup(STDIN_FILENO), 3));
  EXPECT_FALSE(RankBoard::open(1000, 3)) << "not open";
  const SharedSegment other("other", 4 * RankPage::kBytes, 4 * RankPage::kBytes);
  EXPECT_FALSE(RankBoard::open(::dup(other.fd()), 3)) << "no magic";
}

TEST(RankBoard, WithoutALauncherThePageIsReadByNobody) {
  EXPECT_EQ(launchers_board(), nullptr);
  start(own_page(), 1, {1});
  EXPECT_EQ(rank_of_process(::getpid()), -1);
}

}  // namespace
}  // namespace lockstep
