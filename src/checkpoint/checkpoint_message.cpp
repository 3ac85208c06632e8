#include "checkpoint/checkpoint_message.h"

#include <c10/util/Exception.h>

#include <string_view>

#include "base/error.h"

// The encoding: kMessageMagic, one byte for the outcome, then steps, step_on_disk and the sizes of text and state,
// 8 bytes each, little endian, then text and state. The sizes must add up to the size received.

namespace lockstep {
namespace {

constexpr std::string_view kMessageMagic = "LSC2";
constexpr size_t kMessageHeaderBytes = kMessageMagic.size() + 1 + 4 * sizeof(uint64_t);

void append_word(std::string& bytes, uint64_t word) {
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(word >> 8 * i);
}

uint64_t word_at(std::string_view bytes, size_t at) {
  uint64_t word = 0;
  for (size_t i = 0; i < 8; ++i) word |= uint64_t{static_cast<unsigned char>(bytes[at + i])} << 8 * i;
  return word;
}

}  // namespace

std::string CheckpointMessage::encode() const {
  std::string bytes;
  bytes.reserve(kMessageHeaderBytes + text.size() + state.size());
  bytes.append(kMessageMagic).push_back(static_cast<char>(outcome));
  append_word(bytes, static_cast<uint64_t>(steps));
  append_word(bytes, static_cast<uint64_t>(step_on_disk));
  append_word(bytes, text.size());
  append_word(bytes, state.size());
  return bytes.append(text).append(state);
}

CheckpointMessage CheckpointMessage::decode(std::string bytes, int rank) {
  const auto refuse_unless = [&](bool good) {
    if (good) return;
    throw Error("rank " + std::to_string(rank) + " sent " + std::to_string(bytes.size()) +
                " bytes that are not a message about a checkpoint; run the same build of Lockstep on all ranks, and "
                "make the same calls in the same order on all of them");
  };
  refuse_unless(bytes.size() >= kMessageHeaderBytes && bytes.starts_with(kMessageMagic));
  const auto outcome = static_cast<uint8_t>(bytes[kMessageMagic.size()]);
  const size_t words = kMessageMagic.size() + 1, rest = bytes.size() - kMessageHeaderBytes;
  const uint64_t text_size = word_at(bytes, words + 16), state_size = word_at(bytes, words + 24);
  refuse_unless(outcome <= static_cast<uint8_t>(Outcome::kInSlices));
  refuse_unless(text_size <= rest && state_size == rest - text_size);
  CheckpointMessage message{.outcome = static_cast<Outcome>(outcome),
                            .steps = static_cast<int64_t>(word_at(bytes, words)),
                            .step_on_disk = static_cast<int64_t>(word_at(bytes, words + 8)),
                            .text = bytes.substr(kMessageHeaderBytes, text_size),
                            .state = {}};
  message.state =
      std::move(bytes.erase(0, kMessageHeaderBytes + text_size));  // in place: a state can be as large as a model
  return message;
}

CheckpointMessage attempt(const std::function<void(CheckpointMessage&)>& body) {
  CheckpointMessage message;
  const std::string failure = failure_of([&] { body(message); });
  if (failure.empty()) return message;
  return {.outcome = CheckpointMessage::Outcome::kFailed, .text = failure};
}

}  // namespace lockstep
