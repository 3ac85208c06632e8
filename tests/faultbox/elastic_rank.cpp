// A training without torch, for kills and resizes by the hundred: it starts in milliseconds, saves after each step, and
// its result depends on the number of steps alone. A step has kLeaves pieces of work, which the ranks divide among
// themselves; each adds a number that depends on the parameter, and the parameter follows from their sum. Ranks meet in
// a file that all of them map (world=FILE). memory=1: it saves to the launcher's memory after each step, and to disk
// after every disk_every ones and when it leaves. Other words of the command line: page, steps, checkpoint, result; as
// for faultbox_rank.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <thread>

#include "base/environment.h"
#include "base/file_descriptor.h"
#include "faultbox/injector.h"
#include "faultbox/memory_saves.h"
#include "launch/launch_error.h"
#include "rank_page/rank_board.h"
#include "rank_page/stop_agreement.h"

namespace {

using lockstep::faultbox::ElasticState;
using lockstep::faultbox::Injector;
using lockstep::faultbox::MemorySaves;
using lockstep::faultbox::mix;
using lockstep::faultbox::Place;

constexpr int kLeaves = 12, kBuckets = 3, kMostRanks = 16;
/// Meetings of one start; so the meetings of a later one have higher numbers.
constexpr int64_t kMostMeetings = 1'000'000'000;

/// What the ranks share.
struct World {
  std::atomic<int64_t> met[kMostRanks];  ///< the last meeting that a rank has come to
  std::atomic<uint64_t> leaves[2][kBuckets][kLeaves];
};

World& map_world(const std::string& path) {
  const lockstep::FileDescriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!file || ::ftruncate(file.get(), sizeof(World)) != 0) throw std::runtime_error("cannot make " + path);
  void* memory = ::mmap(nullptr, sizeof(World), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) throw std::runtime_error("cannot map " + path);
  return *static_cast<World*>(memory);
}

/// As Context has it: a rank that is asked to leave asks all, unless the run is ending anyway.
void handle_sigterm(int signal) {
  const auto* board = lockstep::launchers_board();
  if (board != nullptr && board->head().stopping.load() == 0) return lockstep::StopAgreement::ask(*board);
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

class Training {
 public:
  explicit Training(Injector& injector)
      : injector_(injector), world_(map_world(injector.word("world", ""))), noise_(std::random_device()()) {
    const auto environment = lockstep::Environment::from_process();
    rank_ = std::atoi(environment.rank.value_or("0").c_str());
    ranks_ = std::atoi(environment.world_size.value_or("1").c_str());
    disk_every_ = injector.number("disk_every", 1);
    if (injector.number("memory", 0) != 0) memory_.emplace(injector, rank_, ranks_);
    meeting_ = kMostMeetings * (1 + std::atoll(environment.torchelastic_restart_count.value_or("0").c_str()));
  }

  int run() {
    auto& page = lockstep::own_page();
    page.set_phase(lockstep::RankStatus::Phase::kJoining);
    injector_.arrive(Place::kRendezvous, 0);
    meet();
    page.set_phase(lockstep::RankStatus::Phase::kJoined);
    resume();
    meet();  // nobody saves before all have read
    std::optional<lockstep::StopAgreement> agreement;
    if (const auto* board = lockstep::launchers_board()) agreement.emplace(*board, page);
    ::signal(SIGTERM, handle_sigterm);
    for (const int64_t steps = injector_.number("steps", 60); state_.step < steps;) {
      make_step();
      if (agreement && agreement->should_stop()) {
        if (rank_ == 0) save();
        return lockstep::kExitPreempted;
      }
    }
    page.set_phase(lockstep::RankStatus::Phase::kLeft);
    if (rank_ == 0) std::ofstream(injector_.word("result", "")) << state_.parameter << '\n';
    return 0;
  }

 private:
  void make_step() {
    auto& page = lockstep::own_page();
    auto& leaves = world_.leaves[state_.step % 2];
    uint64_t sum = 0;
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
      injector_.arrive(bucket == 0 ? Place::kForward : Place::kBucket, state_.step, bucket);
      work();
      for (int leaf = rank_ * kLeaves / ranks_; leaf < (rank_ + 1) * kLeaves / ranks_; ++leaf)
        leaves[bucket][leaf] =
            mix(state_.parameter + static_cast<uint64_t>((state_.step * kBuckets + bucket) * kLeaves + leaf));
      page.start_operation(static_cast<uint64_t>(++operations_), "all_reduce", "Long", kLeaves, nullptr, 0,
                           lockstep::Clock::now());
      meet();
      page.finish_operation(static_cast<uint64_t>(operations_));
      for (const auto& leaf : leaves[bucket]) sum += leaf;
    }
    injector_.arrive(Place::kOptimizer, state_.step);
    page.count_step();
    state_ = {state_.step + 1, mix(state_.parameter + sum)};
    if (rank_ == 0) ++injector_.page().made;
    work();
    if (memory_) {
      injector_.arrive(Place::kMemorySave, state_.step);
      memory_->save(state_);
    }
    injector_.arrive(Place::kSave, state_.step);
    if (rank_ == 0 && state_.step % disk_every_ == 0) save();
  }

  /// Waits for the others; the launcher ends ranks whose peers are gone.
  void meet() {
    const int64_t mine = ++meeting_;
    world_.met[rank_] = mine;
    for (int rank = 0; rank < ranks_; ++rank)
      while (world_.met[rank] < mine) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

  void work() { std::this_thread::sleep_for(std::chrono::microseconds(noise_() % 1500)); }

  void save() {
    const std::string path = injector_.word("checkpoint", ""), partial = path + ".new";
    {
      std::ofstream file(partial, std::ios::binary | std::ios::trunc);
      const uint64_t check = mix(static_cast<uint64_t>(state_.step) ^ state_.parameter);
      if (!(file << state_.step << ' ' << state_.parameter << ' ' << check << '\n').flush())
        throw std::runtime_error("cannot save");
    }
    if (std::rename(partial.c_str(), path.c_str()) != 0) throw std::runtime_error("cannot save");
    lockstep::own_page().note_checkpoint(path, state_.step, lockstep::Clock::now());
  }

  void resume() {
    resume_from_disk();
    if (!memory_) return;
    if (const auto kept = memory_->resume(); kept && kept->step > state_.step) {
      state_ = *kept;
      lockstep::own_page().note_memory_checkpoint(state_.step);
    }
  }

  void resume_from_disk() {
    const std::string path = injector_.word("checkpoint", "");
    std::ifstream file(path, std::ios::binary);
    if (!file) return;
    ElasticState read;
    uint64_t check = 0;
    if (!(file >> read.step >> read.parameter >> check) ||
        check != mix(static_cast<uint64_t>(read.step) ^ read.parameter))
      throw std::runtime_error("the checkpoint is damaged");
    state_ = read;
    if (rank_ == 0) injector_.page().resumed_step = read.step + 1;
    if (rank_ == 0) lockstep::own_page().note_checkpoint(path, read.step, lockstep::Clock::now());
  }

  Injector& injector_;
  World& world_;
  std::minstd_rand noise_;
  int rank_ = 0, ranks_ = 1;
  int64_t meeting_ = 0, operations_ = 0, disk_every_ = 1;
  ElasticState state_;
  std::optional<MemorySaves> memory_;
};

}  // namespace

int main(int argc, char** argv) {
  try {
    Injector injector(argc, argv);
    return Training(injector).run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "elastic_rank: %s\n", error.what());
    return 1;
  }
}
