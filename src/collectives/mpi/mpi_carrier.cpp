#include "collectives/mpi/mpi_carrier.h"

#include <optional>

#include "base/error.h"
#include "collectives/operand.h"

namespace lockstep::mpi_engine {
namespace {

/// A rank's messages may arrive after the news of its end.
constexpr std::chrono::milliseconds kGrace{200};

class MpiWork final : public c10d::Work {
 public:
  MpiWork(MessagePtr message, std::shared_ptr<Pump> pump, std::shared_ptr<Endings> endings,
          std::chrono::milliseconds timeout)
      : message_(std::move(message)), pump_(std::move(pump)), endings_(std::move(endings)), timeout_(timeout) {}

  bool isCompleted() override {
    if (!message_->is_over()) pump_->poll();
    return message_->is_over();
  }
  bool isSuccess() const override {
    return message_->state.load(std::memory_order_acquire) == Message::State::kArrived;
  }
  void abort() override { is_aborted_ = true; }

  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout == kNoTimeout) timeout = timeout_;
    const auto since = Clock::now();
    std::optional<Clock::time_point> hopeless;
    while (!message_->is_over()) {
      pump_->make(since);
      if (message_->is_over()) break;
      if (is_aborted_) stop("interrupted");
      const std::string reason = endings_->reason(message_->peer);
      const auto now = Clock::now();
      if (!reason.empty() && now - hopeless.value_or(now) >= kGrace) stop(reason);
      if (!reason.empty() && !hopeless) hopeless = now;
      if (now - since >= timeout) stop("it did not arrive within " + std::to_string(timeout.count() / 1000.0) + " s");
    }
    if (!isSuccess()) throw Error(message_->error);
    return true;
  }

 private:
  /// Throws, unless it has ended after all.
  void stop(const std::string& why) {
    pump_->give_up(message_);
    if (!isSuccess()) throw Error(why);
  }

  const MessagePtr message_;
  const std::shared_ptr<Pump> pump_;
  const std::shared_ptr<Endings> endings_;
  const std::chrono::milliseconds timeout_;
  std::atomic<bool> is_aborted_{false};
};

/// MPI's tags may have as few as 15 bits. Two operations may share a folded tag: a group's operations run one after the
/// other, so ranks that disagree still get their error.
int fold(int tag, int largest) {
  if (tag <= largest) return tag;
  constexpr uint32_t kTotals = 1u << 30;  // marks an operation's second tag, in Reduction
  int bits = 1;
  while ((int64_t{2} << bits) - 1 <= largest) ++bits;
  const auto word = static_cast<uint32_t>(tag);
  const uint32_t mixed = (word & (kTotals - 1)) * 2654435769u >> (32 - (bits - 1));
  return static_cast<int>(mixed | (word & kTotals ? 1u << (bits - 1) : 0));
}

}  // namespace

Endings::Endings(std::shared_ptr<Pump> pump, c10::intrusive_ptr<c10d::Store> store, int rank, int world_size)
    : pump_(std::move(pump)), store_(std::move(store)), rank_(rank), how_(static_cast<size_t>(world_size)) {}

void Endings::tell(const char* how) {
  {
    const MutexLock lock(mutex_);
    if (told_) return;
    told_ = true;
  }
  store_->set("ended/" + std::to_string(rank_), std::string(how));
}

std::string Endings::reason(int peer) {
  const MutexLock lock(mutex_);
  if (const uint64_t version = pump_->board().version(); version != seen_) {
    seen_ = version;
    for (size_t rank = 0; rank < how_.size(); ++rank) {
      const std::string key = "ended/" + std::to_string(rank);
      if (static_cast<int>(rank) == rank_ || !how_[rank].empty() || !store_->check({key})) continue;
      how_[rank] = store_->get_to_str(key);
      if (how_[rank] == "failed") failed_ = static_cast<int>(rank);
    }
  }
  if (failed_ >= 0) return "rank " + std::to_string(failed_) + " has ended the group";
  if (!how_[static_cast<size_t>(peer)].empty()) return "rank " + std::to_string(peer) + " has left";
  return "";
}

MpiCarrier::MpiCarrier(std::shared_ptr<Pump> pump, std::shared_ptr<Endings> endings, const std::vector<int>& members,
                       Tags tags, std::chrono::milliseconds timeout)
    : pump_(std::move(pump)),
      endings_(std::move(endings)),
      tags_(tags),
      timeout_(timeout),
      communicator_(pump_->open(members)) {}

c10::intrusive_ptr<c10d::Work> MpiCarrier::send(const at::Tensor& bytes, int to, int tag) {
  return start(bytes, to, tag, /*is_sent=*/true);
}

c10::intrusive_ptr<c10d::Work> MpiCarrier::receive(const at::Tensor& bytes, int from, int tag) {
  return start(bytes, from, tag, /*is_sent=*/false);
}

void MpiCarrier::break_off(int /*some_peer*/) { endings_->fail(); }

c10::intrusive_ptr<c10d::Work> MpiCarrier::start(const at::Tensor& bytes, int peer, int tag, bool is_sent) {
  TORCH_CHECK(is_plain(bytes), "messages are contiguous tensors on the CPU");
  TORCH_CHECK(tag >= 0 && (tags_ == Tags::kEngines || tag <= pump_->largest_tag()),
              "a message's tag over this MPI is at least 0 and at most ", pump_->largest_tag(), "; it is ", tag);
  auto message = std::make_shared<Message>();
  message->communicator = communicator_;
  message->data = bytes.numel() == 0 ? nullptr : bytes.data_ptr();
  message->bytes = bytes.nbytes();
  message->peer = peer;
  message->tag = fold(tag, pump_->largest_tag());
  message->is_sent = is_sent;
  message->keep = std::make_shared<at::Tensor>(bytes);
  pump_->post(message);
  return c10::make_intrusive<MpiWork>(std::move(message), pump_, endings_, timeout_);
}

}  // namespace lockstep::mpi_engine
