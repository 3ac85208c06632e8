#pragma once

#include <unordered_map>

#include <ATen/core/ivalue.h>

namespace lockstep {

/// Whether a list, tuple or dictionary contains itself, so that a traversal would never end. `looked_at` tells for each
/// container whether its contents are still being visited.
inline bool contains_itself(const c10::IValue& value, std::unordered_map<const void*, bool>& looked_at) {
  if (!value.isTuple() && !value.isList() && !value.isGenericDict()) return false;
  const auto [place, is_new] = looked_at.try_emplace(value.internalToPointer(), true);
  if (!is_new) return place->second;
  bool found = false;
  if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) found = found || contains_itself(item.value(), looked_at);
  } else if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) found = found || contains_itself(item, looked_at);
  } else {
    for (const c10::IValue& item : value.toListRef()) found = found || contains_itself(item, looked_at);
  }
  looked_at[value.internalToPointer()] = false;
  return found;
}

inline bool contains_itself(const c10::IValue& value) {
  std::unordered_map<const void*, bool> looked_at;
  return contains_itself(value, looked_at);
}

}  // namespace lockstep
