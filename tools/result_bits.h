#pragma once

#include <nlohmann/json.hpp>

namespace lockstep {

/// The bits that LibTorch gives here. The results of a dozen operators, forward and backward, on fixed numbers with one
/// thread: {"threads": 1, "operators": {name: hash}, "other_bits_with_two_threads": [names], "MKL_CBWR": text or null,
/// "ONEDNN_MAX_CPU_ISA": ..., "ATEN_CPU_CAPABILITY": ...}. Two machines train to the same bits only if these are equal.
nlohmann::json result_bits();

}  // namespace lockstep
