// The outer state as machines send it: what comes back, and bytes that no machine has written.

#include "diloco/state_bytes.h"

#include <cstring>
#include <random>
#include <sstream>

#include <gtest/gtest.h>
#include <lockstep/checkpoint.h>
#include <lockstep/error.h>
#include <torch/torch.h>

namespace lockstep::diloco {
namespace {

StateDict example() {
  StateDict state;
  state.insert("sent_at", at::scalar_tensor(7, at::kLong));
  state.insert("outer", at::arange(12, at::kFloat).reshape({3, 4}).t());
  state.insert("other.0", at::tensor({1, 0, 1}).to(at::kBool));
  state.insert("other.1", at::zeros({0, 3}, at::kDouble));
  state.insert("other.2", at::full({2}, 1.5, at::kBFloat16));
  return state;
}

TEST(StateBytes, AStateComesBackAsItWas) {
  const StateDict state = example(), back = state_of_bytes(bytes_of_state(state));
  EXPECT_EQ(hash(back), hash(state));
  ASSERT_EQ(back.keys(), state.keys());
  for (const auto& item : state) EXPECT_EQ(back[item.key()].scalar_type(), item.value().scalar_type()) << item.key();
  EXPECT_EQ(state_of_bytes(bytes_of_state(StateDict())).size(), 0);
}

TEST(StateBytes, BytesThatEndTooEarlyOrGoOnAreRefused) {
  const std::string bytes = bytes_of_state(example());
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW((void)state_of_bytes(std::string_view(bytes).substr(0, size)), Error) << size;
  EXPECT_THROW((void)state_of_bytes(bytes + '\0'), Error);
}

TEST(StateBytes, ChangedBytesAreReadOrRefused) {
  std::mt19937 random(3);
  const std::string bytes = bytes_of_state(example());
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string changed = bytes;
    for (unsigned n = 0; n < 1 + random() % 4; ++n)
      changed[random() % changed.size()] = static_cast<char>(random() % 3 == 0 ? 0xff : random());
    try {
      const StateDict state = state_of_bytes(changed);
      for (const auto& item : state) EXPECT_LE(item.value().nbytes(), changed.size());
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 10000);
}

TEST(StateBytes, SizesWhoseProductOverflowsAreRefused) {
  StateDict state;
  state.insert("outer", at::zeros({2, 2}, at::kByte));
  std::string bytes = bytes_of_state(state);
  const uint64_t large = uint64_t{1} << 32;
  std::memcpy(bytes.data() + bytes.size() - 4 - 16, &large, 8);
  std::memcpy(bytes.data() + bytes.size() - 4 - 8, &large, 8);
  EXPECT_THROW((void)state_of_bytes(bytes), Error);
}

TEST(StateBytes, PicklesAreRefusedUnread) {
  std::stringstream stream;
  torch::save(at::zeros({2}), stream);
  EXPECT_THROW((void)state_of_bytes(stream.str()), Error);
  EXPECT_THROW((void)state_of_bytes("\x80\x02"
                                    "cposix\nsystem\nX\x04\x00\x00\x00true\x85R."),
               Error);
}

TEST(StateBytes, WhatIsNoPlainTensorIsNotSent) {
  StateDict state;
  state.insert("outer", at::zeros({2, 2}).to_sparse());
  EXPECT_THROW((void)bytes_of_state(state), c10::Error);
}

}  // namespace
}  // namespace lockstep::diloco
