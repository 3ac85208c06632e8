#pragma once

#include <memory>
#include <optional>

#include <lockstep/sharded_unit.h>

#include "fully_sharded/machine_groups.h"
#include "fully_sharded/unit.h"

namespace lockstep::detail {

/// State that a ShardedInitialization leaves in a layer until a FullyShardedDataParallel takes it.
struct EarlyUnit {
  std::shared_ptr<const fully_sharded::MachineGroups> groups;
  fully_sharded::Unit unit;
};

}  // namespace lockstep::detail
