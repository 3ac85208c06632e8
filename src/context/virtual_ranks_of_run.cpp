#include "context/virtual_ranks_of_run.h"

#include <charconv>
#include <cstring>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include "base/error.h"
#include "base/rank_names.h"

namespace lockstep {
namespace {

constexpr int kMaxVirtualRanks = 1 << 16;

std::string state_of_generator(const at::Generator& generator) {
  const at::Tensor state = generator.get_state().contiguous();
  return {static_cast<const char*>(state.const_data_ptr()), state.nbytes()};
}

void set_state(at::Generator generator, const std::string& bytes) {
  const at::Tensor state = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(state.mutable_data_ptr(), bytes.data(), bytes.size());
  generator.set_state(state);
}

}  // namespace

int choose_virtual_ranks(const ContextOptions& options, const Environment& environment, int world_size) {
  TORCH_CHECK(options.virtual_ranks >= 0, "ContextOptions::virtual_ranks is ", options.virtual_ranks,
              "; it must be 0 for none, or a number of virtual ranks");
  int count = options.virtual_ranks;
  const auto& text = environment.lockstep_virtual_ranks;
  const bool from_environment = count == 0 && text.has_value();
  if (from_environment) {
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), count);
    if (error != std::errc() || end != text->data() + text->size() || count < 1)
      throw Error("LOCKSTEP_VIRTUAL_RANKS=" + *text + " is not a number of virtual ranks; set it to one, or unset it");
  }
  if (count > kMaxVirtualRanks)
    throw Error(std::to_string(count) + " virtual ranks are too many; set at most " + std::to_string(kMaxVirtualRanks));
  if (count > 0 && count < world_size)
    throw Error("there are " + std::to_string(world_size) + " ranks for " + std::to_string(count) +
                " virtual ranks, and each rank needs at least one; start " + std::to_string(count) +
                " ranks at most, or raise " +
                (from_environment ? "LOCKSTEP_VIRTUAL_RANKS" : "ContextOptions::virtual_ranks"));
  return count;
}

std::shared_ptr<VirtualRanks> make_virtual_ranks(const ContextOptions& options, const Group& group, int threads) {
  const auto said = group.all_gather_bytes(std::to_string(options.virtual_ranks) + " virtual ranks and " +
                                           std::to_string(threads) + (threads == 1 ? " thread" : " threads"));
  std::string difference;
  for (size_t rank = 1; rank < said.size() && difference.empty(); ++rank)
    if (said[rank] != said[0])
      difference = ranks_with(said, said[0]) + ", and " + said[rank] + " on " + ranks_with(said, said[rank]);
  if (!difference.empty())
    throw Error("the ranks have different settings: " + said[0] + " on " + difference +
                "; with virtual ranks, all ranks need the same ContextOptions::virtual_ranks and threads, and the same "
                "OMP_NUM_THREADS");
  const uint64_t seed = options.seed.value_or(c10::default_rng_seed_val);
  if (options.seed) at::manual_seed(seed);
  std::vector<std::string> states;
  const LeafRange block = block_of(group.rank(), group.world_size(), options.virtual_ranks);
  for (int v = block.first; v < block.last; ++v)
    states.push_back(state_of_generator(at::detail::createCPUGenerator(seed + 1 + static_cast<uint64_t>(v))));
  return std::make_shared<VirtualRanks>(
      options.virtual_ranks, group.rank(), group.world_size(), threads,
      VirtualRanks::Generator{
          .read = [] { return state_of_generator(at::detail::getDefaultCPUGenerator()); },
          .write = [](const std::string& state) { set_state(at::detail::getDefaultCPUGenerator(), state); }},
      std::move(states));
}

}  // namespace lockstep
