#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <c10/util/ArrayRef.h>

namespace lockstep {

/// (pixel / 255 - mean) / standard deviation of each channel, for every byte: a table is faster than arithmetic on
/// whole tensors and gives the same bits for every batch size. The values are those of torchvision's ToTensor and
/// Normalize, in float32.
class PixelValues {
 public:
  PixelValues() = default;
  /// One channel per mean; there must be as many standard deviations, none of them 0.
  PixelValues(c10::ArrayRef<float> mean, c10::ArrayRef<float> standard_deviation) : tables_(mean.size()) {
    for (size_t channel = 0; channel < mean.size(); ++channel)
      for (int pixel = 0; pixel < 256; ++pixel)
        tables_[channel][static_cast<size_t>(pixel)] =
            (static_cast<float>(pixel) / 255.0f - mean[channel]) / standard_deviation[channel];
  }

  size_t channels() const { return tables_.size(); }
  void convert(const uint8_t* pixels, int64_t count, size_t channel, float* to) const {
    const auto& table = tables_[channel];
    for (int64_t i = 0; i < count; ++i) to[i] = table[pixels[i]];
  }

 private:
  std::vector<std::array<float, 256>> tables_;
};

}  // namespace lockstep
