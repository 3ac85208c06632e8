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

/// Shows operations on this rank's page, where nothing above the backend does. `operation` is only compared: it
/// identifies the operation that the page shows, because a program may have several groups, each with its own numbers.
/// `title` is a TensorRequest's, `group` the group's place on the page. From any thread.
void note_start(const void* operation, const char* title, const std::vector<at::Tensor>& inputs, uint64_t sequence,
                int group);
void note_end(const void* operation, uint64_t sequence, bool failed);

/// How the page shows an operation.
struct PageNote {
  /// A shorter wait may be a part of the program, which catches its error: the launcher is not told what it needs.
  static constexpr std::chrono::seconds kShortest{30};

  int group = RankPage::kNoGroup;
  RankStatus::Awaited awaited = {};  ///< a message says nothing

  /// Of a collective that begins now, or of a message (null), that may take so long.
  static PageNote of(PageGroup& group, int rank, uint64_t sequence, const shm::Request* collective,
                     std::chrono::milliseconds timeout);
  /// What a wait of at most `timeout` says.
  RankStatus::Awaited within(std::chrono::milliseconds timeout) const;
};

}  // namespace lockstep::shm_engine
