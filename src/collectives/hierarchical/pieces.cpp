#include "collectives/hierarchical/pieces.h"

#include <algorithm>

#include "collectives/hierarchical/piece_sizes.h"

namespace lockstep::hierarchical_engine {
namespace {

/// Cuts [begin, end) into pieces of at most kPieceBytes; their number is a multiple of `multiple`.
template <typename Add>
void cut(size_t begin, size_t end, size_t element_bytes, size_t multiple, const Add& add) {
  const size_t bytes = (end - begin) * element_bytes;
  const size_t parts = multiple * std::max<size_t>(1, (bytes + multiple * kPieceBytes - 1) / (multiple * kPieceBytes));
  for (size_t i = 0; i < parts; ++i) {
    const size_t from = begin + (end - begin) * i / parts, to = begin + (end - begin) * (i + 1) / parts;
    if (to > from) add(i, from, to - from);
  }
}

}  // namespace

std::vector<Piece> pieces_of(const shm::Request& request, size_t count, const Layout& layout, size_t element_bytes,
                             size_t travelling_bytes) {
  std::vector<Piece> pieces;
  if (request.kind == shm::OperationKind::kReduceScatter) {
    for (int row = 0; row < layout.world_size(); ++row) {
      const auto at = static_cast<size_t>(row);
      cut(0, count, element_bytes, 1, [&](size_t, size_t from, size_t n) {
        pieces.push_back({row, from, n, layout.local_of[at], layout.machine_of[at], false});
      });
    }
    return pieces;
  }
  const size_t bytes = count * element_bytes;
  const size_t slices = slices_of(bytes, layout.rails());
  const bool to_root = request.kind == shm::OperationKind::kReduce;
  const auto machines = static_cast<size_t>(layout.machines());
  const bool at_once = bytes <= kAtOnceBytes || (machines == 2 && travelling_bytes == element_bytes);
  const bool shared_out = !to_root && !at_once;
  for (size_t slice = 0; slice < slices; ++slice)
    cut(count * slice / slices, count * (slice + 1) / slices, element_bytes, shared_out ? machines : 1,
        [&](size_t part, size_t from, size_t n) {
          const int home = to_root      ? layout.machine_of[static_cast<size_t>(request.root)]
                           : shared_out ? static_cast<int>(part % machines)
                                        : Piece::kEverywhere;
          pieces.push_back({0, from, n, static_cast<int>(slice), home, shared_out});
        });
  return pieces;
}

}  // namespace lockstep::hierarchical_engine
