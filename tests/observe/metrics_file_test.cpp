#include "observe/metrics_file.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "base/atomic_file.h"
#include "observe/full_disk.h"
#include "observe/json_text.h"
#include "support/temporary_folder.h"

namespace lockstep::metrics_file_test {
namespace {

constexpr std::chrono::milliseconds kLong = std::chrono::hours(1);

class MetricsFileTest : public ::testing::Test {
 protected:
  std::vector<nlohmann::json> lines() const {
    std::vector<nlohmann::json> lines;
    std::istringstream text(read_file(path_));
    for (std::string line; std::getline(text, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }

  TemporaryFolder folder_;
  const std::string path_ = (folder_.path() / "metrics.jsonl").string();
};

TEST_F(MetricsFileTest, TellsARunFromItsMachineToItsEnd) {
  {
    MetricsFile file(path_, kLong);
    file.run({.rank = 1, .world_size = 2, .backend = "shm", .libtorch_version = "2.13.0", .first_step = 7},
             system_facts());
    file.scalar({.step = 8, .epoch = 3}, "train/loss", 0.25);
    file.steps({.step = 8, .epoch = 3},
               {.steps = 1, .samples = 64, .seconds = 0.5, .longest_s = 0.5, .communication_s = 0.125});
    file.reductions({.step = 8, .epoch = 3},
                    {.reductions = 1, .bytes = 40, .buckets = {{.parameters = {"a", "b", "c"}, .bytes = 40}}});
  }
  const auto all = lines();
  ASSERT_EQ(all.size(), 5u);
  EXPECT_EQ(all[0]["type"], "run");
  EXPECT_EQ(all[0]["format"], 1);
  EXPECT_EQ(all[0]["step"], 7);
  EXPECT_EQ(all[0]["rank"], 1);
  EXPECT_EQ(all[0]["pid"], ::getpid());
  EXPECT_NE(all[0]["command"][0].get<std::string>().find("observe_test"), std::string::npos);
  EXPECT_FALSE(all[0]["cpu"].get<std::string>().empty());
  EXPECT_GT(all[0]["memory_bytes"], 1 << 20);
  EXPECT_FALSE(all[0]["versions"]["lockstep"].get<std::string>().empty());
  EXPECT_EQ(all[1]["name"], "train/loss");
  EXPECT_EQ(all[1]["value"], 0.25);
  EXPECT_EQ(all[1]["epoch"], 3);
  EXPECT_LE(all[0]["monotonic_s"], all[1]["monotonic_s"]);
  EXPECT_GT(all[1]["wall_s"], 1.7e9);
  EXPECT_EQ(all[2]["samples"], 64);
  EXPECT_EQ(all[2]["communication_s"], 0.125);
  EXPECT_EQ(all[3]["buckets"][0]["first_parameter"], "a");
  EXPECT_EQ(all[3]["buckets"][0]["last_parameter"], "c");
  EXPECT_EQ(all[3]["buckets"][0]["parameters"], 3);
  EXPECT_EQ(all[4]["type"], "end");
  EXPECT_EQ(all[4]["by"], "return");
  EXPECT_EQ(all[4]["step"], 8);
}

TEST_F(MetricsFileTest, AnExceptionThatUnwindsIsToldFromAReturn) {
  try {
    MetricsFile file(path_, kLong);
    throw 1;
  } catch (int) {
  }
  EXPECT_EQ(lines().back()["by"], "exception");
}

TEST_F(MetricsFileTest, NamesMayHoldAnything) {
  const std::vector<std::string> names{"a\"b\\c\n", "\x01", "Verlust \xc3\xbc", "", "</script>", "\xff broken"};
  {
    MetricsFile file(path_, kLong);
    for (const std::string& name : names) file.scalar({}, name, 1);
  }
  const auto all = lines();
  for (size_t i = 0; i + 1 < names.size(); ++i) EXPECT_EQ(all[i]["name"], names[i]);
  EXPECT_EQ(all[names.size() - 1]["name"], "\xef\xbf\xbd broken");
}

TEST_F(MetricsFileTest, GoesOnBehindALineThatWasCutOff) {
  {
    GrowingFile file(path_, "", kLong);
    file.append("{\"type\":\"scalar\",\"na");
  }
  MetricsFile(path_, kLong).scalar({}, "x", 1);
  const std::string text = read_file(path_);
  EXPECT_TRUE(text.starts_with("{\"type\":\"scalar\",\"na\n{\"type\":\"scalar\",\"step\":0,"));
}

TEST_F(MetricsFileTest, SaysHowManyLinesAFullDiskCost) {
  FullDisk disk(1000);
  ScopedFileOperations scoped(disk);
  ::testing::internal::CaptureStderr();
  int written = 0;
  {
    MetricsFile file(path_, kLong);
    for (int i = 0; i < 20; ++i) {
      if (i == 15) disk.room = 1 << 20;
      file.scalar({.step = i}, "x", i);
      file.flush();
      written += disk.room > 0;
    }
  }
  ::testing::internal::GetCapturedStderr();
  int64_t lost = -1, scalars = 0;
  for (const auto& line : lines()) {
    if (line["type"] == "lost") lost = line["lines"];
    scalars += line["type"] == "scalar";
  }
  EXPECT_GT(lost, 0);
  EXPECT_EQ(scalars + lost, 20);
}

TEST(JsonText, NumbersReadBackAsTheSame) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 100'000; ++i) {
    const uint64_t bits = random();
    double value;
    std::memcpy(&value, &bits, sizeof value);
    if (!std::isfinite(value)) continue;
    std::string text;
    append_json(text, value);
    ASSERT_EQ(nlohmann::json::parse(text).get<double>(), value) << text;
  }
  for (const int64_t value : {std::numeric_limits<int64_t>::min(), int64_t{0}, std::numeric_limits<int64_t>::max()}) {
    std::string text;
    append_json(text, value);
    EXPECT_EQ(nlohmann::json::parse(text).get<int64_t>(), value);
  }
}

TEST(JsonText, WhatIsNoNumberIsAString) {
  const double infinity = std::numeric_limits<double>::infinity();
  std::string text;
  for (const double value : {std::nan(""), infinity, -infinity}) append_json(text, value);
  EXPECT_EQ(text, "\"NaN\"\"Infinity\"\"-Infinity\"");
}

}  // namespace
}  // namespace lockstep::metrics_file_test
