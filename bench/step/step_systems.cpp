#include "step_systems.h"

#include <unistd.h>

#include <thread>

namespace lockstep::bench {
namespace {

bool is_python(const std::string& system) {
  return system.starts_with("pytorch_") || system.starts_with("python_") || system == "side_by_side_python";
}

bool runnable(const std::string& path) { return access(path.c_str(), X_OK) == 0; }

}  // namespace

System make_step_system(const std::string& system, const StepWork& work, const std::string& build,
                        const std::string& python) {
  const int processes = processes_of(system, work.ranks);
  const std::string threads = std::to_string(processes == work.ranks ? 1 : std::thread::hardware_concurrency());
  System made{.name = system,
              .command = {build + "/bin/lockstep", "run", "-n", std::to_string(processes), "--"},
              .environment = {"OMP_NUM_THREADS=" + threads, "MKL_NUM_THREADS=" + threads},
              .settings = "",
              .missing = ""};
  if (!is_python(system)) {
    made.command.push_back(build + "/bin/step_worker");
    made.settings =
        system == "c10d_reducer_gloo" ? "c10d::Reducer, gradient_as_bucket_view, buckets of 1 and 25 MiB" : "defaults";
    if (processes != work.ranks) {
      made.settings = "the whole batch in one process, " + threads + " threads";
      made.command.insert(made.command.end(), {"--threads", threads, "--batches", std::to_string(work.ranks)});
    }
  } else {
    made.command.insert(made.command.end(), {python, BENCH_STEP_FOLDER "/step_worker.py"});
    const bool attached = system.starts_with("python_");
    made.settings = attached                  ? "lockstep.attach()"
                    : is_side_by_side(system) ? "no communication"
                                              : "DistributedDataParallel(gradient_as_bucket_view=True)";
    made.settings += system == "python_attach_zero" ? "" : ", fused=True";
    if (system == "pytorch_zero_gloo" || system == "python_attach_zero") made.settings += ", ZeroRedundancyOptimizer";
    if (!runnable(python))
      made.missing = "no " + python + ": LibTorch here is no part of a Python (--python names one)";
    if (attached || system == "pytorch_ddp_lockstep") {
      made.environment.push_back("PYTHONPATH=" + build + "/python/site");
      if (access((build + "/python/site/lockstep").c_str(), F_OK) != 0)
        made.missing = "no " + build + "/python/site (tests/python/package.py builds it)";
    }
  }
  made.command.insert(made.command.end(), {"--system", system, "--model", work.model, "--optimizer", work.optimizer});
  return made;
}

}  // namespace lockstep::bench
