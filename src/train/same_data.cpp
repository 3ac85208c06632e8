#include "train/same_data.h"

#include <lockstep/error.h>

#include "checkpoint/checkpoint_message.h"
#include "checkpoint/state_comparison.h"
#include "rank_page/operation_label.h"

namespace lockstep {

void check_same_data(const Group& group, const LoaderBase& loader, LoaderFacts facts) {
  if (group.world_size() == 1) return;
  const OperationLabel label("a comparison of loaders");
  // With virtual ranks a rank may be within the micro-batches of a step, of which there is no state.
  const CheckpointMessage mine = attempt([&](CheckpointMessage& message) {
    c10::impl::GenericDict state = loader.state_dict().toGenericDict().copy();
    if (facts == LoaderFacts::kOptions)
      for (const char* place : {"epoch", "samples", "order", "sampler", "sampler_before"}) state.erase(std::string(place));
    message.text = "batch_size\t" + std::to_string(loader.options().batch_size) + '\n' + lines_of_state(state);
  });
  std::vector<std::string> lines;
  for (std::string& sent : group.all_gather_bytes(mine.encode())) {
    const auto rank = static_cast<int>(lines.size());
    CheckpointMessage message = CheckpointMessage::decode(std::move(sent), rank);
    if (message.outcome == CheckpointMessage::Outcome::kFailed)
      throw Error("the loader of rank " + std::to_string(rank) + " has no state: " + message.text);
    lines.push_back(std::move(message.text));
  }
  const std::string difference = difference_of_lines(lines);
  if (difference.empty()) return;
  throw Error("the loaders of the ranks would deal out different epochs, so samples would be missed or seen twice: " +
              difference +
              ". Every rank needs the same dataset, seed and options, and a sampler with the same order: draw it from a "
              "seed that all ranks share");
}

}  // namespace lockstep
