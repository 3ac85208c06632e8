#include <cmath>
#include <string>

#include "c/guarded.h"
#include "rank_page/rank_board.h"

// Each call is checked, shown on the rank's page, and passed to the core of the shared-memory engine.

namespace lockstep::c {
namespace {

using shm::OperationKind;
using State = std::shared_ptr<GroupState>;

constexpr int kDataTypes = LOCKSTEP_INT64 + 1, kOps = LOCKSTEP_XOR + 1;
static_assert(static_cast<int>(shm::DataType::kInt64) == LOCKSTEP_INT64 &&
              static_cast<int>(shm::DataType::kBFloat16) == LOCKSTEP_BFLOAT16);
static_assert(static_cast<int>(shm::ReduceOp::kXor) == LOCKSTEP_XOR &&
              static_cast<int>(shm::ReduceOp::kMax) == LOCKSTEP_MAX);

/// Operations of this process in all groups: their numbers on its page.
std::atomic<uint64_t> operations{0};

}  // namespace

uint64_t note_start(const char* function, lockstep_dtype dtype, int64_t count) {
  // Without a locked instruction: threads with groups of their own may draw the same number, as the page allows.
  const uint64_t number = operations.load(std::memory_order_relaxed) + 1;
  operations.store(number, std::memory_order_relaxed);
  constexpr size_t kPrefix = sizeof "lockstep_" - 1;
  own_page().start_operation(number, function + kPrefix, shm::name(static_cast<shm::DataType>(dtype)), count, &count, 1,
                             coarse_now());
  return number;
}

namespace {

int64_t checked(const char* function, int64_t count, lockstep_dtype dtype) {
  if (dtype < 0 || dtype >= kDataTypes)
    refuse(function, "there is no dtype " + std::to_string(dtype) + "; use one of LOCKSTEP_FLOAT32 to LOCKSTEP_INT64");
  if (count < 0) refuse(function, "the count is " + std::to_string(count) + "; it must not be negative");
  if (static_cast<uint64_t>(count) > shm::kMaxCount)
    refuse(function, std::to_string(count) + " elements are more than one call can take, at most " +
                         std::to_string(shm::kMaxCount));
  return count;
}

void check_op(const char* function, lockstep_op op, lockstep_dtype dtype) {
  if (op < 0 || op >= kOps)
    refuse(function, "there is no op " + std::to_string(op) + "; use one of LOCKSTEP_SUM to LOCKSTEP_XOR");
  if (op >= LOCKSTEP_AND && dtype <= LOCKSTEP_BFLOAT16)
    refuse(function, std::string(shm::name(static_cast<shm::ReduceOp>(op))) + " works on integers, not on " +
                         shm::name(static_cast<shm::DataType>(dtype)));
}

void check_rank(const char* function, const State& state, const char* role, int rank) {
  if (rank < 0 || rank >= state->group.size())
    refuse(function, std::string("the ") + role + " is " + std::to_string(rank) + ", but this group has ranks 0 to " +
                         std::to_string(state->group.size() - 1));
}

/// `needed`: this rank reads or writes the memory.
void check_memory(const char* function, const char* role, const void* memory, bool needed) {
  if (needed && memory == nullptr) refuse(function, std::string("the ") + role + " is null");
}

/// Starts a collective and waits for it, unless its request goes to the caller.
void run(const State& state, shm::Request what, const Use& use, lockstep_request** request) {
  struct {
    const Use& use;
    uint64_t number = 0;
    void start() { number = note_start(use.function, use.dtype, use.count); }
  } note{use};
  if (request != nullptr) {
    *request = nullptr;
    note.start();
    *request =
        make_request({.state = state, .work = state->group.start(std::move(what)), .number = note.number, .use = use});
    return;
  }
  state->group.run(std::move(what), state->timeout, [&note] { note.start(); });
  own_page().finish_operation(note.number);
}

/// A collective with its memory, and the common checks.
struct Call {
  OperationKind kind;
  const void* input;
  void* output;
  int64_t count;
  lockstep_dtype dtype;
  lockstep_op op = LOCKSTEP_SUM;
  int root = 0;
};

bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  return MemoryRange{a, a_bytes}.overlaps({b, b_bytes});
}

/// Input and output share no memory, except that both may be one block, and this rank's own block may be in place.
void check_apart(const char* function, const State& state, const Call& call) {
  const auto size = static_cast<size_t>(state->group.size()), rank = static_cast<size_t>(state->group.rank());
  const size_t block = static_cast<size_t>(call.count) * element_bytes(static_cast<shm::DataType>(call.dtype));
  const auto* input = static_cast<const std::byte*>(call.input);
  const auto* output = static_cast<const std::byte*>(call.output);
  bool wrong = false;
  switch (call.kind) {
    case OperationKind::kAllReduce:
    case OperationKind::kReduce:
      wrong = input != output && overlap(input, block, output, block);
      break;
    case OperationKind::kAllGather:
    case OperationKind::kGather:
      wrong = overlap(input, block, output, size * block) && input != output + rank * block;
      break;
    case OperationKind::kScatter:
    case OperationKind::kReduceScatter:
      wrong = overlap(input, size * block, output, block) && output != input + rank * block;
      break;
    case OperationKind::kAllToAll:
      wrong = overlap(input, size * block, output, size * block);
      break;
    default:
      break;
  }
  if (wrong) refuse(function, "input and output overlap; give each its own memory");
}

/// What a request does on this rank.
Use use_of(const char* function, const State& state, const Call& call, bool reads, bool writes) {
  const size_t block = static_cast<size_t>(call.count) * element_bytes(static_cast<shm::DataType>(call.dtype));
  const size_t all = static_cast<size_t>(state->group.size()) * block;
  const bool many_in = call.kind == OperationKind::kScatter || call.kind == OperationKind::kReduceScatter ||
                       call.kind == OperationKind::kAllToAll;
  const bool many_out = call.kind == OperationKind::kGather || call.kind == OperationKind::kAllGather ||
                        call.kind == OperationKind::kAllToAll;
  Use use{.function = function, .dtype = call.dtype, .count = call.count};
  if (reads) use.read = {call.input, many_in ? all : block};
  if (writes) use.written = {call.output, many_out ? all : block};
  return use;
}

void run(const char* function, const State& state, const Call& call, lockstep_request** request) {
  const bool some = checked(function, call.count, call.dtype) > 0;
  if (shm::is_reduction(call.kind)) check_op(function, call.op, call.dtype);
  if (shm::has_root(call.kind)) check_rank(function, state, "root", call.root);
  const bool root = call.root == state->group.rank();
  const bool reads = call.kind != OperationKind::kScatter || root;
  const bool writes = (call.kind != OperationKind::kReduce && call.kind != OperationKind::kGather) || root;
  if (call.kind == OperationKind::kBroadcast) {
    check_memory(function, "memory", call.output, some);
  } else {
    check_memory(function, "input", call.input, some && reads);
    check_memory(function, "output", call.output, some && writes);
    if (reads && writes) check_apart(function, state, call);
  }
  run(state,
      {.kind = call.kind,
       .type = static_cast<shm::DataType>(call.dtype),
       .op = static_cast<shm::ReduceOp>(call.op),
       .root = call.root,
       .count = static_cast<size_t>(call.count),
       .input = call.input,
       .output = writes ? call.output : nullptr},
      request == nullptr ? Use{.function = function, .dtype = call.dtype, .count = call.count}
                         : use_of(function, state, call, reads, writes),
      request);
}

lockstep_status collective(const char* function, lockstep_group* group, lockstep_request** request, const Call& call) {
  return guarded(function, group, [&](const State& state) { run(function, state, call, request); });
}

std::vector<size_t> checked_counts(const char* function, const char* role, const int64_t* counts, int size,
                                   lockstep_dtype dtype, int64_t& sum) {
  if (counts == nullptr) refuse(function, std::string("the ") + role + " counts are null");
  std::vector<size_t> all;
  for (int r = 0; r < size; ++r) {
    sum += checked(function, counts[r], dtype);
    all.push_back(static_cast<size_t>(counts[r]));
  }
  return all;
}

void message(const char* function, const State& state, const void* data, int64_t count, lockstep_dtype dtype, int peer,
             bool any) {
  check_memory(function, "memory", data, checked(function, count, dtype) > 0);
  if (any && peer == LOCKSTEP_ANY_RANK) {
    if (state->group.size() == 1) refuse(function, "the group has no other rank from which a message could come");
    return;
  }
  check_rank(function, state, "other rank", peer);
  if (peer == state->group.rank()) refuse(function, "a rank cannot exchange messages with itself");
}

bool is_done(const PendingRequest& request) {
  shm::Communicator& group = request.state->group;
  if (!request.work->done()) group.progress();
  if (!request.work->done() && Clock::now() - *request.tested_since >= request.state->timeout)
    group.wait(*request.work, request.state->timeout, *request.tested_since);  // throws that it has timed out
  return request.work->done();
}

void wait(const PendingRequest& request, double seconds) {
  if (std::isnan(seconds)) refuse("lockstep_wait", "the number of seconds is not a number");
  auto limit = request.state->timeout;
  if (seconds >= 0 && seconds < 1e8) limit = std::chrono::milliseconds(std::llround(1000 * seconds));
  own_page().set_waiting(true);
  try {
    request.state->group.wait(*request.work, limit);
  } catch (...) {
    own_page().set_waiting(false);
    throw;
  }
  own_page().set_waiting(false);
  own_page().finish_operation(request.number);
  if (request.source != nullptr) *request.source = static_cast<shm::Message&>(*request.work).source();
}

}  // namespace
}  // namespace lockstep::c

using namespace lockstep::c;

lockstep_status lockstep_barrier(lockstep_group* group, lockstep_request** request) {
  return collective("lockstep_barrier", group, request, {OperationKind::kBarrier, nullptr, nullptr, 0, LOCKSTEP_UINT8});
}

lockstep_status lockstep_all_reduce(lockstep_group* group, const void* input, void* output, int64_t count,
                                    lockstep_dtype dtype, lockstep_op op, lockstep_request** request) {
  return collective("lockstep_all_reduce", group, request,
                    {OperationKind::kAllReduce, input, output, count, dtype, op});
}

lockstep_status lockstep_reduce(lockstep_group* group, const void* input, void* output, int64_t count,
                                lockstep_dtype dtype, lockstep_op op, int root, lockstep_request** request) {
  return collective("lockstep_reduce", group, request, {OperationKind::kReduce, input, output, count, dtype, op, root});
}

lockstep_status lockstep_reduce_scatter(lockstep_group* group, const void* input, void* output, int64_t count,
                                        lockstep_dtype dtype, lockstep_op op, lockstep_request** request) {
  return collective("lockstep_reduce_scatter", group, request,
                    {OperationKind::kReduceScatter, input, output, count, dtype, op});
}

lockstep_status lockstep_broadcast(lockstep_group* group, void* data, int64_t count, lockstep_dtype dtype, int root,
                                   lockstep_request** request) {
  return collective("lockstep_broadcast", group, request,
                    {OperationKind::kBroadcast, data, data, count, dtype, LOCKSTEP_SUM, root});
}

lockstep_status lockstep_all_gather(lockstep_group* group, const void* input, void* output, int64_t count,
                                    lockstep_dtype dtype, lockstep_request** request) {
  return collective("lockstep_all_gather", group, request, {OperationKind::kAllGather, input, output, count, dtype});
}

lockstep_status lockstep_gather(lockstep_group* group, const void* input, void* output, int64_t count,
                                lockstep_dtype dtype, int root, lockstep_request** request) {
  return collective("lockstep_gather", group, request,
                    {OperationKind::kGather, input, output, count, dtype, LOCKSTEP_SUM, root});
}

lockstep_status lockstep_scatter(lockstep_group* group, const void* input, void* output, int64_t count,
                                 lockstep_dtype dtype, int root, lockstep_request** request) {
  return collective("lockstep_scatter", group, request,
                    {OperationKind::kScatter, input, output, count, dtype, LOCKSTEP_SUM, root});
}

lockstep_status lockstep_all_to_all(lockstep_group* group, const void* input, void* output, int64_t count,
                                    lockstep_dtype dtype, lockstep_request** request) {
  return collective("lockstep_all_to_all", group, request, {OperationKind::kAllToAll, input, output, count, dtype});
}

lockstep_status lockstep_all_to_all_v(lockstep_group* group, const void* input, const int64_t* send_counts,
                                      void* output, const int64_t* receive_counts, lockstep_dtype dtype,
                                      lockstep_request** request) {
  const char* function = "lockstep_all_to_all_v";
  return guarded(function, group, [&](const State& state) {
    lockstep::shm::Request what{.kind = OperationKind::kAllToAllUneven,
                                .type = static_cast<lockstep::shm::DataType>(dtype),
                                .input = input,
                                .output = output};
    int64_t sent = 0, received = 0;
    const int size = state->group.size();
    what.make_pieces().send_counts = checked_counts(function, "send", send_counts, size, dtype, sent);
    what.make_pieces().receive_counts = checked_counts(function, "receive", receive_counts, size, dtype, received);
    check_memory(function, "input", input, sent > 0);
    check_memory(function, "output", output, received > 0);
    const size_t element = element_bytes(what.type);
    if (overlap(input, static_cast<size_t>(sent) * element, output, static_cast<size_t>(received) * element))
      refuse(function, "input and output overlap; give each its own memory");
    run(state, std::move(what),
        {.function = function,
         .dtype = dtype,
         .count = sent,
         .read = {input, static_cast<size_t>(sent) * element},
         .written = {output, static_cast<size_t>(received) * element}},
        request);
  });
}

lockstep_status lockstep_send(lockstep_group* group, const void* data, int64_t count, lockstep_dtype dtype, int to,
                              int tag, lockstep_request** request) {
  return guarded("lockstep_send", group, [&](const State& state) {
    message("lockstep_send", state, data, count, dtype, to, /*any=*/false);
    if (request != nullptr) *request = nullptr;
    const auto type = static_cast<lockstep::shm::DataType>(dtype);
    const auto bytes = static_cast<size_t>(count) * element_bytes(type);
    // The page can wait; the receiver cannot.
    auto sent = request == nullptr ? state->group.send_at_once(data, bytes, to, tag, type)
                                   : state->group.send(data, bytes, to, tag, nullptr, type);
    const uint64_t number = note_start("lockstep_send", dtype, count);
    if (request != nullptr) {
      const Use use{.function = "lockstep_send", .dtype = dtype, .count = count, .read = {data, bytes}};
      *request = make_request({.state = state, .work = std::move(sent), .number = number, .use = use});
      return;
    }
    if (sent != nullptr) state->group.wait(*sent, state->timeout);
    lockstep::own_page().finish_operation(number);
  });
}

lockstep_status lockstep_recv(lockstep_group* group, void* data, int64_t count, lockstep_dtype dtype, int from, int tag,
                              int* source, lockstep_request** request) {
  return guarded("lockstep_recv", group, [&](const State& state) {
    message("lockstep_recv", state, data, count, dtype, from, /*any=*/true);
    if (request != nullptr) *request = nullptr;
    const auto type = static_cast<lockstep::shm::DataType>(dtype);
    const uint64_t number = note_start("lockstep_recv", dtype, count);
    const auto bytes = static_cast<size_t>(count) * element_bytes(type);
    if (request != nullptr) {
      const Use use{.function = "lockstep_recv", .dtype = dtype, .count = count, .written = {data, bytes}};
      auto received = state->group.receive(data, bytes, from, tag, nullptr, type);
      *request =
          make_request({.state = state, .work = std::move(received), .number = number, .source = source, .use = use});
      return;
    }
    const int sender = state->group.receive_now(data, bytes, from, tag, type, state->timeout);
    lockstep::own_page().finish_operation(number);
    if (source != nullptr) *source = sender;
  });
}

lockstep_status lockstep_test(lockstep_request* request, int* done) {
  PendingRequest tested;
  const lockstep_status status = guarded(nullptr, LOCKSTEP_INVALID_ARGUMENT, [&] {
    if (done == nullptr) refuse("lockstep_test", "done is null");
    tested = test_request("lockstep_test", request);
  });
  if (status != LOCKSTEP_OK) return status;
  return guarded(tested.state.get(), LOCKSTEP_INVALID_ARGUMENT, [&] {
    *done = 1;  // if it fails
    *done = is_done(tested) ? 1 : 0;
    if (tested.work->failed()) throw lockstep::Error(tested.work->error());
  });
}

lockstep_status lockstep_wait(lockstep_request** request, double seconds) {
  PendingRequest waited;
  const lockstep_status status = guarded(nullptr, LOCKSTEP_INVALID_ARGUMENT, [&] {
    waited = wait_for_request("lockstep_wait", request == nullptr ? nullptr : *request);
  });
  if (status != LOCKSTEP_OK) return status;
  const lockstep_request* const ended = std::exchange(*request, nullptr);
  const lockstep_status result = guarded(waited.state.get(), LOCKSTEP_INVALID_ARGUMENT, [&] { wait(waited, seconds); });
  end_request(ended);  // until then lockstep_free() refuses its memory
  return result;
}
