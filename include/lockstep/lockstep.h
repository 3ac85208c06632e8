#pragma once

/// All of Lockstep. Narrower headers compile faster.

#include <lockstep/context.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/group.h>
