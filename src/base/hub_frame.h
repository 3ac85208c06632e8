#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace lockstep::hub {

/// What machines that train by themselves and the hub of their rounds send each other. A machine's first rank speaks
/// with its agent over a socket of the machine, in frames: a length, a kind, and the rest. The agent passes them on.
/// Kinds are other numbers than those of the agents' own messages, which go the same way.
enum class Kind : uint8_t {
  // Sent by a machine's first rank.
  kJoin = 100,  ///< its round, a hash of model and options, the first lines of these
  kContribute,  ///< the round, its step, whether it takes part, a hash of the outer copy, its pseudo-gradient
  kState,       ///< the round after which it was taken, the outer state
  kLeave,       ///< nothing: it has finished
  kLate,        ///< nothing: it has missed rounds, and contributes soon
  kProblem,     ///< a text: why it ends
  kStep,        ///< nothing: it makes steps
  // Sent by its agent.
  kGone,   ///< nothing: the rank's connection has ended
  kAlive,  ///< nothing
  // Sent by the hub.
  kGive,     ///< nothing: the machine's own state is that of the start; answered by kState
  kTake,     ///< the round, whether the run starts, the step and round of its last pseudo-gradient, the outer state
  kResult,   ///< the round, the island that is to send kState or -1, a count, and of each that took part: island, bytes
  kRefused,  ///< a text
  kSteps,    ///< nothing: another machine makes steps, or what this one waits for is on its way
  // Of a model in several fragments. Rounds whose numbers differ by a multiple of their count are of the same fragment.
  kJoinFragments,  ///< the count of fragments, and the rest as kJoin
  kTakeFragments,  ///< as kTake, with step and round for each fragment, those of round 0, 1 ... count - 1 in this order
};
constexpr Kind kFirst = Kind::kJoin, kLast = Kind::kTakeFragments;

constexpr size_t kHeadBytes = 5;
/// Of a body: of the pseudo-gradients of all machines together, or of an outer state.
constexpr uint64_t kMostBytes = 0xf0000000;

template <typename Number>
void put(std::string& to, Number number) {
  to.append(reinterpret_cast<const char*>(&number), sizeof number);
}

/// Takes a number from the front of `from`; zero if too few bytes are left.
template <typename Number>
Number take(std::string_view& from) {
  Number number{};
  if (from.size() < sizeof number) {
    from = {};
    return number;
  }
  std::memcpy(&number, from.data(), sizeof number);
  from.remove_prefix(sizeof number);
  return number;
}

inline std::string_view take_bytes(std::string_view& from) {
  const auto size = take<uint64_t>(from);
  const std::string_view bytes = from.substr(0, size);
  from.remove_prefix(bytes.size());
  return bytes;
}

inline std::string frame(Kind kind, std::string_view body = {}) {
  std::string text;
  text.reserve(kHeadBytes + body.size());
  put(text, static_cast<uint32_t>(body.size()));
  put(text, kind);
  return text.append(body);
}

}  // namespace lockstep::hub
