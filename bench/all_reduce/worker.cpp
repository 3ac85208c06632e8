#include "worker.h"

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sstream>
#include <stdexcept>

#include "workers/serve.h"

namespace lockstep::bench {
namespace {

/// Buffers up to this size stay for the next command; larger ones are given back, as six systems share the machine.
constexpr size_t kKeepBytes = size_t{64} << 20;
constexpr size_t kPatternPeriod = 13;

/// Item `i` of rank `rank` in trial `trial`: a small whole number, so that sums are exact even in bf16.
int pattern(size_t i, int rank, int trial) {
  const auto shift = static_cast<size_t>(3 * rank + 5 * trial);
  return static_cast<int>((7 * i + shift) % kPatternPeriod) - 5;
}

void store(std::byte* at, size_t i, Dtype dtype, int value) {
  const auto number = static_cast<float>(value);
  if (dtype == Dtype::kFp32) {
    std::memcpy(at + 4 * i, &number, 4);
  } else {
    const auto half = static_cast<uint16_t>(std::bit_cast<uint32_t>(number) >> 16);
    std::memcpy(at + 2 * i, &half, 2);
  }
}

float load(const std::byte* at, size_t i, Dtype dtype) {
  if (dtype == Dtype::kFp32) {
    float number = 0;
    std::memcpy(&number, at + 4 * i, 4);
    return number;
  }
  uint16_t half = 0;
  std::memcpy(&half, at + 2 * i, 2);
  return std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
}

std::shared_ptr<std::byte> allocate_private(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), [bytes](std::byte* at) { munmap(at, bytes); }};
}

/// Input and output of one placement, grown on demand. Always zero outside a check, so sums stay finite however often
/// an operation is repeated.
class Memory {
 public:
  Memory(Engine& engine, Placement placement) : engine_(engine), placement_(placement) {}

  void reserve(size_t bytes, bool two) {
    if (bytes_ < bytes) input_.reset(), output_.reset(), bytes_ = bytes;
    if (!input_) input_ = allocate();
    if (two && !output_) output_ = allocate();
  }
  void give_back_if_large() {
    if (bytes_ > kKeepBytes) input_.reset(), output_.reset(), bytes_ = 0;
  }
  std::byte* input() const { return input_.get(); }
  std::byte* output() const { return output_.get(); }

 private:
  std::shared_ptr<std::byte> allocate() {
    auto memory = placement_ == Placement::kResident ? engine_.allocate_resident(bytes_) : allocate_private(bytes_);
    std::memset(memory.get(), 0, bytes_);
    return memory;
  }

  Engine& engine_;
  const Placement placement_;
  size_t bytes_ = 0;
  std::shared_ptr<std::byte> input_;
  std::shared_ptr<std::byte> output_;
};

class Worker {
 public:
  explicit Worker(Engine& engine) : engine_(engine) {}

  std::string answer(const std::string& command) {
    std::istringstream in(command);
    std::string verb;
    in >> verb;
    const auto wanted = Case::parse(in);
    if (!wanted) return "wrong command: " + command;
    if (const std::string reason = engine_.why_not(*wanted); !reason.empty()) return "no " + reason;
    Memory& memory = wanted->placement == Placement::kResident ? resident_ : private_;
    memory.reserve(wanted->bytes, !wanted->in_place());
    std::byte* const output = wanted->in_place() ? memory.input() : memory.output();
    engine_.prepare(*wanted, memory.input(), output);
    std::string result;
    if (verb == "check") {
      result = check(*wanted, memory.input(), output);
    } else {
      size_t warm = 0, samples = 0, batch = 1;
      in >> warm >> samples >> batch;
      result = time(warm, samples, batch);
    }
    memory.give_back_if_large();
    return result;
  }

 private:
  /// Fills, runs and compares; several times where that is cheap, since a stale buffer shows only the second time.
  std::string check(const Case& wanted, std::byte* input, std::byte* output) {
    const int ranks = engine_.world_size();
    const size_t in_items = wanted.operation == Operation::kAllGather ? wanted.share(ranks) : wanted.items(ranks);
    const size_t out_items = wanted.operation == Operation::kReduceScatter ? wanted.share(ranks) : wanted.items(ranks);
    const int trials = wanted.bytes <= (size_t{1} << 20) ? 4 : 1;
    std::string wrong;
    for (int trial = 1; trial <= trials; ++trial) {
      for (size_t i = 0; i < in_items; ++i) store(input, i, wanted.dtype, pattern(i, engine_.rank(), trial));
      engine_.barrier();
      engine_.run();
      for (size_t i = 0; i < out_items && wrong.empty(); ++i) {
        const float found = load(output, i, wanted.dtype);
        const auto expected = static_cast<float>(expect(wanted, i, trial));
        if (found != expected) {
          std::ostringstream text;
          text << "wrong rank " << engine_.rank() << ", item " << i << " of " << out_items << ", trial " << trial
               << ": expected " << expected << ", found " << found;
          wrong = text.str();
        }
      }
      engine_.barrier();
    }
    std::memset(input, 0, wanted.bytes);
    std::memset(output, 0, wanted.bytes);
    return wrong.empty() ? "ok" : wrong;
  }

  int expect(const Case& wanted, size_t i, int trial) const {
    const size_t share = wanted.share(engine_.world_size());
    switch (wanted.operation) {
      case Operation::kBroadcast:
        return pattern(i, 0, trial);
      case Operation::kAllGather:
        return pattern(i % share, static_cast<int>(i / share), trial);
      case Operation::kReduceScatter:
        i += share * static_cast<size_t>(engine_.rank());
        break;
      case Operation::kAllReduce:
        break;
    }
    int sum = 0;
    for (int rank = 0; rank < engine_.world_size(); ++rank) sum += pattern(i, rank, trial);
    return sum;
  }

  std::string time(size_t warm, size_t samples, size_t batch) {
    using Clock = std::chrono::steady_clock;
    for (size_t i = 0; i < warm; ++i) engine_.run();
    std::ostringstream text;
    text << "times";
    for (size_t sample = 0; sample < samples; ++sample) {
      engine_.barrier();
      const auto start = Clock::now();
      for (size_t i = 0; i < batch; ++i) engine_.run();
      const std::chrono::duration<double, std::nano> taken = Clock::now() - start;
      text << ' ' << taken.count() / static_cast<double>(batch);
    }
    return text.str();
  }

  Engine& engine_;
  Memory resident_{engine_, Placement::kResident};
  Memory private_{engine_, Placement::kPrivate};
};

}  // namespace

int serve(Engine& engine, int argc, char** argv) {
  Worker worker(engine);
  return serve_commands(argc, argv, engine.rank(), engine.version(),
                        [&](const std::string& command) { return worker.answer(command); });
}

}  // namespace lockstep::bench
