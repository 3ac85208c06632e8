#include "train_c/world.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "train_c/attached.h"
#include "train_c/model.h"

namespace lockstep::train_c {
namespace {

constexpr const char* kSame = "; every rank must make the same calls in the same order. Nothing was changed";

void put(std::string& bytes, const std::string& text) {
  const uint64_t size = text.size();
  bytes.append(reinterpret_cast<const char*>(&size), sizeof size);
  bytes += text;
}
template <typename T>
void put(std::string& bytes, T number) {
  bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
}

/// Reads what put() wrote.
class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}
  template <typename T>
  T number() {
    T value{};
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  std::string text() {
    const auto size = number<uint64_t>();
    return {take(size), size};
  }

 private:
  const char* take(uint64_t size) {
    if (size > bytes_.size() - at_)
      throw StatusError(
          LOCKSTEP_MISMATCH,
          "a rank sent a message that is not a report of liblockstep_train; load the same version on all ranks");
    at_ += size;
    return bytes_.data() + at_ - size;
  }

  const std::string& bytes_;
  size_t at_ = 0;
};

std::string packed(const Report& report) {
  std::string bytes;
  for (const std::string* text : {&report.call, &report.settings, &report.problem}) put(bytes, *text);
  put(bytes, report.status);
  put(bytes, report.loss);
  put(bytes, report.weight);
  return bytes;
}
Report unpacked(const std::string& bytes) {
  Reader reader(bytes);
  Report report;
  for (std::string* text : {&report.call, &report.settings, &report.problem}) *text = reader.text();
  report.status = reader.number<lockstep_status>();
  report.loss = reader.number<double>();
  report.weight = reader.number<double>();
  return report;
}

std::string rank_text(const Party& party, size_t rank) {
  return "rank " + (party.numbers.empty() ? std::to_string(rank) : std::to_string(party.numbers.at(rank)));
}

/// The first lines that differ, as the two ranks' settings. A line is a name and a value.
std::pair<std::string, std::string> first_difference(const std::string& one, const std::string& other) {
  const auto without = [](std::vector<std::string> lines, const std::vector<std::string>& others) {
    std::erase_if(
        lines, [&](const std::string& line) { return std::find(others.begin(), others.end(), line) != others.end(); });
    return lines;
  };
  const std::vector<std::string> all = lines_of(one), all_others = lines_of(other);
  const std::vector<std::string> mine = without(all, all_others), theirs = without(all_others, all);
  const auto name_of = [](const std::string& line) { return line.substr(0, line.find(' ')); };
  if (mine.empty()) return theirs.empty() ? std::pair(one, other) : std::pair(std::string("none"), theirs[0]);
  if (mine.size() == 1 && theirs.size() == 1) return {mine[0], theirs[0]};
  for (const std::string& line : theirs)
    if (name_of(line) == name_of(mine[0])) return {mine[0], line};
  return {mine[0], "none"};
}

void compare(const Party& party, const std::vector<Report>& reports, const std::exception_ptr& own, bool for_all) {
  const Report& first = reports.front();
  for (size_t rank = 1; rank < reports.size(); ++rank)
    if (reports[rank].call != first.call)
      throw StatusError(LOCKSTEP_MISMATCH, rank_text(party, rank) + " calls " + reports[rank].call + " while " +
                                               rank_text(party, 0) + " calls " + first.call + kSame);
  if (own) std::rethrow_exception(own);
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const Report& report = reports[rank];
    if (report.problem.empty()) continue;
    const bool same = for_all || report.status == LOCKSTEP_TRAIN_FILE_FAILED;
    throw StatusError(same ? report.status : LOCKSTEP_MISMATCH,
                      first.call + " failed on " + rank_text(party, rank) + ": " + report.problem);
  }
  for (size_t rank = 1; rank < reports.size(); ++rank)
    if (reports[rank].settings != first.settings) {
      const auto [expected, found] = first_difference(first.settings, reports[rank].settings);
      throw StatusError(LOCKSTEP_MISMATCH, first.call + ": " + rank_text(party, 0) + " has " + expected + ", but " +
                                               rank_text(party, rank) + " has " + found +
                                               "; they must be equal. Nothing was changed");
    }
}

std::chrono::milliseconds milliseconds(const char* function, const char* name, double seconds,
                                       std::chrono::milliseconds otherwise) {
  if (seconds == 0) return otherwise;
  if (!(seconds >= 0.001 && seconds <= 1e9))
    refuse(function, std::string("options->") + name + " is " + std::to_string(seconds) +
                         "; give seconds from 0.001 to 1e9, or 0 for the default");
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

void leave(const char* function, lockstep_train_world* handle) {
  const std::shared_ptr<World> world = worlds().find(function, handle);
  const Call call(function, *world);
  models().remove_all_of(world);
  replicas().remove_all_of(world);
  worlds().remove(handle);
}

lockstep_status join(const char* function, lockstep_train_world** world, const std::function<Context()>& context) {
  return guarded(LOCKSTEP_JOIN_FAILED, [&] {
    if (world == nullptr) refuse(function, "world is null; give a pointer for the handle");
    *world = nullptr;
    auto joined = std::make_shared<World>(context());
    if (joined->context.virtual_ranks() > 0)
      throw StatusError(LOCKSTEP_JOIN_FAILED,
                        std::string(function) +
                            ": the run has virtual ranks, which need the C++ loaders; start it without virtual ranks");
    *world = worlds().add(std::move(joined));
  });
}

}  // namespace

uintptr_t next_handle() {
  static constinit std::atomic<uintptr_t> last{0};
  return last.fetch_add(alignof(std::max_align_t)) + alignof(std::max_align_t);
}

Handles<World, lockstep_train_world>& worlds() {
  static auto* const all = new Handles<World, lockstep_train_world>("world");  // threads may outlive main()
  return *all;
}

Call::Call(const char* function, World& world) {
  const std::string problem = [&]() -> std::string {
    try {
      guard_ = std::make_unique<CallGuard>(world.caller, world.context.rank(), world.generation, function);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  }();
  if (!problem.empty()) throw StatusError(LOCKSTEP_INVALID_ARGUMENT, problem);
}

std::vector<Report> agree(const Party& party, Report report, const std::function<void(Report&)>& body) {
  std::exception_ptr own;
  try {
    body(report);
  } catch (...) {
    Failure failure = current_failure(LOCKSTEP_INVALID_ARGUMENT);
    if (failure.text.rfind("lockstep_", 0) != 0) failure.text = report.call + ": " + failure.text;
    report.problem = failure.text;
    report.status = failure.status;
    own = std::make_exception_ptr(StatusError(failure.status, failure.text));
  }
  const bool for_all = report.for_all;
  std::vector<Report> reports;
  if (party.group.world_size() == 1)
    reports.push_back(std::move(report));
  else
    for (const std::string& bytes : party.group.all_gather_bytes(packed(report))) reports.push_back(unpacked(bytes));
  compare(party, reports, own, for_all);
  return reports;
}

void or_tell(const Party& party, const std::string& call, const std::function<void()>& body) {
  try {
    body();
  } catch (...) {
    const std::exception_ptr own = std::current_exception();
    try {
      agree(party, {.call = call}, [&](Report&) { std::rethrow_exception(own); });
    } catch (...) {
      // The others were told, or are gone.
    }
    std::rethrow_exception(own);
  }
}

ContextOptions context_options(const char* function, const lockstep_train_options* given) {
  lockstep_train_options options{};
  if (given != nullptr) {
    if (given->size < sizeof options.size || given->size > 4096)
      refuse(function,
             "options->size is " + std::to_string(given->size) +
                 "; set it to sizeof(lockstep_train_options), and the other fields to zero or to the values you want");
    std::memcpy(&options, given, std::min(given->size, sizeof options));
  }
  if (options.threads < 0 || options.threads > 4096)
    refuse(function, "options->threads is " + std::to_string(options.threads) + "; give 1 to 4096, or 0");
  ContextOptions result;
  result.announce = false;
  result.join_timeout = milliseconds(function, "join_timeout_s", options.join_timeout_s, result.join_timeout);
  result.collective_timeout = milliseconds(function, "timeout_s", options.timeout_s, result.collective_timeout);
  result.threads = static_cast<int>(options.threads);
  if (options.seed != 0) result.seed = static_cast<uint64_t>(options.seed);
  return result;
}

}  // namespace lockstep::train_c

using namespace lockstep::train_c;

lockstep_status lockstep_train_join(const lockstep_train_options* options, lockstep_train_world** world) {
  return join("lockstep_train_join", world,
              [&] { return lockstep::Context(context_options("lockstep_train_join", options)); });
}

lockstep_status lockstep_train_join_mpi(const void* communicator, const lockstep_train_options* options,
                                        lockstep_train_world** world) {
  return join("lockstep_train_join_mpi", world, [&] {
    if (communicator == nullptr)
      refuse("lockstep_train_join_mpi", "communicator is null; give the address of an MPI_Comm");
    return join_mpi(communicator, /*is_fortran=*/false, context_options("lockstep_train_join_mpi", options));
  });
}

lockstep_status lockstep_train_join_mpi_f(int32_t communicator, const lockstep_train_options* options,
                                          lockstep_train_world** world) {
  return join("lockstep_train_join_mpi_f", world, [&] {
    return join_mpi(&communicator, /*is_fortran=*/true, context_options("lockstep_train_join_mpi_f", options));
  });
}

lockstep_status lockstep_train_leave(lockstep_train_world* world) {
  return guarded(LOCKSTEP_INVALID_ARGUMENT, [&] {
    if (world != nullptr) leave("lockstep_train_leave", world);
  });
}

int lockstep_train_rank(const lockstep_train_world* world) {
  const std::shared_ptr<World> found = worlds().find_or_null(world);
  return found == nullptr ? -1 : found->context.rank();
}

int lockstep_train_size(const lockstep_train_world* world) {
  const std::shared_ptr<World> found = worlds().find_or_null(world);
  return found == nullptr ? -1 : found->context.world_size();
}

lockstep_status lockstep_train_shard(const lockstep_train_world* world, int64_t* number, int64_t* count) {
  return guarded(LOCKSTEP_RANK_GONE, [&] {
    constexpr const char* kName = "lockstep_train_shard";
    const std::shared_ptr<World> found = worlds().find(kName, world);
    const Call call(kName, *found);
    if (number == nullptr || count == nullptr)
      refuse(kName, std::string(number == nullptr ? "number" : "count") + " is null; give a pointer for the number");
    const lockstep::Shard shard = lockstep::island_shard(found->context);
    *number = shard.rank;
    *count = shard.world_size;
  });
}

lockstep_status lockstep_train_stop_requested(lockstep_train_world* world, int* stop) {
  return guarded(LOCKSTEP_RANK_GONE, [&] {
    const std::shared_ptr<World> found = find_on_all("lockstep_train_stop_requested", worlds(), world);
    const Call call("lockstep_train_stop_requested", *found);
    agree(found->all, {.call = "lockstep_train_stop_requested"}, [&](Report& report) {
      if (stop == nullptr) refuse(report.call, "stop is null; give a pointer for the answer");
    });
    *stop = found->context.stop_requested() ? 1 : 0;
  });
}
