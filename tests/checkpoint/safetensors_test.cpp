#include <gtest/gtest.h>

#include <fstream>
#include <limits>

#include <ATen/ATen.h>

#include <lockstep/checkpoint.h>

#include "base/atomic_file.h"
#include "checkpoint/failure.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::failure;

class Safetensors : public ::testing::Test {
 protected:
  std::string path() const { return (folder_.path() / "state.safetensors").string(); }

  /// A file of `header` and `data`; its length field is `length` if given.
  void write(const std::string& header, const std::string& data = {}, std::optional<uint64_t> length = {}) {
    const uint64_t announced = length.value_or(header.size());
    write_bytes(std::string(reinterpret_cast<const char*>(&announced), 8) + header + data);
  }
  void write_bytes(const std::string& bytes) { std::ofstream(path(), std::ios::binary) << bytes; }

  /// The text of the Error about the file, which must name it.
  std::string refusal() {
    const std::string text = failure([&] { (void)load(path()); });
    EXPECT_NE(text, "") << "it was loaded";
    EXPECT_NE(text.find(path()), std::string::npos) << text;
    return text;
  }
  void expect_refusal(const std::string& part) {
    const std::string text = refusal();
    EXPECT_NE(text.find(part), std::string::npos) << part << "\nis not in\n" << text;
  }

  Checkpoint round_trip(const Checkpoint& checkpoint) {
    save(checkpoint, path());
    return load(path());
  }

  TemporaryFolder folder_;
};

void expect_same(const StateDict& actual, const StateDict& expected) {
  EXPECT_EQ(actual.keys(), expected.keys());
  for (const auto& item : expected) {
    const at::Tensor& tensor = actual[item.key()];
    EXPECT_EQ(tensor.scalar_type(), item.value().scalar_type()) << item.key();
    EXPECT_EQ(tensor.sizes(), item.value().sizes()) << item.key();
    EXPECT_TRUE(at::equal(tensor, item.value().detach())) << item.key();
  }
}

StateDict every_kind() {
  StateDict state;
  for (auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort, at::kChar,
                     at::kByte, at::kBool, at::kComplexFloat})
    state.insert(c10::toString(dtype), at::arange(-3, 4).to(dtype));
  state.insert("scalar", at::scalar_tensor(7.5));
  state.insert("empty", at::empty({0}));
  state.insert("empty of a shape", at::empty({3, 0, 2}, at::kLong));
  state.insert("transposed", at::arange(6).reshape({2, 3}).t());
  state.insert("every second", at::arange(10, at::kDouble).slice(0, 1, 10, 2));
  state.insert("expanded", at::arange(3).expand({2, 3}));
  state.insert("wants a gradient", at::ones({2}).set_requires_grad(true));
  state.insert("odd name \" \\ \n \xc3\xa9 \xf0\x9f\x98\x80", at::ones({1}));
  state.insert("", at::ones({1}));
  state.insert("last, of one byte", at::ones({1}, at::kByte));
  return state;
}

TEST_F(Safetensors, KeepsEveryKindOfTensorAndTheirOrder) {
  const Checkpoint checkpoint{every_kind(), {{"epoch", "3"}, {"", "empty name"}, {"odd \"\n", ""}}};
  const Checkpoint loaded = round_trip(checkpoint);
  expect_same(loaded.tensors, checkpoint.tensors);
  EXPECT_EQ(loaded.metadata, checkpoint.metadata);
  EXPECT_EQ(hash(loaded.tensors), hash(checkpoint.tensors));
}

TEST_F(Safetensors, KeepsEveryBitOfAFloat) {
  const auto bits = at::arange(1 << 16, at::kInt).mul(65'521);  // NaNs with payloads, infinities, -0, denormals
  Checkpoint checkpoint;
  checkpoint.tensors.insert("x", bits.view(at::kFloat));
  EXPECT_TRUE(at::equal(round_trip(checkpoint).tensors["x"].view(at::kInt), bits));
}

TEST_F(Safetensors, NothingIsACheckpointToo) {
  const Checkpoint loaded = round_trip({StateDict(), {}});
  EXPECT_TRUE(loaded.tensors.is_empty());
  EXPECT_TRUE(loaded.metadata.empty());
}

TEST_F(Safetensors, WhatCannotBeSavedLeavesTheOldFile) {
  save({{{"old", at::ones({1})}}, {}}, path());
  const auto refused = [&](const Checkpoint& checkpoint, const std::string& part) {
    const std::string text = failure([&] { save(checkpoint, path()); });
    EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_TRUE(load(path()).tensors.contains("old"));
  };
  refused({{{"x", at::ones({1}, at::kComplexDouble)}}, {}}, "tensor `x` is complex128");
  refused({{{"__metadata__", at::ones({1})}}, {}}, "no tensor may be called __metadata__");
  refused({{{"\xff", at::ones({1})}}, {}}, "is not UTF-8");
  refused({StateDict(), {{"text", "\xc3"}}}, "is not UTF-8");
  EXPECT_NE(failure([] { save({StateDict(), {}}, "state.npz"); }).find("must end in .safetensors"), std::string::npos);
}

// A file as the format's documentation shows it, written by hand.
TEST_F(Safetensors, ReadsTheDocumentedLayout) {
  const float values[3] = {1, 2, 3};
  const std::string data(reinterpret_cast<const char*>(values), sizeof values);
  write(R"({"__metadata__":{"by":"hand"},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},)"
        R"( "a":{"data_offsets":[0,4],"shape":[],"dtype":"F32"}}   )",
        data);
  const Checkpoint loaded = load(path());
  EXPECT_EQ(loaded.metadata.at("by"), "hand");
  EXPECT_EQ(loaded.tensors["a"].item<float>(), 1);
  EXPECT_TRUE(at::equal(loaded.tensors["b"], at::tensor({2.0f, 3.0f})));
  EXPECT_EQ(loaded.tensors.keys(), (std::vector<std::string>{"b", "a"}));
}

// ---- hostile files ----

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"x":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

TEST_F(Safetensors, RefusesEveryTruncation) {
  save({{{"a", at::arange(3)}, {"b", at::ones({2, 2})}}, {{"epoch", "1"}}}, path());
  const std::string whole = read_file(path());
  for (size_t size = 0; size < whole.size(); ++size) {
    write_bytes(whole.substr(0, size));
    refusal();
  }
  write_bytes(whole + '\0');
  expect_refusal("its tensors take 40 bytes, but it holds 41");
}

TEST_F(Safetensors, EveryFlippedBitOfTheHeaderIsAnErrorOrHarmless) {
  const Checkpoint checkpoint{{{"a", at::arange(3)}, {"b", at::ones({2, 2})}}, {{"epoch", "1"}}};
  save(checkpoint, path());
  const std::string whole = read_file(path());
  uint64_t length;
  std::memcpy(&length, whole.data(), sizeof length);
  for (size_t bit = 0; bit < (8 + length) * 8; ++bit) {
    std::string bytes = whole;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    write_bytes(bytes);
    const std::string text = failure([&] {
      // A name may have changed, or a dtype to one of the same size, but never the place of the bytes.
      const Checkpoint loaded = load(path());
      ASSERT_EQ(loaded.tensors.size() + loaded.metadata.size(), 3u);
      for (const auto& item : loaded.tensors) ASSERT_LE(item.value().nbytes(), 24u);
    });
    ASSERT_TRUE(text.empty() || text.find(path()) != std::string::npos) << text;
  }
}

TEST_F(Safetensors, RefusesLiesAboutTheLengthOfTheHeader) {
  const std::string header = entry("\"U8\"", "[4]", "[0,4]");
  const uint64_t all = header.size() + 4;
  for (uint64_t length : {all + 1, uint64_t{100'000'001}, std::numeric_limits<uint64_t>::max(),
                          std::numeric_limits<uint64_t>::max() - 7, uint64_t{1} << 63, uint64_t{1} << 40}) {
    write(header, "abcd", length);
    expect_refusal("its header should take " + std::to_string(length) + " bytes");
  }
  for (uint64_t length : {uint64_t{0}, uint64_t{1}, header.size() - 1, header.size() + 1, all}) {
    write(header, "abcd", length);
    expect_refusal("its header is not a JSON object");
  }
}

TEST_F(Safetensors, RefusesWhatIsNoHeader) {
  for (const char* header :
       {"", "null", "[]", "7", "\"x\"", "{", "{}{}", "{\"x\":}", "{\"\xff\":1}", "{x:1}", "// {}"}) {
    write(header);
    expect_refusal("its header is not a JSON object");
  }
  write_bytes("This is a text of some lines, and no checkpoint.\nNone at all.\n");
  expect_refusal("it is truncated, or not a .safetensors file");
}

TEST_F(Safetensors, RefusesEntriesOfTheWrongKind) {
  for (const char* json : {"7", "[]", "null", "\"x\"", "{}", R"({"dtype":7,"shape":[4],"data_offsets":[0,4]})",
                           R"({"shape":[4],"data_offsets":[0,4]})"}) {
    write(std::string("{\"x\":") + json + "}", "abcd");
    expect_refusal("the header's entry for tensor `x` has no dtype");
  }
  for (const char* shape : {"4", "null", "[-4]", "[4.0]", "[true]", "[\"4\"]", "[null]", "[1e9]",
                            "[18446744073709551615]", "[9223372036854775808]", "[99999999999999999999999]"}) {
    write(entry("\"U8\"", shape, "[0,4]"), "abcd");
    expect_refusal("the header's entry for tensor `x` has no shape of whole numbers");
  }
  for (const char* offsets : {"4", "[-1,3]", "[0.0,4.0]", "[false,4]", "[0,\"4\"]"}) {
    write(entry("\"U8\"", "[4]", offsets), "abcd");
    expect_refusal("the header's entry for tensor `x` has no data_offsets of whole numbers");
  }
  for (const char* offsets : {"[]", "[4]", "[0,4,8]"}) {
    write(entry("\"U8\"", "[4]", offsets), "abcd");
    expect_refusal("data_offsets, not 2");
  }
  for (const char* dtype : {"\"F6_E2M3\"", "\"f32\"", "\"\"", "\"F32 \"", "\"I128\""}) {
    write(entry(dtype, "[4]", "[0,4]"), "abcd");
    expect_refusal("tensor `x` has the unknown dtype");
  }
}

TEST_F(Safetensors, RefusesTensorsOutsideOfTheFile) {
  for (const char* offsets : {"[0,5]", "[1,5]", "[4,8]", "[4,0]", "[0,3]", "[0,9223372036854775807]",
                              "[9223372036854775803,9223372036854775807]"}) {
    write(entry("\"U8\"", "[4]", offsets), "abcd");
    expect_refusal("tensor `x` should take 4 bytes, but lies at");
  }
}

TEST_F(Safetensors, RefusesShapesLargerThanTheFileWithoutTakingMemory) {
  for (const char* shape : {"[5]", "[9223372036854775807]", "[4611686018427387904,4]", "[4294967296,4294967296]",
                            "[65536,65536,65536,65536]", "[9223372036854775807,9223372036854775807]",
                            // Empty, but its strides would overflow.
                            "[0,9223372036854775807,9223372036854775807]", "[4611686018427387904,4,0]"}) {
    for (const char* dtype : {"\"U8\"", "\"F64\""}) {
      write(entry(dtype, shape, "[0,4]"), "abcd");
      expect_refusal("tensor `x` is larger than the file");
    }
  }
  write(entry("\"U8\"", "[0,1000000000]", "[0,0]"));
  EXPECT_EQ(load(path()).tensors["x"].numel(), 0);
}

TEST_F(Safetensors, RefusesOverlapsAndGaps) {
  const auto two = [&](const char* a, const char* b) {
    write(std::string(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)") + a +
              R"(},"b":{"dtype":"U8","shape":[2],"data_offsets":)" + b + "}}",
          "abcd");
  };
  two("[2,4]", "[0,2]");
  EXPECT_EQ(load(path()).tensors["b"][0].item<int>(), 'a');
  for (const auto& [a, b] : {std::pair{"[0,2]", "[1,3]"}, {"[0,2]", "[0,2]"}, {"[1,3]", "[1,3]"}, {"[1,3]", "[2,4]"}}) {
    two(a, b);
    expect_refusal("tensors overlap or leave a gap");
  }
  write(entry("\"U8\"", "[2]", "[2,4]"), "abcd");
  expect_refusal("tensor `x` starts at 2, where 0 was expected");
  write(entry("\"U8\"", "[0]", "[4,4]"), "abcd");
  expect_refusal("tensor `x` starts at 4, where 0 was expected");
  write("{}", "abcd");
  expect_refusal("its tensors take 0 bytes, but it holds 4");
}

TEST_F(Safetensors, RefusesNamesGivenTwice) {
  const std::string one = R"("x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  write("{" + one + "," + one + "}", "abcd");
  expect_refusal("its header has `x` twice");
  write(R"({"x":{"dtype":"U8","shape":[9],"shape":[4],"data_offsets":[0,4]}})", "abcd");
  expect_refusal("its header has `shape` twice");
  write(R"({"__metadata__":{"a":"1"},"__metadata__":{"a":"2"}})");
  expect_refusal("its header has `__metadata__` twice");
  write(R"({"__metadata__":{"a":"1","a":"2"}})");
  expect_refusal("its header has `a` twice");
}

TEST_F(Safetensors, RefusesMetadataThatIsNoText) {
  for (const char* value : {"7", "null", "[]", "{}", "true"}) {
    write(std::string(R"({"__metadata__":{"epoch":)") + value + "}}");
    expect_refusal("`epoch` of __metadata__ in its header is not a string");
    write(std::string(R"({"__metadata__":)") + (std::string(value) == "{}" ? "\"\"" : value) + "}");
    expect_refusal("__metadata__ in its header is not a JSON object");
  }
}

TEST_F(Safetensors, RefusesDeepNestingWithoutUsingUpTheStack) {
  constexpr size_t kDepth = 1'000'000;
  for (const auto& [open, close] : {std::pair{std::string("["), "]"}, {std::string("{\"a\":"), "}"}}) {
    std::string deep;
    for (size_t i = 0; i < kDepth; ++i) deep += open;
    write("{\"x\":" + deep);
    refusal();
    deep += "1";
    for (size_t i = 0; i < kDepth; ++i) deep += close;
    write("{\"x\":" + deep + "}");
    expect_refusal("is nested deeper");
  }
  write(entry("\"U8\"", "[[4]]", "[0,4]"), "abcd");
  expect_refusal("is nested deeper");
}

TEST_F(Safetensors, RefusesBooleansThatAreNeither) {
  write(entry("\"BOOL\"", "[2]", "[0,2]"), std::string("\1\2", 2));
  expect_refusal("tensor `x` is BOOL, but holds bytes other than 0 and 1");
}

TEST_F(Safetensors, ReadsALargeHeaderInGoodTime) {
  std::string header = "{";
  constexpr int kTensors = 100'000;
  for (int i = 0; i < kTensors; ++i)
    header += (i > 0 ? ",\"" : "\"") + std::to_string(i) + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  write(header + "}");
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(load(path()).tensors.size(), size_t{kTensors});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST_F(Safetensors, NamesAFileThatIsNotThere) {
  expect_refusal("No such file or directory");
  EXPECT_NE(failure([&] { (void)load(folder_.path().string()); }).find("it is not a regular file"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
