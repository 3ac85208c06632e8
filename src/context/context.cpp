#include <lockstep/context.h>

#include <unistd.h>

#include <cstdio>
#include <exception>
#include <sstream>
#include <utility>

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include "base/descriptor_limit.h"
#include "base/environment.h"
#include "base/shared_segment.h"
#include "collectives/device_engine.h"
#include "collectives/gloo/gloo_backend.h"
#include "collectives/group_state.h"
#include "collectives/nccl/nccl_backend.h"
#include "collectives/open_store.h"
#include "collectives/shm/backend/shm_backend.h"
#include "collectives/shm/bootstrap.h"
#include "collectives/shm/layout.h"
#include "context/device.h"
#include "context/only_context.h"
#include "context/roll_call.h"
#include "context/start_ranks.h"
#include "context/stop_request.h"
#include "nn/batch_norm_operator.h"
#include "rank_page/error_file.h"
#include "rank_page/rank_board.h"
#include "rendezvous/world.h"

namespace lockstep {
namespace {

/// How long a leaving rank waits for the others; a rank that serves the store waits longer.
constexpr std::chrono::seconds kFarewell{5};

/// While a rank is stopped in a debugger, the others wait.
constexpr std::chrono::hours kDebuggedTimeout{24 * 7};

/// The environment's value, for users who cannot change the program, otherwise the program's.
std::chrono::milliseconds join_timeout(const Environment& environment, const ContextOptions& options) {
  if (!environment.lockstep_join_timeout_s) return options.join_timeout;
  char* end = nullptr;
  const double seconds = std::strtod(environment.lockstep_join_timeout_s->c_str(), &end);
  if (*end != '\0' || !(seconds > 0 && seconds < 1e6))
    throw Error("LOCKSTEP_JOIN_TIMEOUT_S=" + *environment.lockstep_join_timeout_s +
                " is not a number of seconds above 0; set it to one, or unset it");
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

/// Does not return in a process whose arguments make it the launcher of others.
ContextOptions with_ranks_argument(int argc, char** argv, ContextOptions options) {
  if (options.ranks_argument) start_ranks_if_asked(argc, argv);
  return options;
}

int choose_threads(const RollCall& present, const Environment& environment) {
  // The launcher's number holds for the cores that it assigned; something in between (taskset) may have changed them.
  if (!environment.omp_num_threads || environment.omp_num_threads == environment.lockstep_threads)
    at::set_num_threads(present.threads);
  return at::get_num_threads();
}

std::string choose_backend(const ContextOptions& options, const RollCall& present, int world_size) {
  if (options.backend.empty()) return present.machines == 1 && world_size <= shm::kMaxRanks ? "shm" : "gloo";
  if (options.backend == "shm" || options.backend == "gloo") return options.backend;
  throw Error("ContextOptions::backend is \"" + options.backend +
              "\"; set it to \"shm\" or \"gloo\", or leave it empty");
}

/// `store` is the store of all ranks, in which their group forms while they join. Subgroups form later, in other
/// stores.
EngineFactories choose_engines(const World& world, const RollCall& present, const ContextOptions& options,
                               const c10::intrusive_ptr<c10d::Store>& store) {
  const auto timeout = options.collective_timeout, join = options.join_timeout;
  EngineFactories factories;
  factories.device = [timeout](c10::DeviceType device, const auto& shared, int rank, int size) {
    return nccl_engine::make_backend(device, shared, rank, size, timeout);
  };
  if (choose_backend(options, present, world.world_size) == "shm") {
    factories.cpu = [timeout, join, store](const auto& shared, int rank, int size) {
      return shm_engine::make_backend(shared, rank, size, timeout, "shm", false, shared == store ? join : timeout);
    };
  } else {
    const std::string address = world.world_size > 1 ? local_address(world) : "";
    factories.cpu = [address, timeout](const auto& shared, int rank, int size) {
      return gloo_engine::make_backend(shared, rank, size, address, timeout);
    };
  }
  return factories;
}

/// Checked before anything is opened: if a file of /proc cannot be read, ranks think that they run on different
/// machines.
size_t descriptors_to_join(const World& world) {
  if (world.world_size == 1) return 0;
  constexpr size_t kToRead = 1, kToMeet = 3;  // without a launcher: the store's socket, its server's ends
  const size_t store = world.source == World::Source::kLauncher ? 0 : kToMeet;
  if (!world.one_machine() || world.world_size > shm::kMaxRanks) return store + kToRead;
  // As many as the last rank needs, so that all ranks name the same number.
  return store + shm::descriptors_to_form(world.world_size - 1, world.world_size);
}

/// Tells the launcher that this rank waits for the others, and takes it back if they do not meet.
class Joining {
 public:
  Joining() { own_page().set_phase(RankStatus::Phase::kJoining); }
  ~Joining() {
    if (!done_) own_page().set_phase(RankStatus::Phase::kUnknown);
  }
  Joining(const Joining&) = delete;
  void done() {
    done_ = true;
    own_page().set_phase(RankStatus::Phase::kJoined);
  }

 private:
  bool done_ = false;
};

}  // namespace

struct Context::State {
  OnlyContext only;  ///< first, so that it is destroyed last
  World world;
  ContextOptions options;
  std::string run_dir;
  int exceptions;       ///< in flight when the ranks joined
  unsigned generation;  ///< of the process that joined
  c10::intrusive_ptr<c10d::Store> store;
  RollCall present;
  int threads;
  std::optional<Group> group;
  std::optional<StopRequest> stop_request;

  void announce() const {
    if (!options.announce || world.rank != 0 || world.world_size == 1) return;
    std::ostringstream text;
    text << "lockstep: " << world.world_size << " ranks on " << present.machines
         << (present.machines == 1 ? " machine" : " machines") << " by " << name_of(world.source) << ", "
         << group->backend() << ", " << threads << (threads == 1 ? " thread" : " threads") << " a rank\n";
    std::fputs(text.str().c_str(), stderr);
  }
};

Context::Context(int argc, char** argv, ContextOptions options)
    : Context(with_ranks_argument(argc, argv, std::move(options))) {}

Context::Context(ContextOptions options) {
  OnlyContext only;
  const Environment environment = Environment::from_process();
  World world = discover_world(environment);
  options.join_timeout = join_timeout(environment, options);
  if (environment.lockstep_debugged) options.join_timeout = options.collective_timeout = kDebuggedTimeout;
  own_page().set_collective_timeout(options.collective_timeout);
  Joining joining;
  require_descriptors(descriptors_to_join(world), "joining " + std::to_string(world.world_size) + " ranks");
  auto store = open_fresh_store(world, options.join_timeout);
  RollCall present = wait_for_all_ranks(world, store, options.join_timeout);
  world.local_rank = present.local_rank;
  world.local_world_size = present.local_world_size;
  remember_local_rank(present.local_rank);
  const int threads = choose_threads(present, environment);
  Group group = make_group(store, world.rank, world.world_size, choose_engines(world, present, options, store));
  state_.reset(new State{std::move(only), world, options, environment.lockstep_run_dir.value_or(""),
                         std::uncaught_exceptions(), fork_generation(), store, present, threads, std::move(group),
                         std::nullopt});
  if (options.seed) at::manual_seed(*options.seed + static_cast<uint64_t>(rank()));
  note_uncaught_exceptions();
  joining.done();
  state_->announce();
}

Context::Context(Context&&) noexcept = default;

Context::~Context() {
  if (!state_) return;
  if (state_->generation != fork_generation()) {
    // A child that the rank forked: connections and threads belong to its parent, which goes on using them.
    close(*state_->group);
    static_cast<void>(state_.release());
    return;
  }
  const bool unwinding = std::uncaught_exceptions() > state_->exceptions;
  // Do this before the others see that this rank leaves, because they may not survive that.
  if (unwinding) {
    // main() may catch the exception and print its text, but torchrun expects it in a file.
    if (const RankStatus account = own_page().read(world_size()); account.error_is_last)
      write_error_file(account.last_error_text);
    own_page().fail(RankFailure::kOwn, -1, "");
  }
  own_page().set_phase(unwinding ? RankStatus::Phase::kLeftByException : RankStatus::Phase::kLeft);
  close(*state_->group);
  // Engines other than our own: a rank that closes its connections while a peer still reads from them can cut the peer
  // off, so they close together.
  if (state_->store && !unwinding) say_farewell(state_->world, state_->store, kFarewell);
  release_device_engines(*state_->group);
  forget_closed_groups();
}

int Context::local_rank() const { return *state_->world.local_rank; }
int Context::local_world_size() const { return *state_->world.local_world_size; }
uint64_t Context::seed() const { return state_->options.seed.value_or(0); }
int Context::threads() const { return state_->threads; }
const std::string& Context::run_dir() const { return state_->run_dir; }
bool Context::stop_requested() {
  if (!state_->stop_request) state_->stop_request.emplace();
  return state_->stop_request->heard(group());
}
const Group& Context::group() const { return *state_->group; }

}  // namespace lockstep
