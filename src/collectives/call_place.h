#pragma once

#include <string>

namespace lockstep {

/// While it lives, records which call of a model this process is in, for ranks that wait for each other (GroupsWatch).
/// Made by the training thread; the innermost one counts.
class CallPlace {
 public:
  /// The object that has such calls.
  struct Caller {
    std::string of{};      ///< "a FullyShardedDataParallel"
    std::string advice{};  ///< what all ranks must do alike
    std::string scope{};   ///< for GroupsWatch::leave(): this rank makes no more of these calls
  };
  struct Call {
    std::string text{};              ///< "step() after 3 backwards"; empty: none
    const Caller* caller = nullptr;  ///< outlives the object
  };
  struct Now {
    std::string text{};
    Caller caller{};
  };

  explicit CallPlace(Call call);
  ~CallPlace();
  CallPlace(const CallPlace&) = delete;
  CallPlace& operator=(const CallPlace&) = delete;

  /// Any thread may call it.
  static Now now();

 private:
  Call before_;
};

}  // namespace lockstep
