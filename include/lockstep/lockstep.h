#pragma once

/// All of Lockstep. Narrower headers compile faster.

#include <lockstep/cxx20.h>

#include <lockstep/assert_equal.h>
#include <lockstep/autocast.h>
#include <lockstep/checkpoint.h>
#include <lockstep/checkpointer.h>
#include <lockstep/comm_hook.h>
#include <lockstep/context.h>
#include <lockstep/data_loader.h>
#include <lockstep/dataset.h>
#include <lockstep/datasets.h>
#include <lockstep/device.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/distributed_sampler.h>
#include <lockstep/ema.h>
#include <lockstep/error.h>
#include <lockstep/evaluate.h>
#include <lockstep/example_loader.h>
#include <lockstep/fully_sharded_data_parallel.h>
#include <lockstep/gather_for_metrics.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/group.h>
#include <lockstep/heartbeat.h>
#include <lockstep/image_folder.h>
#include <lockstep/lr_scheduler.h>
#include <lockstep/metrics.h>
#include <lockstep/observer.h>
#include <lockstep/parameter_groups.h>
#include <lockstep/program.h>
#include <lockstep/progress.h>
#include <lockstep/rank_zero.h>
#include <lockstep/run_log.h>
#include <lockstep/sampler.h>
#include <lockstep/schedule.h>
#include <lockstep/sharded_initialization.h>
#include <lockstep/sharded_unit.h>
#include <lockstep/spawn.h>
#include <lockstep/summary_writer.h>
#include <lockstep/sync_batch_norm.h>
#include <lockstep/token_file.h>
#include <lockstep/torch_data.h>
#include <lockstep/trainer.h>
#include <lockstep/transforms.h>
#include <lockstep/zero_redundancy_optimizer.h>
