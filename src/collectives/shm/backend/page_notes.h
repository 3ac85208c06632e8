#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "collectives/shm/protocol/request.h"
#include "rank_page/page_group.h"
#include "rank_page/wait_on_page.h"

namespace lockstep::shm_engine {

/// Shows operations on this rank's page if no layer above the backend does. `operation` is only compared: it identifies
/// the operation that the page shows, because a program may have several groups, each with its own numbers. `title` is
/// a TensorRequest's, and `group` is the group's place on the page. Any thread may call.
void note_start(const void* operation, const char* title, const std::vector<at::Tensor>& inputs, uint64_t sequence,
                int group);
void note_end(const void* operation, uint64_t sequence, bool failed);

/// How the page shows an operation.
struct PageNote {
  /// Shorter waits are not reported to the launcher: they may be part of a program that catches the error.
  static constexpr std::chrono::seconds kShortest{30};

  int group = RankPage::kNoGroup;
  RankStatus::Awaited awaited = {};  ///< empty for a message

  /// The note of a collective that begins now, or of a message (null), that may take so long.
  static PageNote of(PageGroup& group, int rank, uint64_t sequence, const shm::Request* collective,
                     std::chrono::milliseconds timeout);
  /// The announcement of a wait of at most `timeout`.
  RankStatus::Awaited within(std::chrono::milliseconds timeout) const;
};

}  // namespace lockstep::shm_engine
