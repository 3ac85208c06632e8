#pragma once

/// All of Lockstep. Narrower headers compile faster.

#include <lockstep/checkpoint.h>
#include <lockstep/checkpointer.h>
#include <lockstep/communication_hook.h>
#include <lockstep/context.h>
#include <lockstep/data_loader.h>
#include <lockstep/dataset.h>
#include <lockstep/datasets.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/distributed_sampler.h>
#include <lockstep/error.h>
#include <lockstep/group.h>
#include <lockstep/observer.h>
#include <lockstep/progress.h>
