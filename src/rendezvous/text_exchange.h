#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "rendezvous/meeting_store.h"

namespace lockstep {

/// Gives every rank's text to every rank, in rank order.
using TextExchange = std::function<std::vector<std::string>(const std::string& mine)>;

/// An all-gather of texts between the ranks that share `store`. Each call uses its own keys, and ignores what earlier
/// ranks have left in the store (generation.h). A call throws Error naming the missing ranks when `timeout` has passed.
TextExchange exchange_texts(std::shared_ptr<MeetingStore> store, int rank, int world_size,
                            std::chrono::milliseconds timeout);

}  // namespace lockstep
