#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// Maps values to positions on a drawing.
class Scale {
 public:
  /// `low` < `high`, and 0 < `low` if it is logarithmic.
  Scale(double low, double high, double low_px, double high_px, bool logarithmic = false);

  double operator()(double value) const;
  double low() const { return low_; }
  double high() const { return high_; }
  double low_px() const { return low_px_; }
  double high_px() const { return high_px_; }
  bool is_logarithmic() const { return logarithmic_; }

 private:
  double low_, high_, low_px_, high_px_;
  bool logarithmic_;
};

struct Tick {
  double value;
  std::string label;
};

/// Round values within [low, high], about `count` of them: multiples of 1, 2 or 5 times a power of ten. `whole`: steps
/// of at least 1. `share`: labelled in per cent.
std::vector<Tick> ticks(double low, double high, int count, bool whole = false, bool share = false);
/// Powers of ten and, if there are few of them, 2 and 5 times these.
std::vector<Tick> logarithmic_ticks(double low, double high);

}  // namespace lockstep
