#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>
#include <lockstep/loader.h>

namespace lockstep {

/// All ranks' rows, on every rank: [n0 + n1 + ..., ...], rank 0's first. Ranks may have different numbers of rows, or
/// none, and must agree in dtype and in the other dimensions. A collective: every rank calls it. Throws Error on all
/// ranks, naming two of them, where they do not agree.
at::Tensor gather_for_metrics(const Group& group, const at::Tensor& rows);

/// The same for what was computed from the batch at hand of `loader`'s newest pass, a row for each of its samples: the
/// rows of all ranks in the order of the epoch, without those of samples that are repeated to even ranks out. So the
/// results of a whole pass, one after the other, are those of one process: each sample once, and without shuffling in
/// the dataset's order.
///
///     for (auto& [data, target] : test) {
///       const at::Tensor scores = lockstep::gather_for_metrics(context.group(), test, net(data));
///       ...
///
/// A collective, so ranks need equal numbers of batches: an Error where `exactly_once` makes them differ; leave it out.
/// What only adds up over samples needs no gathering (metrics.h, evaluate.h).
at::Tensor gather_for_metrics(const Group& group, const LoaderBase& loader, const at::Tensor& rows);

}  // namespace lockstep
