#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <utility>

#include <lockstep/error.h>

#include "checkpoint/format/file_tools.h"
#include "support/temporary_folder.h"

// Headers of .safetensors files and pickles of .pt files that are as large as allowed, or say much in few bytes: the
// time and memory to list or refuse one depend on its size.

namespace lockstep {
namespace {

// A header of 100 MB takes 3 s, and 3 times its size. Sanitizers multiply both.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr double kSlower = 20;
#else
constexpr double kSlower = 1;
#endif
constexpr double kSecondsPerByte = 3e-8, kStartSeconds = 0.3;
constexpr double kMemoryPerByte = 3, kStartBytes = 32 << 20;

constexpr size_t kHeaderBytes = 20'000'000;  // a fifth of the largest, to save time

class LargeFile : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& bytes) {
    path_ = (folder_.path() / name).string();
    std::ofstream(path_, std::ios::binary) << bytes;
  }
  void write_header(const std::string& header, const std::string& data = "") {
    const uint64_t length = header.size();
    write("large.safetensors", std::string(reinterpret_cast<const char*>(&length), 8) + header + data);
  }

  /// Lists it in a process of its own, which is measured. `refusal`: its message; empty: it is listed.
  void expect_cheap(const std::string& refusal, double most_bytes = 0) const {
    const auto size = static_cast<double>(std::filesystem::file_size(path_));
    const std::string said = (folder_.path() / "said").string();
    const pid_t child = ::fork();
    if (child == 0) {
      std::ofstream file(said);
      size_t written = 0;
      try {
        inspect_file(path_, [&](const std::string& text) { written += text.size(); });
        file << "listed " << (written > 0);
      } catch (const Error& error) {
        file << error.what();
      }
      file.close();
      ::_exit(0);
    }
    int status = 0;
    rusage used{};
    ASSERT_EQ(::wait4(child, &status, 0, &used), child);
    ASSERT_EQ(status, 0);
    std::ifstream file(said);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    EXPECT_NE(text.find(refusal.empty() ? "listed 1" : refusal), std::string::npos) << text;
    const auto seconds = [](const timeval& time) {
      return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
    };
    EXPECT_LT(seconds(used.ru_utime) + seconds(used.ru_stime), kSlower * (kStartSeconds + size * kSecondsPerByte));
    if (kSlower == 1) {
      EXPECT_LT(static_cast<double>(used.ru_maxrss) * 1024, std::max(most_bytes, kStartBytes + size * kMemoryPerByte));
    }
  }

  TemporaryFolder folder_;
  std::string path_;
};

std::string hex(size_t number) {
  char text[20];
  std::snprintf(text, sizeof text, "%zx", number);
  return text;
}

/// Items by number, until they take `bytes`, with commas between.
std::string items(size_t bytes, const std::function<std::string(size_t)>& item) {
  std::string all;
  for (size_t i = 0; all.size() < bytes; ++i) all += (i > 0 ? "," : "") + item(i);
  return all;
}

std::string empty_tensor(const std::string& name) {
  return '"' + name + R"(":{"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
}

TEST_F(LargeFile, HeadersThatAreRightAreListed) {
  write_header('{' + items(kHeaderBytes, [](size_t i) { return empty_tensor(hex(i)); }) + '}');
  expect_cheap("");
  const std::string long_name(1000, 'n');
  write_header('{' + items(kHeaderBytes, [&](size_t i) { return empty_tensor(long_name + hex(i)); }) + '}');
  expect_cheap("");
  const std::string value(90, 'v');
  write_header(R"({"__metadata__":{)" +
               items(kHeaderBytes, [&](size_t i) { return '"' + hex(i) + "\":\"" + value + '"'; }) + "}}");
  expect_cheap("");
  write_header('{' + std::string(kHeaderBytes, ' ') + '}');
  expect_cheap("");
}

TEST_F(LargeFile, HeadersThatAreWrongAreRefused) {
  // The child starts with the test's memory.
  const auto tensors = [] { return items(kHeaderBytes, [](size_t i) { return empty_tensor(hex(i)); }); };
  write_header('{' + tensors() + ',');
  expect_cheap("is not a JSON object");
  write_header('{' + tensors() + ',' + empty_tensor("7") + '}');
  expect_cheap("its header has `7` twice");
  write_header(R"({"__metadata__":{)" + items(kHeaderBytes, [](size_t i) { return '"' + hex(i) + "\":\"\""; }) + "}}");
  expect_cheap("more than 262144 strings");
  write_header("{\"" + std::string(kHeaderBytes, 'n') + "\":0}");
  expect_cheap("a string of more than 8388608 bytes");
  write_header(R"({"a":{"shape":[)" + std::string(kHeaderBytes, '1') + "]}}");
  expect_cheap("a number of more than");
  write_header(R"({"a":{"shape":[)" + items(kHeaderBytes, [](size_t) { return "1"; }) + "]}}");
  expect_cheap("has more than 64 dimensions");
  write_header(R"({"a":{)" + items(kHeaderBytes, [](size_t i) { return '"' + hex(i) + "\":0"; }) + "}}");
  expect_cheap("has no dtype");
  write_header(std::string(kHeaderBytes, '['));
  expect_cheap("nested deeper");
}

/// An archive of one stored entry, data.pkl, without a checksum.
std::string archive_of(const std::string& pickle) {
  const std::string name = "a/data.pkl";
  const auto number = [](uint64_t value, size_t bytes) {
    return std::string(reinterpret_cast<const char*>(&value), bytes);
  };
  const auto zeros = [](size_t bytes) { return std::string(bytes, '\0'); };
  const std::string sizes = zeros(4) + number(pickle.size(), 4) + number(pickle.size(), 4) + number(name.size(), 2);
  const std::string local = "PK\3\4" + zeros(10) + sizes + zeros(2) + name + pickle;
  const std::string record = "PK\1\2" + zeros(12) + sizes + zeros(2 + 2 + 2 + 2 + 4 + 4) + name;
  return local + record + "PK\5\6" + zeros(4) + number(1, 2) + number(1, 2) + number(record.size(), 4) +
         number(local.size(), 4) + zeros(2);
}

std::string pickled_text(const std::string& text) {
  const auto size = static_cast<uint32_t>(text.size());
  return 'X' + std::string(reinterpret_cast<const char*>(&size), 4) + text;
}

TEST_F(LargeFile, PicklesOfLongNames) {
  const std::string begin = "\x80\x02}(", end = "u.";
  std::string pickle = begin;
  for (size_t i = 0; pickle.size() < kHeaderBytes; ++i)
    pickle += pickled_text(std::string(60'000, 'n') + hex(i)) + "K\1";
  write("large.pt", archive_of(std::exchange(pickle, {}) + end));
  expect_cheap("");
  pickle = begin;
  for (size_t i = 0; pickle.size() < kHeaderBytes; ++i) pickle += pickled_text(std::string(500, 'n') + hex(i)) + "K\1";
  write("large.pt", archive_of(std::exchange(pickle, {}) + end));
  expect_cheap("");
  // One name, stored and used again for a million empty lists in two bytes each, or over as many.
  const std::string key = pickled_text(std::string(60'000, 'n'));
  pickle = "\x80\x02}(" + key + "q\1]";
  for (size_t i = 0; i < 1'000'000; ++i) pickle += "h\1]";
  write("large.pt", archive_of(std::exchange(pickle, {}) + end));
  expect_cheap("the names in it take too much", 200e6);
  pickle = begin + key + "](";
  for (size_t i = 0; i < 1'000'000; ++i) pickle += ']';
  write("large.pt", archive_of(std::exchange(pickle, {}) + "e" + end));
  expect_cheap("", 200e6);
}

}  // namespace
}  // namespace lockstep
