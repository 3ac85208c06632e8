#include "report/axis.h"

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "observe/progress_text.h"
#include "report/text.h"

namespace lockstep {
namespace {

double round_step(double rough) {
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (rough <= factor * power * (1 + 1e-9)) return factor * power;
  return 10 * power;
}

/// With as many decimals as the step.
std::string label_of(double value, double step, bool share) {
  if (share) value *= 100, step *= 100;
  const std::string unit = share ? " %" : "";
  const double size = std::fabs(value);
  if (size > 0 && (size >= 1e7 || size < 1e-5)) return short_number(value) + unit;
  if (step >= 1) return with_thousands(value) + unit;
  const int decimals = std::min(static_cast<int>(std::ceil(-std::log10(step) - 1e-9)), 8);
  return formatted("%.*f", decimals, value) + unit;
}

}  // namespace

Scale::Scale(double low, double high, double low_px, double high_px, bool logarithmic)
    : low_(low), high_(high), low_px_(low_px), high_px_(high_px), logarithmic_(logarithmic) {}

double Scale::operator()(double value) const {
  const double part = logarithmic_ ? std::log(std::max(value, low_ * 1e-3) / low_) / std::log(high_ / low_)
                                   : (value - low_) / (high_ - low_);
  return low_px_ + part * (high_px_ - low_px_);
}

std::vector<Tick> ticks(double low, double high, int count, bool whole, bool share) {
  double step = round_step((high - low) / std::max(count, 1));
  if (whole) step = std::max(step, 1.0);
  std::vector<Tick> found;
  const double first = std::ceil(low / step - 1e-9);
  for (int i = 0; i < 100; ++i) {
    double value = (first + i) * step;
    if (value > high + step * 1e-9) break;
    if (std::fabs(value) < step * 1e-9) value = 0;
    found.push_back({value, value == 0 && !share ? "0" : label_of(value, step, share)});
  }
  return found;
}

std::vector<Tick> logarithmic_ticks(double low, double high) {
  const double decades = std::log10(high / low);
  const int stride = std::max(1, static_cast<int>(std::ceil(decades / 6)));
  std::vector<Tick> found;
  const int first = static_cast<int>(std::floor(std::log10(low))), last = static_cast<int>(std::ceil(std::log10(high)));
  for (int exponent = first; exponent <= last; ++exponent) {
    for (const double factor : {1.0, 2.0, 5.0}) {
      const double value = factor * std::pow(10.0, exponent);
      if (value < low * (1 - 1e-9) || value > high * (1 + 1e-9)) continue;
      if (factor > 1 && decades > 2.5) continue;
      if ((exponent - first) % stride == 0) found.push_back({value, short_number(value)});
    }
  }
  return found;
}

}  // namespace lockstep
