#include <lockstep/context.h>

#include <unistd.h>

#include <cstdio>
#include <exception>
#include <sstream>
#include <utility>

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <lockstep/heartbeat.h>

#include "base/environment.h"
#include "base/file_descriptor.h"
#include "base/library_thread.h"
#include "base/loop_begin.h"
#include "base/machine_name.h"
#include "base/shared_segment.h"
#include "collectives/device_engine.h"
#include "collectives/gloo/gloo_backend.h"
#include "collectives/group_state.h"
#include "collectives/hierarchical/halving_plan.h"
#include "collectives/hierarchical/hierarchical_backend.h"
#include "collectives/nccl/nccl_backend.h"
#include "collectives/shm/backend/make_backend.h"
#include "collectives/shm/segment/bootstrap.h"
#include "collectives/shm/segment/layout.h"
#include "context/adopted_ranks.h"
#include "context/device.h"
#include "context/open_store.h"
#include "context/process_role.h"
#include "context/roll_call.h"
#include "context/stop_request.h"
#include "context/virtual_ranks_of_run.h"
#include "nn/batch_norm_operator.h"
#include "rank_page/error_file.h"
#include "rank_page/rank_board.h"
#include "rendezvous/world.h"

namespace lockstep {
namespace {

/// How long a leaving rank waits for its own operations, and then for the other ranks; a rank that serves the store
/// waits longer.
constexpr std::chrono::seconds kFarewell{5};

/// While a rank is stopped in a debugger, the others wait.
constexpr std::chrono::hours kDebuggedTimeout{24 * 7};

/// Does not return in a process whose arguments make it the launcher of others.
ContextOptions with_ranks_argument(int argc, const char* const* argv, ContextOptions options) {
  if (options.ranks_argument) start_ranks_if_asked(argc, argv);
  return options;
}

int choose_threads(const RollCall& present, const ContextOptions& options, const Environment& environment) {
  // The launcher's number applies to the cores that it assigned; a tool in between (taskset) may have changed them.
  if (!environment.omp_num_threads || environment.omp_num_threads == environment.lockstep_threads)
    at::set_num_threads(options.threads > 0 ? options.threads : options.virtual_ranks > 0 ? 1 : present.threads);
  return at::get_num_threads();
}

std::string choose_backend(const ContextOptions& options, const RollCall& present, int world_size) {
  if (options.backend.empty()) {
    if (present.machines == 1) return world_size <= shm::kMaxRanks ? "shm" : "gloo";
    const bool is_gloos = present.most_on_a_machine == 1 && present.machines <= hierarchical_engine::kMostDirect;
    return is_gloos ? "gloo" : "hierarchical";
  }
  if (options.backend == "shm" && present.machines > 1)
    throw Error("ContextOptions::backend is \"shm\", but the ranks are on " + std::to_string(present.machines) +
                " machines; leave it empty, or set it to \"gloo\" or \"hierarchical\"");
  for (const char* known : {"shm", "gloo", "hierarchical"})
    if (options.backend == known) return known;
  throw Error("ContextOptions::backend is \"" + options.backend +
              "\"; set it to \"shm\", \"gloo\" or \"hierarchical\", or leave it empty");
}

/// Whether the launcher carries what ranks send between machines: then each machine has a loopback address.
bool is_encrypted(const World& world) {
  return !world.one_machine() && world.address.starts_with("127.") && world.address != "127.0.0.1";
}

/// `store` is the store of all ranks, in which their group forms while they join. Subgroups form later, in other
/// stores.
EngineFactories choose_engines(const World& world, const RollCall& present, const ContextOptions& options,
                               const c10::intrusive_ptr<c10d::Store>& store) {
  const auto timeout = options.collective_timeout, join = options.join_timeout;
  EngineFactories factories;
  factories.device = [timeout, encrypted = is_encrypted(world)](c10::DeviceType device, const auto& shared, int rank,
                                                                int size) {
    if (encrypted)
      throw Error(
          "NCCL would send in the clear, and this run was started with --encrypt; move the tensors to the CPU, or "
          "start it without --encrypt on a network of its own");
    return nccl_engine::make_backend(device, shared, rank, size, timeout);
  };
  factories.device_name = nccl_engine::gpu_name;
  const std::string backend = choose_backend(options, present, world.world_size);
  if (backend == "shm") {
    factories.cpu = [timeout, join, store](const auto& shared, int rank, int size) {
      return shm_engine::make_backend(shared, rank, size, timeout, "shm", false, shared == store ? join : timeout);
    };
    return factories;
  }
  const std::string address = world.world_size > 1 ? local_address(world) : "";
  if (backend == "hierarchical") {
    factories.cpu = [address, timeout, join, store, machine = machine_name()](const auto& shared, int rank, int size) {
      return hierarchical_engine::make_backend(shared, rank, size,
                                               {machine, address, timeout, shared == store ? join : timeout});
    };
  } else {
    factories.cpu = [address, timeout, join, store](const auto& shared, int rank, int size) {
      return gloo_engine::make_backend(shared, rank, size, address, timeout, shared == store ? join : timeout);
    };
  }
  return factories;
}

/// Checked before anything is opened: if a file of /proc cannot be read, ranks believe that they run on different
/// machines.
size_t descriptors_to_join(const World& world) {
  if (world.world_size == 1) return 0;
  constexpr size_t kToRead = 1, kToMeet = 3;  // without a launcher: the store's socket and its server's ends
  const size_t store = world.source == World::Source::kLauncher ? 0 : kToMeet;
  if (!world.one_machine() || world.world_size > shm::kMaxRanks) return store + kToRead;
  // The last rank's need, so that all ranks name the same number.
  return store + shm::descriptors_to_form(world.world_size - 1, world.world_size);
}

/// Tells the launcher that this rank waits for the others; withdraws that if they do not meet.
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

/// The rank is added to the seed here, and loaders of all ranks shuffle by it. The rank with the shortest timeout ends
/// a wait for all, by a limit that the others do not have.
std::vector<Setting> settings_of(const ContextOptions& options) {
  return {{"same_seed_until_loop", options.same_seed_until_loop ? "true" : "false"},
          {"seed", options.seed ? std::to_string(*options.seed) : "not set"},
          {"backend", '"' + options.backend + '"'},
          {"virtual_ranks", std::to_string(options.virtual_ranks)},
          {"collective_timeout", std::to_string(options.collective_timeout.count()) + " ms"}};
}

void seed_generator(const ContextOptions& options, int rank) {
  if (!options.seed) return;
  const uint64_t own = *options.seed + static_cast<uint64_t>(rank);
  at::manual_seed(options.same_seed_until_loop ? *options.seed : own);
  if (options.same_seed_until_loop) when_loop_begins([own] { at::manual_seed(own); });
}

using Engines = std::function<EngineFactories(const RollCall& present)>;
using Farewell = std::function<void(std::chrono::milliseconds)>;

/// Fixes the options, before anything is opened.
void settle(const World& world, const Environment& environment, ContextOptions& options) {
  options.virtual_ranks = choose_virtual_ranks(options, environment, world.world_size);
  options.join_timeout = join_timeout(environment, options.join_timeout);
  if (environment.lockstep_debugged) options.join_timeout = options.collective_timeout = kDebuggedTimeout;
  TORCH_CHECK(options.threads >= 0, "ContextOptions::threads is ", options.threads, "; it must be 0 or more");
  constexpr int kMostThreads = 4096;
  TORCH_CHECK(options.threads <= kMostThreads, "ContextOptions::threads is ", options.threads,
              "; it is the number of threads that a rank computes with, at most ", kMostThreads);
  TORCH_CHECK(options.collective_timeout.count() > 0, "ContextOptions::collective_timeout is ",
              options.collective_timeout.count(), " ms; it must be more than 0");
  own_page().set_collective_timeout(options.collective_timeout);
}

}  // namespace

struct Context::State {
  OnlyContext only;  ///< first, so that it is destroyed last
  World world;
  ContextOptions options;
  std::string run_dir;
  int exceptions;       ///< in flight when the ranks joined
  unsigned generation;  ///< of the process that joined
  c10::intrusive_ptr<c10d::Store> store;
  std::function<void(std::chrono::milliseconds)> say_farewell;  ///< waits this long for the other ranks
  RollCall present;
  int threads;
  std::optional<Group> group;
  std::optional<StopRequest> stop_request;

  /// REQUIRES: every rank calls it, with the store of all ranks.
  static std::unique_ptr<State> join(OnlyContext only, const Environment& environment, World world,
                                     const ContextOptions& options, const c10::intrusive_ptr<c10d::Store>& store,
                                     const Engines& engines, const Farewell& farewell);

  void announce() const {
    if (!options.announce || world.rank != 0 || world.world_size == 1) return;
    std::ostringstream text;
    text << "lockstep: " << world.world_size << " ranks on " << present.machines
         << (present.machines == 1 ? " machine" : " machines") << " by " << name_of(world.source) << ", "
         << group->backend() << ", " << threads << (threads == 1 ? " thread" : " threads") << " a rank\n";
    std::fputs(text.str().c_str(), stderr);
  }
};

std::unique_ptr<Context::State> Context::State::join(OnlyContext only, const Environment& environment, World world,
                                                     const ContextOptions& options,
                                                     const c10::intrusive_ptr<c10d::Store>& store,
                                                     const Engines& engines, const Farewell& farewell) {
  const RollCall present = wait_for_all_ranks(world, store, options.join_timeout, settings_of(options));
  TORCH_CHECK(!options.same_seed_until_loop || options.seed,
              "ContextOptions::same_seed_until_loop needs a seed; set ContextOptions::seed");
  world.local_rank = present.local_rank;
  world.local_world_size = present.local_world_size;
  remember_local_rank(present.local_rank);
  const int threads = choose_threads(present, options, environment);
  Group group = make_group(store, world.rank, world.world_size, engines(present),
                           page_group_of_all(world.rank, world.world_size));
  lockstep::state_of(group).membership->watch(lockstep::state_of(group));
  std::unique_ptr<State> state(new State{std::move(only), world, options, environment.lockstep_run_dir.value_or(""),
                                         std::uncaught_exceptions(), fork_generation(), store, farewell, present,
                                         threads, std::move(group), std::nullopt});
  if (options.virtual_ranks > 0)
    lockstep::state_of(*state->group).virtual_ranks = make_virtual_ranks(options, *state->group, threads);
  else
    seed_generator(options, world.rank);
  note_uncaught_exceptions();
  return state;
}

Context::Context(int argc, const char* const* argv, ContextOptions options)
    : Context(with_ranks_argument(argc, argv, std::move(options))) {}

Context::Context(ContextOptions options) {
  const AdoptsNewThreads adopted;
  OnlyContext only;
  const Environment environment = Environment::from_process();
  World world = discover_world(environment);
  settle(world, environment, options);
  Joining joining;
  require_descriptors(descriptors_to_join(world), "joining " + std::to_string(world.world_size) + " ranks");
  auto store = open_fresh_store(world, options.join_timeout);
  const Engines engines = [&](const RollCall& present) { return choose_engines(world, present, options, store); };
  const auto farewell = [world, store](std::chrono::milliseconds timeout) {
    // Engines other than our own: a rank that closes its connections while a peer still reads from them can cut the
    // peer off, so they close together.
    if (store && timeout.count() > 0) lockstep::say_farewell(world, store, timeout);
  };
  state_ = State::join(std::move(only), environment, world, options, store, engines, farewell);
  joining.done();
  state_->announce();
}

Context::Context(std::unique_ptr<State> state) : state_(std::move(state)) {}

Context adopt_ranks(AdoptedRanks ranks, ContextOptions options) {
  const AdoptsNewThreads adopted;
  OnlyContext only;
  const Environment environment = Environment::from_process();
  World world;
  world.source = World::Source::kMpi;
  world.rank = ranks.rank;
  world.world_size = ranks.world_size;
  settle(world, environment, options);
  Joining joining;
  if (world.world_size == 1) ranks.store.reset();
  const Engines engines = [&](const RollCall& present) {
    const auto timeout = options.collective_timeout;
    const auto device = [timeout](c10::DeviceType type, const auto& store, int rank, int size) {
      return nccl_engine::make_backend(type, store, rank, size, timeout);
    };
    return EngineFactories{
        .cpu = ranks.engine(options, present.machines == 1), .device = device, .device_name = nccl_engine::gpu_name};
  };
  Context context(
      Context::State::join(std::move(only), environment, world, options, ranks.store, engines, ranks.say_farewell));
  joining.done();
  context.state_->announce();
  return context;
}

std::chrono::milliseconds join_timeout_of(const ContextOptions& options) {
  return join_timeout(Environment::from_process(), options.join_timeout);
}

Context::Context(Context&&) noexcept = default;

Context::~Context() {
  if (!state_) return;
  when_loop_begins(nullptr);
  if (state_->generation != fork_generation()) {
    // In a forked child, connections and threads belong to the parent, which continues to use them.
    close(*state_->group);
    static_cast<void>(state_.release());
    return;
  }
  const bool unwinding = std::uncaught_exceptions() > state_->exceptions;
  // Done before the others see that this rank leaves, because they may not survive that.
  if (unwinding) {
    // main() may catch the exception and print its text, but torchrun expects it in a file.
    if (const RankStatus account = own_page().read(world_size()); account.error_is_last)
      write_error_file(account.last_error_text);
    own_page().fail(RankFailure::kOwn, -1, "");
  }
  finish_operations(*state_->group, unwinding ? std::chrono::milliseconds(0) : kFarewell);
  own_page().set_phase(unwinding ? RankStatus::Phase::kLeftByException : RankStatus::Phase::kLeft);
  close(*state_->group);
  state_->say_farewell(unwinding ? std::chrono::milliseconds(0) : kFarewell);
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
int Context::virtual_ranks() const { return state_->options.virtual_ranks; }
const std::shared_ptr<VirtualRanks>& Context::virtual_rank_state() const {
  return lockstep::state_of(group()).virtual_ranks;
}
Context::Block Context::virtual_block() const {
  const auto& ranks = virtual_rank_state();
  TORCH_CHECK(ranks, "virtual_block(): this run has no virtual ranks; set ContextOptions::virtual_ranks");
  return {ranks->block().first, ranks->block().last};
}
void Context::enter_virtual_rank(int virtual_rank) {
  TORCH_CHECK(virtual_rank_state(), "enter_virtual_rank(", virtual_rank,
              "): this run has no virtual ranks; set ContextOptions::virtual_ranks");
  virtual_rank_state()->enter(virtual_rank);
}

void heartbeat() { own_page().heartbeat(); }

}  // namespace lockstep
