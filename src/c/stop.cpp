#include <atomic>

#include "c/guarded.h"
#include "rank_page/rank_board.h"
#include "rank_page/stop_agreement.h"

namespace lockstep::c {
namespace {

// State that a signal handler may access: only lock-free words.
std::atomic<int> asked{0};
std::atomic<const RankBoard*> board{nullptr};

bool heard(GroupState& state) {
  const RankBoard* known = launchers_board();
  if (state.is_world && known != nullptr && known->world_size() == state.group.size()) {
    board = known;
    if (asked.load() != 0) StopAgreement::ask(*known);  // asked before this rank knew its board
    return StopAgreement(*known, own_page()).should_stop();
  }
  int32_t mine = asked.load(), any = 0;
  state.group.run({.kind = shm::OperationKind::kAllReduce,
                   .type = shm::DataType::kInt32,
                   .op = shm::ReduceOp::kMax,
                   .count = 1,
                   .input = &mine,
                   .output = &any},
                  state.timeout);
  return any != 0;
}

}  // namespace
}  // namespace lockstep::c

using namespace lockstep::c;

lockstep_status lockstep_stop_requested(lockstep_group* group, int* stop) {
  return guarded("lockstep_stop_requested", group, [&](const std::shared_ptr<GroupState>& state) {
    if (stop == nullptr) refuse("lockstep_stop_requested", "stop is null; give a pointer for the answer");
    *stop = heard(*state) ? 1 : 0;
  });
}

void lockstep_request_stop(void) {
  asked.store(1);
  if (const lockstep::RankBoard* known = board.load()) lockstep::StopAgreement::ask(*known);
}
