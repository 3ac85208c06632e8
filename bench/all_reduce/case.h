#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

namespace lockstep::bench {

enum class Operation { kAllReduce, kBroadcast, kAllGather, kReduceScatter };
enum class Dtype { kFp32, kBf16 };
enum class Placement { kResident, kPrivate };

inline constexpr std::array<std::string_view, 4> kOperations{"all_reduce", "broadcast", "all_gather", "reduce_scatter"};
inline constexpr std::array<std::string_view, 2> kDtypes{"fp32", "bf16"};
inline constexpr std::array<std::string_view, 2> kPlacements{"resident", "private"};

/// The value that `name` is the name of.
template <typename Enum, size_t n>
std::optional<Enum> value_of(const std::array<std::string_view, n>& names, std::string_view name) {
  for (size_t i = 0; i < n; ++i)
    if (names[i] == name) return static_cast<Enum>(i);
  return std::nullopt;
}

inline std::string_view name_of(Operation value) { return kOperations[static_cast<size_t>(value)]; }
inline std::string_view name_of(Dtype value) { return kDtypes[static_cast<size_t>(value)]; }
inline std::string_view name_of(Placement value) { return kPlacements[static_cast<size_t>(value)]; }

/// What is measured. Sums, in place for all_reduce and broadcast (from rank 0), out of place for the others.
struct Case {
  Operation operation = Operation::kAllReduce;
  Dtype dtype = Dtype::kFp32;
  Placement placement = Placement::kPrivate;
  /// Of the whole buffer: all_gather's output, reduce_scatter's input.
  size_t bytes = 4;

  size_t item_bytes() const { return dtype == Dtype::kFp32 ? 4 : 2; }
  bool in_place() const { return operation == Operation::kAllReduce || operation == Operation::kBroadcast; }
  /// Items of one rank's share: its input of all_gather, its output of reduce_scatter.
  size_t share(int ranks) const { return bytes / item_bytes() / static_cast<size_t>(ranks); }
  /// Items of the whole buffer that take part.
  size_t items(int ranks) const {
    return in_place() ? bytes / item_bytes() : share(ranks) * static_cast<size_t>(ranks);
  }

  friend auto operator<=>(const Case&, const Case&) = default;

  /// One line without its end; parse() reads it.
  std::string text() const {
    std::ostringstream out;
    out << name_of(operation) << ' ' << name_of(dtype) << ' ' << name_of(placement) << ' ' << bytes;
    return out.str();
  }
  static std::optional<Case> parse(std::istream& in) {
    std::string operation, dtype, placement;
    Case result;
    if (!(in >> operation >> dtype >> placement >> result.bytes)) return std::nullopt;
    const auto o = value_of<Operation>(kOperations, operation);
    const auto d = value_of<Dtype>(kDtypes, dtype);
    const auto p = value_of<Placement>(kPlacements, placement);
    if (!o || !d || !p) return std::nullopt;
    result.operation = *o, result.dtype = *d, result.placement = *p;
    return result;
  }
};

}  // namespace lockstep::bench
