#include "observe/metrics_file.h"

#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>

#include "observe/events/event_file.h"
#include "observe/json_text.h"

namespace lockstep {
namespace {

constexpr int64_t kFormat = 1;

double monotonic_seconds() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

/// Whether the file ends within a line, as a killed process may leave it.
bool ends_within_a_line(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file || file.tellg() <= 0) return false;
  file.seekg(-1, std::ios::end);
  return file.get() != '\n';
}

nlohmann::ordered_json bucket_json(const BucketStats& bucket) {
  return {{"first_parameter", bucket.parameters.empty() ? "" : bucket.parameters.front()},
          {"last_parameter", bucket.parameters.empty() ? "" : bucket.parameters.back()},
          {"parameters", bucket.parameters.size()},
          {"bytes", bucket.bytes},
          {"ready_ms", bucket.ready_ms},
          {"start_ms", bucket.start_ms},
          {"end_ms", bucket.end_ms},
          {"wait_ms", bucket.wait_ms}};
}

/// The members of an object, for appending to others in a line.
void append_members(std::string& line, const nlohmann::ordered_json& object) {
  const std::string text = object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  line += ',';
  line += std::string_view(text).substr(1, text.size() - 2);
}

}  // namespace

MetricsFile::MetricsFile(const std::string& path, std::chrono::milliseconds flush_interval)
    : file_(path, "the run log", flush_interval), exceptions_(std::uncaught_exceptions()) {
  if (ends_within_a_line(path)) file_.append("\n");
}

MetricsFile::~MetricsFile() {
  begin("end", last_);
  append_member(line_, "by", std::string_view(std::uncaught_exceptions() > exceptions_ ? "exception" : "return"));
  end();
}

void MetricsFile::begin(const char* type, TrainingPlace at) {
  last_ = at;
  line_.assign(1, '{');
  append_member(line_, "type", std::string_view(type));
  append_member(line_, "step", at.step);
  append_member(line_, "epoch", at.epoch);
  append_member(line_, "wall_s", wall_seconds());
  append_member(line_, "monotonic_s", monotonic_seconds());
}

void MetricsFile::end() {
  line_ += "}\n";
  const int64_t lost = file_.lost();
  if (lost != told_lost_) {
    // Repeated with every line until one is written.
    std::string more = R"({"type":"lost")";
    append_member(more, "lines", lost);
    line_ = more + "}\n" + line_;
    const int64_t before = file_.lost();
    file_.append(line_);
    file_.flush();
    if (file_.lost() == before) told_lost_ = lost;
    return;
  }
  file_.append(line_);
}

void MetricsFile::run(const RunFacts& facts, const SystemFacts& system) {
  begin("run", {.step = facts.first_step, .epoch = 0});
  append_members(line_, {{"format", kFormat},
                         {"rank", facts.rank},
                         {"world_size", facts.world_size},
                         {"local_rank", facts.local_rank},
                         {"threads", facts.threads},
                         {"backend", facts.backend},
                         {"command", system.command},
                         {"folder", system.folder},
                         {"pid", system.pid},
                         {"host", system.host},
                         {"system", system.system},
                         {"kernel", system.kernel},
                         {"cpu", system.cpu},
                         {"usable_cores", system.usable_cores},
                         {"memory_bytes", system.memory_bytes},
                         {"versions", {{"lockstep", system.lockstep_version}, {"libtorch", facts.libtorch_version}}}});
  end();
  file_.flush();
}

void MetricsFile::scalar(TrainingPlace at, std::string_view name, double value) {
  begin("scalar", at);
  append_member(line_, "name", name);
  append_member(line_, "value", value);
  end();
}

void MetricsFile::steps(TrainingPlace at, const StepsTaken& taken) {
  begin("steps", at);
  append_member(line_, "steps", taken.steps);
  append_member(line_, "samples", taken.samples);
  append_member(line_, "seconds", taken.seconds);
  append_member(line_, "longest_s", taken.longest_s);
  append_member(line_, "communication_s", taken.communication_s);
  end();
}

void MetricsFile::reductions(TrainingPlace at, const ReductionStats& stats) {
  begin("reductions", at);
  nlohmann::ordered_json buckets = nlohmann::ordered_json::array();
  for (const BucketStats& bucket : stats.buckets) buckets.push_back(bucket_json(bucket));
  append_members(line_, {{"reductions", stats.reductions},
                         {"bytes", stats.bytes},
                         {"backward_ms", stats.backward_ms},
                         {"wait_ms", stats.wait_ms},
                         {"overlap", stats.overlap},
                         {"wait_ms_by_rank", stats.wait_ms_by_rank},
                         {"times_last_by_rank", stats.times_last_by_rank},
                         {"buckets", buckets}});
  end();
}

}  // namespace lockstep
