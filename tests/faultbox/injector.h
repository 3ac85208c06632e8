#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "faultbox/fault_page.h"

namespace lockstep::faultbox {

/// The part of a faultbox run that lives in a rank: tells the driver where the rank is, and injects the fault that its
/// command line asks for when the rank gets there. Without torch.
///
/// Words of the command line are NAME=VALUE: page (file), fault, rank (who has it), at (a Place), step, bucket,
/// delay_us, bytes, always (1: in every start of the program, else in the first alone), kill_steps (numbers, commas
/// between: the rank waits in the forward of each until the driver has done that kill).
class Injector {
 public:
  Injector(int argc, char** argv);

  std::string word(const std::string& name, const std::string& otherwise) const;
  int64_t number(const std::string& name, int64_t otherwise) const;

  int rank() const { return rank_; }
  /// Whether the fault is injected into this rank.
  bool chosen() const { return chosen_; }
  FaultPage& page() { return *page_; }
  FaultPage::Rank& mine() { return page_->ranks[rank_]; }
  /// The fault happens now.
  void note_fault();

  /// Call it when this rank reaches `place` in `step`. With a fault it may not return.
  void arrive(Place place, int64_t step, int64_t bucket = 0);

 private:
  void inject();
  void wait_for_kill(int64_t step) const;

  std::map<std::string, std::string> words_;
  int rank_ = 0;
  bool chosen_ = false;
  FaultPage* page_;
};

}  // namespace lockstep::faultbox
