// The functions of models in the C interface.

#include <memory>
#include <optional>
#include <string>

#include "train_c/guarded.h"
#include "train_c/model.h"

using namespace lockstep::train_c;

namespace {

/// A text of the program: not null, and not longer than any path.
std::string text(const char* function, const char* name, const char* given, size_t most) {
  if (given == nullptr) refuse(function, std::string(name) + " is null");
  std::string result(given);
  if (result.size() > most)
    refuse(function, std::string(name) + " has " + std::to_string(result.size()) + " characters; give at most " +
                         std::to_string(most));
  return result;
}
constexpr size_t kMostPath = 4096;
constexpr size_t kMostConfiguration = 1 << 20;

/// Runs `body` on a model, during a call of its world.
template <typename Body>
lockstep_status locally(const char* function, lockstep_train_model* handle, const Body& body) {
  return guarded(LOCKSTEP_RANK_GONE, [&] {
    const std::shared_ptr<Model> model = models().find(function, handle);
    const Call call(function, *model->world);
    body(*model);
  });
}

/// The same for a function that all ranks call, with what `arguments` makes of this rank's arguments, or tells the
/// others that it throws.
template <typename Arguments, typename Body>
lockstep_status on_all(const char* function, lockstep_train_model* handle, const Arguments& arguments,
                       const Body& body) {
  return guarded(LOCKSTEP_RANK_GONE, [&] {
    const std::shared_ptr<Model> model = find_on_all(function, models(), handle);
    const Call call(function, *model->world);
    std::optional<decltype(arguments())> given;
    or_tell(model->party(function), model->call(function), [&] { given.emplace(arguments()); });
    body(*model, *given);
  });
}

/// A path as the one argument.
template <typename Body>
lockstep_status on_all_with_path(const char* function, lockstep_train_model* handle, const char* name, const char* path,
                                 const Body& body) {
  return on_all(
      function, handle, [&] { return text(function, name, path, kMostPath); }, body);
}

struct Batch {
  Arrays inputs, targets;
};

}  // namespace

lockstep_status lockstep_train_create(lockstep_train_world* handle, const char* module, const char* configuration,
                                      lockstep_train_model** model) {
  return guarded(LOCKSTEP_RANK_GONE, [&] {
    constexpr const char* kName = "lockstep_train_create";
    const std::shared_ptr<World> world = find_on_all(kName, worlds(), handle);
    const Call call(kName, *world);
    std::string file, settings;
    or_tell(world->all, kName, [&] {
      if (model == nullptr) refuse(kName, "model is null; give a pointer for the handle");
      *model = nullptr;
      file = text(kName, "module", module, kMostPath);
      settings = text(kName, "configuration", configuration, kMostConfiguration);
    });
    *model = models().add(std::make_shared<Model>(world, file, settings));
  });
}

lockstep_status lockstep_train_free(lockstep_train_model* model) {
  return guarded(LOCKSTEP_INVALID_ARGUMENT, [&] {
    if (model == nullptr) return;
    std::shared_ptr<Model> found = models().find("lockstep_train_free", model);
    const std::shared_ptr<World> world = found->world;
    const Call call("lockstep_train_free", *world);
    models().remove(model);
    found = nullptr;  // during the call
  });
}

lockstep_status lockstep_train_step(lockstep_train_model* model, const lockstep_train_array* inputs,
                                    int32_t input_count, const lockstep_train_array* targets, int32_t target_count,
                                    double* loss) {
  constexpr const char* kName = "lockstep_train_step";
  return on_all(
      kName, model,
      [&] {
        return Batch{Arrays(kName, "inputs", inputs, input_count), Arrays(kName, "targets", targets, target_count)};
      },
      [&](Model& found, const Batch& batch) {
        const double result = found.step(batch.inputs, batch.targets);
        if (loss != nullptr) *loss = result;
      });
}

lockstep_status lockstep_train_evaluate(lockstep_train_model* model, const lockstep_train_array* inputs,
                                        int32_t input_count, const lockstep_train_array* targets, int32_t target_count,
                                        double* loss) {
  constexpr const char* kName = "lockstep_train_evaluate";
  return on_all(
      kName, model,
      [&] {
        if (loss == nullptr) refuse(kName, "loss is null; give a pointer for the result");
        return Batch{Arrays(kName, "inputs", inputs, input_count), Arrays(kName, "targets", targets, target_count)};
      },
      [&](Model& found, const Batch& batch) { *loss = found.evaluate(batch.inputs, batch.targets); });
}

lockstep_status lockstep_train_finish(lockstep_train_model* model) {
  return on_all(
      "lockstep_train_finish", model, [] { return 0; }, [](Model& found, int) { found.finish(); });
}

lockstep_status lockstep_train_infer(lockstep_train_model* model, const lockstep_train_array* inputs,
                                     int32_t input_count, const lockstep_train_array* outputs, int32_t output_count) {
  return locally("lockstep_train_infer", model, [&](Model& found) {
    found.infer(Arrays("lockstep_train_infer", "inputs", inputs, input_count),
                Arrays("lockstep_train_infer", "outputs", outputs, output_count));
  });
}

lockstep_status lockstep_train_steps(lockstep_train_model* model, int64_t* steps) {
  return locally("lockstep_train_steps", model, [&](Model& found) {
    if (steps == nullptr) refuse("lockstep_train_steps", "steps is null; give a pointer for the number");
    *steps = found.steps();
  });
}

lockstep_status lockstep_train_learning_rate(lockstep_train_model* model, double* rate) {
  return locally("lockstep_train_learning_rate", model, [&](Model& found) {
    if (rate == nullptr) refuse("lockstep_train_learning_rate", "rate is null; give a pointer for the number");
    *rate = found.learning_rate();
  });
}

lockstep_status lockstep_train_log(lockstep_train_model* model, const char* name, double value) {
  return locally("lockstep_train_log", model,
                 [&](Model& found) { found.log(text("lockstep_train_log", "name", name, kMostPath), value); });
}

lockstep_status lockstep_train_save(lockstep_train_model* model, const char* path) {
  return on_all_with_path("lockstep_train_save", model, "path", path,
                          [](Model& found, const std::string& given) { found.save(given); });
}

lockstep_status lockstep_train_load(lockstep_train_model* model, const char* path) {
  return on_all_with_path("lockstep_train_load", model, "path", path,
                          [](Model& found, const std::string& given) { found.load(given); });
}

lockstep_status lockstep_train_save_checkpoint(lockstep_train_model* model, const char* folder) {
  return on_all_with_path("lockstep_train_save_checkpoint", model, "folder", folder,
                          [](Model& found, const std::string& given) { found.save_checkpoint(given); });
}

lockstep_status lockstep_train_resume(lockstep_train_model* model, const char* folder, int64_t* step) {
  return on_all_with_path("lockstep_train_resume", model, "folder", folder,
                          [&](Model& found, const std::string& given) {
                            const int64_t resumed = found.resume(given);
                            if (step != nullptr) *step = resumed;
                          });
}
