#include "collectives/shm/backend/generation.h"

#include "collectives/shm/backend/c10d_meeting_store.h"

namespace lockstep::shm_engine {

Generation agree_on_generation(c10d::Store& store, int rank, int world_size, std::chrono::milliseconds timeout) {
  C10dMeetingStore meeting(c10::intrusive_ptr<c10d::Store>::reclaim_copy(&store));
  return lockstep::agree_on_generation(meeting, rank, world_size, timeout);
}

}  // namespace lockstep::shm_engine
