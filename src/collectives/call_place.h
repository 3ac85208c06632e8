#pragma once

#include <string>

namespace lockstep {

/// Says in which call of a model this process is, while the object lives, for ranks that wait for each other
/// (GroupsWatch). The thread that trains makes it; the innermost one counts.
class CallPlace {
 public:
  /// What has such calls.
  struct Caller {
    std::string of{};      ///< "a FullyShardedDataParallel"
    std::string advice{};  ///< what all ranks must do alike
    std::string scope{};   ///< GroupsWatch::leave(): this rank makes no more of these calls
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

  /// Any thread may ask.
  static Now now();

 private:
  Call before_;
};

}  // namespace lockstep
