#include "checkpoint/checkpoint_message.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include <c10/util/Exception.h>

#include "checkpoint/failure.h"

namespace lockstep {
namespace {

using Outcome = CheckpointMessage::Outcome;
using testing::failure;

std::vector<CheckpointMessage> samples() {
  return {
      {},
      {.outcome = Outcome::kNothing, .steps = 1000},
      {.outcome = Outcome::kFailed, .text = "\n  rank 1: the hook is gone"},
      {.outcome = Outcome::kDiverged, .text = "net.bias on rank 1 differs from that on rank 0"},
      {.steps = -1, .step_on_disk = 42, .text = "step-000000000042.0.pt", .state = std::string("PK\x03\x04\0\xff", 6)},
      {.steps = std::numeric_limits<int64_t>::max(), .text = "", .state = std::string(1 << 16, '\0')}};
}

TEST(CheckpointMessage, ArrivesAsItWasSent) {
  for (const CheckpointMessage& sent : samples()) EXPECT_EQ(CheckpointMessage::decode(sent.encode(), 0), sent);
}

TEST(CheckpointMessage, OfAnotherLengthIsRefusedWithItsSender) {
  for (const CheckpointMessage& sent : samples()) {
    const std::string bytes = sent.encode();
    for (size_t size = 0; size < std::min<size_t>(bytes.size(), 100); ++size)
      EXPECT_THROW(CheckpointMessage::decode(bytes.substr(0, size), 0), Error) << size;
    EXPECT_THROW(CheckpointMessage::decode(bytes.substr(0, bytes.size() - 1), 0), Error);
    EXPECT_THROW(CheckpointMessage::decode(bytes + '\0', 0), Error);
  }
  const std::string text = failure([] { CheckpointMessage::decode("step-000000000042.0.pt", 2); });
  EXPECT_NE(text.find("rank 2 sent 22 bytes that are not a message about a checkpoint"), std::string::npos) << text;
}

TEST(CheckpointMessage, WithWhatNoEncoderWritesIsRefused) {
  const std::string good = CheckpointMessage{.text = "abc", .state = "de"}.encode();
  const auto with = [&](size_t at, char byte) {
    std::string bytes = good;
    bytes.at(at) = byte;
    return bytes;
  };
  for (size_t at = 0; at < 4; ++at) EXPECT_THROW(CheckpointMessage::decode(with(at, '?'), 0), Error) << at;
  for (const char outcome : {5, 6, -1}) EXPECT_THROW(CheckpointMessage::decode(with(4, outcome), 0), Error);
  // Sizes that do not add up to what follows, up to those that only add up modulo 2^64.
  for (size_t at = 21; at < 37; ++at) EXPECT_THROW(CheckpointMessage::decode(with(at, '\x7f'), 0), Error) << at;
  std::string wraps = good;
  for (size_t at = 21; at < 29; ++at) wraps[at] = '\xff';  // the text: 2^64 - 1
  wraps[29] = 6;                                           // the state: 6, together 5
  EXPECT_THROW(CheckpointMessage::decode(wraps, 0), Error);
  EXPECT_EQ(CheckpointMessage::decode(good, 0).state, "de");
}

TEST(Attempt, IsWhatWasDoneOrWhatWasThrown) {
  EXPECT_EQ(attempt([](CheckpointMessage& message) { message.text = "done"; }), (CheckpointMessage{.text = "done"}));
  const auto failed = attempt([](CheckpointMessage& message) {
    message.text = message.state = "half";
    throw Error("no");
  });
  EXPECT_EQ(failed, (CheckpointMessage{.outcome = Outcome::kFailed, .text = "no"}));
  EXPECT_EQ(failure_of([] { TORCH_CHECK(false, "a check"); }), "a check");
  EXPECT_EQ(failure_of([] { throw Error(""); }), "an exception without a message");
  EXPECT_EQ(failure_of([] {}), "");
}

}  // namespace
}  // namespace lockstep
