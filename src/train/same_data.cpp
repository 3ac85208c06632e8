#include "train/same_data.h"

#include <lockstep/error.h>
#include <lockstep/sampler.h>

#include "checkpoint/checkpoint_message.h"
#include "checkpoint/state_comparison.h"
#include "rank_page/operation_label.h"

namespace lockstep {

void check_same_data(const Group& group, const LoaderBase& loader, LoaderFacts facts) {
  if (group.world_size() == 1) return;
  const OperationLabel label("a comparison of loaders");
  const CheckpointMessage mine = attempt([&](CheckpointMessage& message) {
    TORCH_CHECK(loader.rank() == group.rank() && loader.world_size() == group.world_size(), "it is rank ",
                loader.rank(), " of ", loader.world_size(), ", but the group's is ", group.rank(), " of ",
                group.world_size(), "; make it from the Context");
    const DataLoaderOptions& options = loader.options();
    const auto add = [&](const char* name, const std::string& value) { message.text += name + ('\t' + value) + '\n'; };
    add("split_batches", std::to_string(options.split_batches));
    add("batch_size", std::to_string(options.batch_size));
    add("accumulate", std::to_string(options.accumulate));
    add("dataset_size", std::to_string(loader.dataset_size()));
    add("seed", options.seed ? std::to_string(*options.seed) : "the context's");
    add("shuffle", std::to_string(options.shuffle));
    add("drop_last", std::to_string(options.drop_last));
    add("exactly_once", std::to_string(options.exactly_once));
    add("sampler", options.sampler != nullptr ? std::to_string(options.sampler->size()) : "none");
    if (facts == LoaderFacts::kNextPass) add("order", std::to_string(loader.order_hash()));
    if (facts == LoaderFacts::kPlace) message.text += lines_of_state(loader.state_dict());
  });
  std::vector<std::string> lines;
  for (std::string& sent : group.all_gather_bytes(mine.encode())) {
    const auto rank = static_cast<int>(lines.size());
    CheckpointMessage message = CheckpointMessage::decode(std::move(sent), rank);
    if (message.outcome == CheckpointMessage::Outcome::kFailed)
      throw Error("the loader of rank " + std::to_string(rank) + " cannot be used: " + message.text);
    lines.push_back(std::move(message.text));
  }
  const std::string difference = difference_of_lines(lines);
  if (difference.empty()) return;
  throw Error("the loaders of the ranks would deal out different epochs, so samples would be missed or seen twice: " +
              difference +
              ". Every rank needs the same dataset, seed and options, and a sampler with the same order, drawn from a "
              "seed that all ranks share");
}

}  // namespace lockstep
