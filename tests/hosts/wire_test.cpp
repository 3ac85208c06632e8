#include "hosts/wire.h"

#include <gtest/gtest.h>

#include <random>

#include "hosts/messages.h"

namespace lockstep::hosts {
namespace {

Prepare sample() {
  return {.command = {"./train", "", "a b"},
          .environment = {"A=1"},
          .folder = "/home",
          .run_dir = std::string("r\0s", 3),
          .keep_run_dir = true,
          .slots = 4,
          .max_restarts = INT_MAX,
          .run_id = "id"};
}

TEST(Wire, MessagesComeBackAsTheyWere) {
  const Prepare back = decode<Prepare>(encode(sample()));
  EXPECT_EQ(back.command, sample().command);
  EXPECT_EQ(back.run_dir, sample().run_dir);
  EXPECT_TRUE(back.keep_run_dir);
  EXPECT_EQ(back.max_restarts, INT_MAX);
  const Ended ended = decode<Ended>(encode(Ended{.rank = 3, .how = 1, .value = 9, .seconds = 0.25, .peak_bytes = -1}));
  EXPECT_EQ(ended.seconds, 0.25);
  EXPECT_EQ(ended.peak_bytes, -1);
  const Seen seen = decode<Seen>(encode(Seen{.look = {.processor_times = true}, .ranks = {{}, {.processor_ns = 7}}}));
  ASSERT_EQ(seen.ranks.size(), 2u);
  EXPECT_EQ(seen.ranks[1].processor_ns, 7);
}

TEST(Wire, FramesAreBounded) {
  std::string bytes;
  append_frame(bytes, 7, "body");
  append_frame(bytes, 8, "");
  for (size_t size = 0; size < 9; ++size) EXPECT_FALSE(parse_frame(bytes.substr(0, size), 5)) << size;
  const auto frame = parse_frame(bytes, 5);
  ASSERT_TRUE(frame);
  EXPECT_EQ(frame->kind, 7);
  EXPECT_EQ(frame->body, "body");
  EXPECT_EQ(parse_frame(std::string_view(bytes).substr(frame->bytes), 5)->kind, 8);
  EXPECT_THROW(parse_frame(bytes, 4), ProtocolError);
  EXPECT_THROW(parse_frame(std::string(4, '\0'), 5), ProtocolError);
  EXPECT_THROW(parse_frame(std::string(4, '\xff'), kMaxFrameBytes), ProtocolError);
}

TEST(Wire, SizesThatExceedWhatArrivedAreRefusedBeforeAnythingIsAllocated) {
  WireWriter writer;
  writer(uint64_t{1} << 60);
  EXPECT_THROW(decode<Prepare>(writer.out), ProtocolError);
  writer.out += std::string(64, 'x');
  EXPECT_THROW(decode<Prepare>(writer.out), ProtocolError);
  EXPECT_THROW(decode<Number>(encode(Number{1}) + "x"), ProtocolError);
  WireWriter large;
  large(int64_t{1} << 40);
  EXPECT_THROW(decode<Started>(large.out), ProtocolError);
  EXPECT_THROW(decode<Look>(std::string(16, '\x02')), ProtocolError) << "neither true nor false";
}

/// Any bytes are a message or refused; a message that is read comes back as the same bytes.
template <typename Message>
void try_bytes(const std::string& bytes) {
  try {
    const auto message = decode<Message>(bytes);
    EXPECT_EQ(encode(message), bytes);
  } catch (const ProtocolError&) {
  }
}

TEST(Wire, DamagedMessagesAreReadOrRefused) {
  std::mt19937 random(42);
  const std::vector<std::string> good = {encode(sample()), encode(Hello{.version = "0.1.0", .host = "node1"}),
                                         encode(Seen{.ranks = {{}, {}}}), encode(Pages{.pages = {{1, "abc"}}})};
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = good[random() % good.size()];
    for (unsigned change = random() % 4; change > 0 && !bytes.empty(); --change) {
      const size_t at = random() % bytes.size();
      switch (random() % 4) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes.resize(at);
          break;
        case 2:
          bytes.insert(at, 1 + random() % 9, static_cast<char>(random() % 3));
          break;
        default:
          bytes.erase(at, 1 + random() % 9);
      }
    }
    try_bytes<Prepare>(bytes);
    try_bytes<Hello>(bytes);
    try_bytes<Seen>(bytes);
    try_bytes<Pages>(bytes);
    try_bytes<Ended>(bytes);
    try {
      while (const auto frame = parse_frame(bytes, kMaxHelloBytes)) bytes.erase(0, frame->bytes);
    } catch (const ProtocolError&) {
    }
  }
}

}  // namespace
}  // namespace lockstep::hosts
