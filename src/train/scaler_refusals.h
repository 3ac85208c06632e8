#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include <lockstep/group.h>

namespace lockstep {

// The errors that a GradScaler throws on all ranks.

/// Called by every rank of `ranks` once one is in trouble. `trouble` is this rank's, as a predicate; `unscaled` its
/// backward passes without scale(); `scaled`: it has called scale().
[[noreturn]] void refuse(const std::optional<Group>& ranks, const std::string& trouble, const std::string& unscaled,
                         bool scaled);
/// The scaler is enabled on some ranks only, perhaps on this one.
[[noreturn]] void refuse_disabled_on_some(const Group& ranks, bool is_enabled);
inline constexpr const char* kUnscale = "unscale()";
inline constexpr const char* kStep = "step()";
/// Some ranks unscale by one of these calls, others by the other. `call` is this rank's.
[[noreturn]] void refuse_different_calls(const Group& ranks, const char* call);
/// Ranks call step() or unscale(), `call`, with different optimizers. This rank's has `parameters`, of which `first` is
/// the first that a reducer follows, and `identity` (KnownGradients).
[[noreturn]] void refuse_different_optimizers(const Group& ranks, const char* call, const std::string& first,
                                              size_t parameters, uint64_t identity);
/// Some ranks have `cleared` gradients after a backward, and others did not.
[[noreturn]] void refuse_cleared(const Group& ranks, bool cleared);

}  // namespace lockstep
