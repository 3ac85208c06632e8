#include <lockstep/sharded_initialization.h>

#include <malloc.h>

#include "fully_sharded/found_units.h"
#include "fully_sharded/told_to_all.h"
#include "fully_sharded/unit.h"
#include "rank_page/operation_label.h"

namespace lockstep {

class ShardedInitialization::State {
 public:
  explicit State(const Group& group) : groups_(groups_of(group)) { current = this; }
  ~State() { current = nullptr; }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  std::shared_ptr<detail::EarlyUnit> take(const torch::nn::Module& layer) {
    const OperationLabel label("a unit of a ShardedInitialization");
    const std::string name = "unit " + std::to_string(units_++) + " that was made";
    const NamedTensors parameters = fully_sharded::parameters_of_unit(layer, name, groups_->all());
    auto early = std::make_shared<detail::EarlyUnit>(
        detail::EarlyUnit{groups_, {name, parameters, *groups_, groups_->machines() == 1}});
    if (early->unit.stays_gathered()) early->unit.withhold();
    ::malloc_trim(0);  // former memory of its parameters
    return early;
  }

  static thread_local State* current;

 private:
  static std::shared_ptr<const fully_sharded::MachineGroups> groups_of(const Group& group) {
    {
      const OperationLabel label("ShardedInitialization()");
      fully_sharded::on_all_ranks(
          group, [] { TORCH_CHECK(current == nullptr, "ShardedInitialization: this thread already has one"); });
    }
    return fully_sharded::MachineGroups::of(group);
  }

  const std::shared_ptr<const fully_sharded::MachineGroups> groups_;
  int units_ = 0;
};
thread_local ShardedInitialization::State* ShardedInitialization::State::current = nullptr;

ShardedInitialization::ShardedInitialization(const Group& group) : state_(std::make_unique<State>(group)) {}
ShardedInitialization::~ShardedInitialization() = default;

detail::MadeUnit::MadeUnit(const torch::nn::Module& layer, UnitBase& unit) {
  if (auto* initialization = ShardedInitialization::State::current) unit.keep_early(initialization->take(layer));
}

}  // namespace lockstep
