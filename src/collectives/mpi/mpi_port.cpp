#include "collectives/mpi/mpi_port.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include <lockstep/error.h>

#include "base/clock.h"

namespace lockstep::mpi_engine {
namespace {

void check(int code, const std::string& what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(what + " failed: " + std::string(text, static_cast<size_t>(length)));
}

/// MPI's handles are numbers or pointers.
template <typename Native>
Port::Handle to_handle(Native native) {
  static_assert(sizeof native <= sizeof(Port::Handle));
  Port::Handle handle = 0;
  std::memcpy(&handle, &native, sizeof native);
  return handle;
}
MPI_Comm to_communicator(Port::Handle handle) {
  MPI_Comm native;
  std::memcpy(&native, &handle, sizeof native);
  return native;
}
MPI_Request to_request(Port::Handle handle) {
  MPI_Request native;
  std::memcpy(&native, &handle, sizeof native);
  return native;
}

/// A number of bytes in MPI's terms, whose counts are ints.
class Bytes {
 public:
  explicit Bytes(size_t bytes) {
    if (bytes <= kMost) {
      count_ = static_cast<int>(bytes);
      return;
    }
    MPI_Datatype block;
    MPI_Type_contiguous(kBlock, MPI_BYTE, &block);
    const int lengths[] = {static_cast<int>(bytes / kBlock), static_cast<int>(bytes % kBlock)};
    const MPI_Aint places[] = {0, static_cast<MPI_Aint>(bytes - bytes % kBlock)};
    const MPI_Datatype types[] = {block, MPI_BYTE};
    MPI_Type_create_struct(2, lengths, places, types, &type_);
    MPI_Type_commit(&type_);
    MPI_Type_free(&block);
    count_ = 1;
  }
  /// A type may be freed while one of its messages is in flight.
  ~Bytes() {
    if (type_ != MPI_BYTE) MPI_Type_free(&type_);
  }
  Bytes(const Bytes&) = delete;

  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  static constexpr size_t kMost = size_t{1} << 30;
  static constexpr int kBlock = 1 << 20;
  int count_ = 0;
  MPI_Datatype type_ = MPI_BYTE;
};

class MpiPort final : public Port {
 public:
  MpiPort(MPI_Comm duplicate, int level) : everybody_(duplicate), level_(level) {
    MPI_Comm_set_errhandler(everybody_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(everybody_, &rank_);
    MPI_Comm_size(everybody_, &world_size_);
    int* largest = nullptr;
    int found = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest, &found);
    if (found) largest_tag_ = *largest;
  }
  MpiPort(const MpiPort&) = delete;

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  bool takes_any_thread() const override { return level_ == MPI_THREAD_MULTIPLE; }
  const char* thread_level() const override {
    return level_ == MPI_THREAD_MULTIPLE     ? "MPI_THREAD_MULTIPLE"
           : level_ == MPI_THREAD_SERIALIZED ? "MPI_THREAD_SERIALIZED"
           : level_ == MPI_THREAD_FUNNELED   ? "MPI_THREAD_FUNNELED"
                                             : "MPI_THREAD_SINGLE";
  }
  bool is_over() const override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    return finalized != 0;
  }
  int largest_tag() const override { return largest_tag_; }
  Handle everybody() const override { return to_handle(everybody_); }

  Handle open(const std::vector<int>& ranks) override {
    MPI_Group all, chosen;
    MPI_Comm result;
    check(MPI_Comm_group(everybody_, &all), "MPI_Comm_group");
    check(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &chosen), "MPI_Group_incl");
    const int code = MPI_Comm_create_group(everybody_, chosen, 0, &result);
    MPI_Group_free(&chosen);
    MPI_Group_free(&all);
    check(code, "MPI_Comm_create_group");
    MPI_Comm_set_errhandler(result, MPI_ERRORS_RETURN);
    wait_until_open(ranks);
    return to_handle(result);
  }
  void close(Handle communicator) override {
    MPI_Comm native = to_communicator(communicator);
    int there = 0;
    if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, native, &there, MPI_STATUS_IGNORE) != MPI_SUCCESS || there) return;
    MPI_Comm_free(&native);
  }

  Handle send(Handle communicator, const void* data, size_t bytes, int to, int tag) override {
    const Bytes amount(bytes);
    MPI_Request request;
    check(MPI_Isend(data, amount.count(), amount.type(), to, tag, to_communicator(communicator), &request),
          "MPI_Isend");
    return to_handle(request);
  }
  Handle receive(Handle communicator, void* data, size_t bytes, int from, int tag) override {
    const Bytes amount(bytes);
    MPI_Request request;
    check(MPI_Irecv(data, amount.count(), amount.type(), from, tag, to_communicator(communicator), &request),
          "MPI_Irecv");
    return to_handle(request);
  }

  bool test(Handle& message) override {
    MPI_Request request = to_request(message);
    int done = 0;
    const int code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    message = to_handle(request);
    check(code, "a message of MPI");
    return done != 0;
  }

  void give_up(Handle& message, bool is_sent) override {
    MPI_Request request = to_request(message);
    if (!is_sent) {
      // Awaits the rest of a message that is arriving, unless its sender has stopped in the middle.
      MPI_Cancel(&request);
      int done = 0;
      for (const auto since = Clock::now(); done == 0 && seconds_since(since) < 0.1;)
        if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
      if (done != 0) return;
    }
    MPI_Request_free(&request);
  }

  std::optional<Arrival> arrival(Handle communicator, int tag) override {
    int there = 0, bytes = 0;
    MPI_Status status;
    check(MPI_Iprobe(MPI_ANY_SOURCE, tag, to_communicator(communicator), &there, &status), "MPI_Iprobe");
    if (there == 0) return std::nullopt;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    return Arrival{.from = status.MPI_SOURCE, .bytes = static_cast<size_t>(bytes)};
  }

 private:
  /// Open MPI 4.1 crashes when several messages of a communicator arrive before it exists. So no rank uses one before
  /// all have it.
  void wait_until_open(const std::vector<int>& ranks) const {
    std::vector<MPI_Request> requests;
    for (const int other : ranks) {
      if (other == rank_) continue;
      check(MPI_Irecv(nullptr, 0, MPI_BYTE, other, kOpenTag, everybody_, &requests.emplace_back()), "MPI_Irecv");
      check(MPI_Isend(nullptr, 0, MPI_BYTE, other, kOpenTag, everybody_, &requests.emplace_back()), "MPI_Isend");
    }
    check(MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE), "MPI_Waitall");
  }

  static constexpr int kOpenTag = 2;  // the pump's notes have 1

  const MPI_Comm everybody_;
  const int level_;
  int rank_ = 0, world_size_ = 1;
  int largest_tag_ = 32767;
};

/// The level that MPI was initialized with. Throws unless this thread may call it.
int thread_level() {
  int initialized = 0, finalized = 0, level = MPI_THREAD_SINGLE, is_main = 0;
  MPI_Initialized(&initialized);
  if (!initialized) throw Error("MPI is not initialized; call MPI_Init() or MPI_Init_thread() before mpi_context()");
  MPI_Finalized(&finalized);
  if (finalized) throw Error("MPI has been finalized; call mpi_context() before MPI_Finalize()");
  MPI_Query_thread(&level);
  MPI_Is_thread_main(&is_main);
  if (level < MPI_THREAD_SERIALIZED && !is_main)
    throw Error(
        "mpi_context() was called by a thread other than the one that initialized MPI, which alone may call it; call "
        "it there, or initialize MPI with MPI_Init_thread(..., MPI_THREAD_MULTIPLE, ...)");
  return level;
}

/// Whether all ranks have arrived by the deadline.
bool meet(MPI_Comm communicator, const Deadline& deadline) {
  MPI_Request request;
  check(MPI_Ibarrier(communicator, &request), "MPI_Ibarrier");
  for (int done = 0;; std::this_thread::yield()) {
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Ibarrier");
    if (done || deadline.passed()) return done != 0;
  }
}

}  // namespace

std::unique_ptr<Port> open_port(MPI_Comm communicator, std::chrono::milliseconds timeout) {
  const int level = thread_level();
  if (communicator == MPI_COMM_NULL) throw Error("mpi_context(): this rank is not in the communicator (MPI_COMM_NULL)");
  int inter = 0;
  MPI_Comm_test_inter(communicator, &inter);
  if (inter) throw Error("mpi_context() takes an intracommunicator; merge this one first (MPI_Intercomm_merge)");
  // MPI_Comm_dup waits forever. MPI_Comm_idup would not, but crashes in Open MPI 4.1.
  const Deadline deadline(timeout);
  if (!meet(communicator, deadline))
    throw Error("after " + std::to_string(timeout.count() / 1000) +
                " s some ranks of the communicator have not called mpi_context(); call it on every rank, or raise "
                "LOCKSTEP_JOIN_TIMEOUT_S if they start slowly");
  MPI_Comm duplicate;
  check(MPI_Comm_dup(communicator, &duplicate), "MPI_Comm_dup");
  if (!meet(communicator, deadline)) throw Error("a rank was lost while MPI_Comm_dup duplicated the communicator");
  return std::make_unique<MpiPort>(duplicate, level);
}

}  // namespace lockstep::mpi_engine
