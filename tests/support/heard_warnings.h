#pragma once

#include <string>
#include <vector>

#include <c10/util/Exception.h>

namespace lockstep::testing {

/// Collects the warnings of this thread while it exists.
class HeardWarnings {
 public:
  HeardWarnings() = default;
  HeardWarnings(const HeardWarnings&) = delete;

  const std::vector<std::string>& texts() const { return handler_.texts; }
  /// The texts, each with a line end.
  std::string text() const {
    std::string all;
    for (const std::string& one : handler_.texts) all += one + '\n';
    return all;
  }

 private:
  struct Handler : c10::WarningHandler {
    void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
    std::vector<std::string> texts;
  };
  Handler handler_;
  const c10::WarningUtils::WarningHandlerGuard guard_{&handler_};
};

}  // namespace lockstep::testing
