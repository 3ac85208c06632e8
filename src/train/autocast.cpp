#include <lockstep/autocast.h>

#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>

namespace lockstep {

AutocastGuard::AutocastGuard(const AutocastOptions& options) : device_(options.device) {
  TORCH_CHECK(at::autocast::is_autocast_available(device_), "autocast: not available for ", device_);
  const c10::ScalarType dtype = options.dtype.value_or(at::autocast::get_autocast_dtype(device_));
  TORCH_CHECK(dtype == c10::kBFloat16 || dtype == c10::kHalf, "autocast: dtype must be bfloat16 or half, not ", dtype);
  enabled_before_ = at::autocast::is_autocast_enabled(device_);
  dtype_before_ = at::autocast::get_autocast_dtype(device_);
  cache_before_ = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_enabled(device_, options.enabled);
  at::autocast::set_autocast_dtype(device_, dtype);
  at::autocast::set_autocast_cache_enabled(options.cache_enabled);
  at::autocast::increment_nesting();
}

AutocastGuard::~AutocastGuard() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, enabled_before_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
  at::autocast::set_autocast_cache_enabled(cache_before_);
}

}  // namespace lockstep
