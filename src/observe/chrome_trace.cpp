#include <fstream>
#include <map>

#include <lockstep/observer.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/mutex.h"

namespace lockstep {
namespace {

class ChromeTrace : public Observer {
 public:
  ChromeTrace(const std::string& path, int rank) : rank_(rank), file_(path) {
    write({{"name", "process_name"}, {"ph", "M"}, {"pid", rank}, {"args", {{"name", "rank " + std::to_string(rank)}}}},
          "[\n");
    if (!file_) throw StorageError("cannot write the trace " + path);
  }
  ~ChromeTrace() override { file_ << "\n]\n"; }

  void span(const Span& span) override {
    const MutexLock lock(mutex_);
    const auto [lane, is_new] = lanes_.try_emplace(span.lane, lanes_.size());
    if (is_new)
      write({{"name", "thread_name"},
             {"ph", "M"},
             {"pid", rank_},
             {"tid", lane->second},
             {"args", {{"name", span.lane}}}});
    nlohmann::ordered_json facts = nlohmann::ordered_json::object();
    for (const auto& [name, value] : span.facts) facts[name] = value;
    write({{"name", span.name},
           {"ph", "X"},
           {"pid", rank_},
           {"tid", lane->second},
           {"ts", static_cast<double>(span.begin_ns) / 1000},
           {"dur", static_cast<double>(span.end_ns - span.begin_ns) / 1000},
           {"args", facts}});
  }

 private:
  void write(const nlohmann::ordered_json& event, const char* before = ",\n") LOCKSTEP_REQUIRES(mutex_) {
    // Invalid UTF-8 in a name is replaced; it must not make training fail.
    file_ << before << event.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << std::flush;
  }

  const int rank_;
  Mutex mutex_;
  std::ofstream file_ LOCKSTEP_GUARDED_BY(mutex_);
  std::map<std::string, size_t> lanes_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace

std::shared_ptr<Observer> chrome_trace(const std::string& path, int rank) {
  return std::make_shared<ChromeTrace>(path, rank);
}

}  // namespace lockstep
