#include "rank_page/rank_page.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/rank_names.h"

namespace lockstep {
namespace {

constexpr int kReads = 100;  // a writer that died in the middle leaves an odd version forever

uint32_t pack(RankFailure failure, int peer) {
  return static_cast<uint32_t>(failure) | static_cast<uint32_t>(peer + 1) << 8;
}

int rank_of(uint32_t word, int world_size) {
  const auto named = static_cast<int64_t>(word) - 1;
  return named < world_size ? static_cast<int>(named) : -1;
}

void unpack(uint32_t word, int world_size, RankFailure& failure, int& peer) {
  failure = static_cast<RankFailure>(std::min(word & 255, static_cast<uint32_t>(RankFailure::kLimit)));
  peer = rank_of(word >> 8, world_size);
}

}  // namespace

template <size_t kSize>
void RankPage::Text<kSize>::store(std::string_view text) {
  text = text.substr(0, kSize - 1);
  for (size_t at = 0; at <= text.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min<size_t>(8, text.size() - at));
    words_[at / 8].store(word, std::memory_order_relaxed);
  }
}

template <size_t kSize>
std::string RankPage::Text<kSize>::load() const {
  char bytes[kSize];
  for (size_t i = 0; i < kSize / 8; ++i) {
    const uint64_t word = words_[i].load(std::memory_order_relaxed);
    std::memcpy(bytes + 8 * i, &word, 8);
  }
  return {bytes, ::strnlen(bytes, kSize - 1)};
}

void RankPage::begin(pid_t pid) {
  pid_.store(pid, std::memory_order_relaxed);
  kind_literal_.store(nullptr, std::memory_order_relaxed);
  dtype_literal_.store(nullptr, std::memory_order_relaxed);
  // From the program that this one has replaced.
  for (Group& group : groups_) group.id.store(0, std::memory_order_relaxed);
  taken_groups_.store(0, std::memory_order_relaxed);
  caller_.store(0, std::memory_order_relaxed);
  has_several_callers_.store(0, std::memory_order_relaxed);
  has_free_threads_.store(0, std::memory_order_relaxed);
}

void RankPage::start_operation(uint64_t sequence, const char* kind, const char* dtype, int64_t elements,
                               const int64_t* shape, size_t dimensions, Clock::time_point now, std::string_view of,
                               int group) {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  // Training repeats itself, and copying both texts each time would take 10 of the 150 ns of a small all_reduce. They
  // are copied now and then, because two threads at once may leave one's text with the other's address.
  const bool anew = sequence % 64 == 0;
  const auto put = [anew](auto& text, std::atomic<const char*>& known, const char* literal) {
    if (!anew && known.load(kRelaxed) == literal) return;
    text.store(literal);
    known.store(literal, kRelaxed);
  };
  const uint32_t version = version_.load(kRelaxed);
  version_.store(version | 1, kRelaxed);
  // Pairs with the acquire fence of read(): a reader that sees one of the words below sees the odd version, too.
  std::atomic_thread_fence(std::memory_order_release);
  note_caller();
  sequence_.store(sequence, kRelaxed);
  operation_group_.store(group, kRelaxed);
  put(kind_, kind_literal_, kind);
  put(dtype_, dtype_literal_, dtype);
  of_.store(of);
  elements_.store(elements, kRelaxed);
  started_ns_.store(now.time_since_epoch().count(), kRelaxed);
  const size_t shown = std::min(dimensions, kShownDimensions);
  for (size_t i = 0; i < shown; ++i) shape_[i].store(shape[i], kRelaxed);
  dimensions_.store(shown, kRelaxed);
  waits_for_.store(0, kRelaxed);
  running_.store(1, kRelaxed);
  beat();
  version_.store((version | 1) + 1, std::memory_order_release);  // to read(): all words above are in place
}

int RankPage::add_group(uint64_t id, uint64_t members, std::string_view name) {
  note_caller();
  uint64_t taken = taken_groups_.load(std::memory_order_relaxed);
  int place = 0;
  do {
    place = std::countr_one(taken);
    if (place >= kShownGroups) return kNoGroup;
  } while (!taken_groups_.compare_exchange_weak(taken, taken | uint64_t{1} << place));
  Group& group = groups_[place];
  group.members.store(members, std::memory_order_relaxed);
  group.collectives.store(0, std::memory_order_relaxed);
  group.name.store(name);
  group.id.store(id, std::memory_order_release);  // to read_groups(): the words above are in place
  return place;
}

void RankPage::remove_group(int place) {
  groups_[place].id.store(0, std::memory_order_relaxed);
  taken_groups_.fetch_and(~(uint64_t{1} << place));
}

void RankPage::note_other_caller(uint64_t here) {
  uint64_t nobody = 0;
  if (!caller_.compare_exchange_strong(nobody, here)) has_several_callers_.store(1, std::memory_order_relaxed);
}

void RankPage::read_groups(RankStatus& account, int shown, int awaited) const {
  account.groups.clear();
  account.operation.group.clear();
  account.operation.group_id = account.awaited.group = 0;
  for (int place = 0; place < kShownGroups; ++place) {
    const Group& group = groups_[place];
    const uint64_t id = group.id.load(std::memory_order_acquire);  // from the end of add_group()
    if (id == 0) continue;
    account.groups.push_back({.id = id,
                              .members = group.members.load(std::memory_order_relaxed),
                              .name = group.name.load(),
                              .collectives = group.collectives.load(std::memory_order_relaxed)});
    const RankStatus::Group& seen = account.groups.back();
    if (place == awaited) account.awaited.group = id;
    if (place != shown) continue;
    account.operation.group_id = id;
    if (!seen.name.empty()) account.operation.group = seen.text();
  }
}

void RankPage::fail(RankFailure failure, int peer, std::string_view text, int opponent) {
  uint32_t nobody = 0;
  if (!failure_claim_.compare_exchange_strong(nobody, 1)) return;
  failure_text_.store(text);
  // Here and below: a word that is released after its text and acquired by read() before it.
  failure_.store(pack(failure, peer) | static_cast<uint64_t>(opponent + 1) << 32, std::memory_order_release);
}

void RankPage::fail_by_exception(std::string_view text, bool uncaught) {
  fail(RankFailure::kOwn, -1, text);
  const uint64_t noted = failure_.load(std::memory_order_acquire);
  if (static_cast<RankFailure>(noted & 255) == RankFailure::kOwn && failure_text_.load().empty()) {
    failure_text_.store(text);
    failure_.store(noted, std::memory_order_release);
  }
  if (uncaught) uncaught_.store(1, std::memory_order_release);
}

std::chrono::milliseconds RankPage::collective_timeout() const {
  return std::chrono::milliseconds(
      std::clamp<int64_t>(collective_timeout_ms_.load(std::memory_order_relaxed), 0, kLongestTimeout.count()));
}

void RankPage::note_error(RankFailure kind, int peer, std::string_view text) {
  error_text_.store(text);
  error_progress_.store(progress(), std::memory_order_relaxed);
  error_.store(pack(kind, peer), std::memory_order_release);
}

void RankPage::note_checkpoint(std::string_view path, int64_t step, Clock::time_point now) {
  checkpoint_.store(path);
  checkpoint_step_.store(step, std::memory_order_relaxed);
  if (steps_.load(std::memory_order_relaxed) == 0) first_step_.store(step, std::memory_order_relaxed);
  checkpoint_ns_.store(now.time_since_epoch().count(), std::memory_order_release);
}

void RankPage::note_memory_checkpoint(int64_t step) {
  if (steps_.load(std::memory_order_relaxed) == 0) first_step_.store(step, std::memory_order_relaxed);
  memory_steps_.store(step + 1, std::memory_order_release);
}

RankStatus RankPage::read(int world_size) const {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  RankStatus account;
  account.pid = pid();
  account.phase = std::min(phase_.load(std::memory_order_acquire), RankStatus::Phase::kLeftByException);
  for (int turn = 0; turn < kReads; ++turn) {
    const uint32_t before = version_.load(std::memory_order_acquire);  // from the end of start_operation()
    RankStatus::Operation& operation = account.operation;
    operation.sequence = sequence_.load(kRelaxed);
    operation.kind = kind_.load();
    operation.dtype = dtype_.load();
    operation.of = of_.load();
    operation.elements = elements_.load(kRelaxed);
    operation.running = running_.load(kRelaxed) != 0;
    operation.started = Clock::time_point(Clock::duration(started_ns_.load(kRelaxed)));
    operation.shape.resize(std::min<uint64_t>(dimensions_.load(kRelaxed), kShownDimensions));
    for (size_t i = 0; i < operation.shape.size(); ++i) operation.shape[i] = shape_[i].load(kRelaxed);
    account.waiting = waiting_.load(kRelaxed) != 0;
    account.waits_for = operation.running || account.waiting ? waits_for_.load(kRelaxed) : 0;
    account.awaited = {.sequence = awaited_sequence_.load(kRelaxed),
                       .collective = awaited_collective_.load(kRelaxed),
                       .needs = awaited_needs_.load(kRelaxed),
                       .needs_some = awaited_needs_some_.load(kRelaxed) != 0};
    const int awaited = account.waiting ? awaited_group_.load(kRelaxed) : kNoGroup;
    read_groups(account, operation_group_.load(kRelaxed), awaited);
    std::atomic_thread_fence(std::memory_order_acquire);  // with the release fence of start_operation()
    if (before % 2 == 0 && version_.load(kRelaxed) == before) break;
  }
  account.has_one_caller =
      caller_.load(kRelaxed) != 0 && has_several_callers_.load(kRelaxed) == 0 && has_free_threads_.load(kRelaxed) == 0;
  const uint64_t failure = failure_.load(std::memory_order_acquire);
  unpack(static_cast<uint32_t>(failure), world_size, account.failure, account.peer);
  account.opponent = rank_of(static_cast<uint32_t>(failure >> 32), world_size);
  if (account.failure != RankFailure::kNone) account.failure_text = failure_text_.load();
  account.uncaught = uncaught_.load(std::memory_order_acquire) != 0;
  account.heartbeats = heartbeats_.load(kRelaxed);
  account.last_heartbeat = Clock::time_point(Clock::duration(heartbeat_ns_.load(kRelaxed)));
  account.collective_timeout = collective_timeout();
  account.beats = beats_.load(kRelaxed) + account.heartbeats;
  account.steps = steps_.load(kRelaxed);
  account.first_step = first_step_.load(kRelaxed);
  account.memory_step = memory_steps_.load(std::memory_order_acquire) - 1;
  account.stop_calls = stop_calls_.load(kRelaxed);
  const uint32_t error = error_.load(std::memory_order_acquire);
  if (error != 0) {
    account.error_is_last = error_progress_.load(kRelaxed) == account.beats + account.stop_calls;
    unpack(error, world_size, account.last_error, account.last_error_peer);
    account.last_error_text = error_text_.load();
  }
  if (const int64_t at = checkpoint_ns_.load(std::memory_order_acquire); at != 0) {
    account.checkpoint = checkpoint_.load();
    account.checkpoint_step = checkpoint_step_.load(kRelaxed);
    account.checkpoint_time = Clock::time_point(Clock::duration(at));
  }
  return account;
}

RankStatus RankStatus::at_end() const {
  constexpr size_t kCompared = 200;  // either text may be truncated
  RankStatus account = *this;
  if (last_error == RankFailure::kNone || (failure != RankFailure::kNone && failure != RankFailure::kOwn))
    return account;
  // If an exception has ended the rank, its text tells whether it was this error.
  const bool was_it = failure_text.empty()
                          ? error_is_last
                          : failure_text.find(last_error_text.substr(0, kCompared)) != std::string::npos;
  if (!was_it) return account;
  account.failure = last_error;
  account.peer = last_error_peer;
  if (failure_text.empty()) account.failure_text = last_error_text;
  return account;
}

std::string RankStatus::Operation::text() const {
  if (kind.empty()) return "none";
  const std::string name = kind + " #" + std::to_string(sequence);
  const std::string purpose = (group.empty() ? "" : " in " + group) + (of.empty() ? "" : " of " + of);
  if (dtype.empty()) return name + purpose;
  std::string size;
  if (shape.empty()) size = std::to_string(elements) + (elements == 1 ? " element" : " elements");
  for (size_t i = 0; i < shape.size(); ++i) size += (i == 0 ? "[" : ", ") + std::to_string(shape[i]);
  return name + " (" + dtype + " " + size + (shape.empty() ? ")" : "])") + purpose;
}

std::string RankStatus::Group::text() const {
  if (name.empty()) return "the group of all ranks";
  return members == 0 ? name : name + " (" + rank_names(members) + ")";
}

void RankPage::copy_from(const void* bytes, int64_t ahead_ns) {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  std::memcpy(static_cast<void*>(this), bytes, sizeof *this);
  for (std::atomic<int64_t>* time : {&started_ns_, &heartbeat_ns_, &checkpoint_ns_})
    if (time->load(kRelaxed) != 0) time->fetch_sub(ahead_ns, kRelaxed);
  if (version_.load(kRelaxed) % 2 != 0) version_.fetch_add(1, kRelaxed);  // the copy is not being written
}

}  // namespace lockstep
