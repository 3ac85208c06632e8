#pragma once

#include <string>

namespace lockstep::fully_sharded {

/// Says in which call of a model this process is, while the object lives: "step() after 3 backward passes". The thread
/// that trains makes it; the innermost one counts.
class ModelCall {
 public:
  explicit ModelCall(std::string text);
  ~ModelCall();
  ModelCall(const ModelCall&) = delete;
  ModelCall& operator=(const ModelCall&) = delete;

  /// Empty: none. Any thread may ask.
  static std::string current();

 private:
  std::string before_;
};

}  // namespace lockstep::fully_sharded
