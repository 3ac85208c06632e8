#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>
#include <lockstep/loader.h>

namespace lockstep {

/// All ranks' rows, on every rank: [n0 + n1 + ..., ...], rank 0's first. Ranks may have different numbers of rows, or
/// none, and must agree in dtype and in the other dimensions. A collective: every rank must call it. Throws Error on
/// all ranks, naming two that differ, if they do not agree.
at::Tensor gather_for_metrics(const Group& group, const at::Tensor& rows);

/// As above, for results computed from the current batch of `loader`'s newest pass, one row per sample. Returns the
/// rows of all ranks in the order of the epoch, without the samples that are repeated to give all ranks equally many.
/// Concatenated over a whole pass, they equal a single process's: each sample once, in the dataset's order if it is not
/// shuffled.
///
///     for (auto& [data, target] : test) {
///       const at::Tensor scores = lockstep::gather_for_metrics(context.group(), test, net(data));
///       ...
///
/// A collective, so ranks need equal numbers of batches. If `exactly_once` makes these differ, it is an Error: do not
/// set it then. Results that are sums over samples need no gathering (metrics.h, evaluate.h).
at::Tensor gather_for_metrics(const Group& group, const LoaderBase& loader, const at::Tensor& rows);

}  // namespace lockstep
