#pragma once

namespace lockstep::detail {

/// An optimizer that may keep its 16-bit parameters and their state in float; its state_dict has a "master_param" then.
class KeepsMasters {
 public:
  virtual bool keeps_masters() const = 0;

 protected:
  KeepsMasters() = default;
  KeepsMasters(const KeepsMasters&) = default;
  KeepsMasters& operator=(const KeepsMasters&) = default;
  ~KeepsMasters() = default;
};

}  // namespace lockstep::detail
