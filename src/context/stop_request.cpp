#include "context/stop_request.h"

#include <signal.h>
#include <unistd.h>

#include <ATen/ATen.h>

#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

// State that the handler may access: only lock-free words.
std::atomic<const RankBoard*> board{nullptr};
std::atomic<int> asked{0};
std::atomic<pid_t> listener{0};

/// Ends this process as a signal that must end the run at once would end any process.
void end_by(int signal) {
  ::signal(signal, SIG_DFL);
  ::raise(signal);  // delivered when the handler returns
}

void handle(int signal) {
  if (::getpid() != listener.load()) return end_by(signal);  // a forked child, which does not have the board
  const RankBoard* known = board.load();
  if (known != nullptr && known->head().stopping.load() != 0) return end_by(signal);
  if (asked.fetch_add(1) > 0) return end_by(signal);
  if (known != nullptr) StopAgreement::ask(*known);
}

void listen_to(int signal) {
  struct sigaction before {};
  if (::sigaction(signal, nullptr, &before) != 0 || before.sa_handler != SIG_DFL) return;
  struct sigaction action {};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  ::sigaction(signal, &action, nullptr);
}

}  // namespace

StopRequest::StopRequest() {
  listener = ::getpid();
  board = launchers_board();
  if (board != nullptr) agreement_.emplace(*board.load(), own_page());
  for (const int signal : {SIGTERM, SIGUSR1}) listen_to(signal);
}

bool StopRequest::heard(const Group& group) {
  const RankBoard* mine = launchers_board();
  const bool several_machines = mine != nullptr && mine->head().several_machines.load() != 0;
  if (agreement_ && mine != nullptr && !several_machines && mine->world_size() == group.world_size())
    return agreement_->should_stop();
  if (group.world_size() == 1) return asked.load() != 0;
  const bool told = several_machines && mine->head().stop_asked.load() != 0;
  const at::Tensor any = at::full({1}, told ? 1 : asked.load(), at::kInt);
  const OperationLabel label("stop_requested()");
  group.all_reduce(any, ReduceOp::kMax);
  const bool stop = any.item<int>() != 0;
  // The launcher reads there whether this program asks, and whether it knows.
  if (several_machines) {
    const uint64_t call = own_page().stop_calls().fetch_add(1) + 1;
    uint64_t none = 0;
    if (stop) mine->head().stop_at.compare_exchange_strong(none, call);
  }
  return stop;
}

}  // namespace lockstep
