#pragma once

#include <c10/core/ScalarType.h>

#include "checkpoint/format/dtype.h"

namespace lockstep {

/// Null for dtypes that the files cannot hold, such as quantized ones.
const Dtype* dtype_of(at::ScalarType type);
at::ScalarType scalar_type_of(const Dtype& dtype);

}  // namespace lockstep
