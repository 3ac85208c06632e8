#include "observe/progress_text.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace lockstep {
namespace {

ProgressState training() {
  ProgressState state;
  state.epoch = 1;
  state.epochs = 5;
  state.step = 180;
  state.steps = 468;
  state.loss = 0.34123;
  state.samples_per_second = 14210.4;
  state.communication_share = 0.071;
  state.seconds_left = 41.2;
  return state;
}

TEST(ProgressText, ShowsEverything) {
  EXPECT_EQ(progress_text(training(), 120),
            "epoch 2/5  step 180/468  loss 0.3412  14,210 samples/s  comm 7 %  ETA 0:42");
}

TEST(ProgressText, LeavesOutWhatIsNotKnown) {
  ProgressState state;
  state.steps = 468;
  EXPECT_EQ(progress_text(state, 80), "epoch 1  step 0/468");
  state.label = "test";
  EXPECT_EQ(progress_text(state, 80), "test  step 0/468");
}

TEST(ProgressText, ShowsTheTimeTakenAtTheEnd) {
  ProgressState state = training();
  state.seconds_taken = 3725;
  EXPECT_TRUE(progress_text(state, 120).ends_with("  time 1:02:05"));
}

TEST(ProgressText, NeverWiderThanTheTerminal) {
  const ProgressState state = training();
  const size_t full = progress_text(state, 1000).size();
  EXPECT_EQ(progress_text(state, static_cast<int>(full)).size(), full);
  for (int columns = 0; columns <= static_cast<int>(full); ++columns)
    EXPECT_LE(progress_text(state, columns).size(), static_cast<size_t>(columns));
  EXPECT_EQ(progress_text(state, -1), "");
  EXPECT_EQ(progress_text(state, 66), "epoch 2/5  step 180/468  loss 0.3412  14,210 samples/s  ETA 0:42");
  EXPECT_EQ(progress_text(state, 50), "epoch 2/5  step 180/468  loss 0.3412  ETA 0:42");
  EXPECT_EQ(progress_text(state, 45), "epoch 2/5  step 180/468  loss 0.3412");
  EXPECT_EQ(progress_text(state, 30), "epoch 2/5  step 180/468");
  EXPECT_EQ(progress_text(state, 15), "step 180/468");
  EXPECT_EQ(progress_text(state, 7), "step 18");
}

TEST(ProgressText, ALabelCannotSteerTheTerminal) {
  ProgressState state;
  state.steps = 3;
  state.label = "a\nb\x1b[2J";
  const std::string text = progress_text(state, 200);
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_NE(text.find("a\\x0ab"), std::string::npos) << text;
}

TEST(ProgressText, Losses) {
  ProgressState state = training();
  const auto loss = [&](double value) {
    state.loss = value;
    const std::string text = progress_text(state, 120);
    return text.substr(text.find("loss"), text.find("  14,") - text.find("loss"));
  };
  EXPECT_EQ(loss(0), "loss 0.0000");
  EXPECT_EQ(loss(-2.5), "loss -2.5000");
  EXPECT_EQ(loss(0.0000123), "loss 1.230e-05");
  EXPECT_EQ(loss(123456), "loss 1.235e+05");
  EXPECT_EQ(loss(std::numeric_limits<double>::infinity()), "loss inf");
  EXPECT_EQ(loss(std::numeric_limits<double>::quiet_NaN()), "loss nan");
}

TEST(ProgressText, Thousands) {
  EXPECT_EQ(with_thousands(0), "0");
  EXPECT_EQ(with_thousands(999), "999");
  EXPECT_EQ(with_thousands(1000), "1,000");
  EXPECT_EQ(with_thousands(14210.4), "14,210");
  EXPECT_EQ(with_thousands(-1234567), "-1,234,567");
  EXPECT_EQ(with_thousands(123456789012.0), "123,456,789,012");
  EXPECT_EQ(with_thousands(std::numeric_limits<double>::infinity()), "inf");
}

TEST(ProgressText, SlowRatesKeepADigit) {
  ProgressState state = training();
  state.samples_per_second = 0.75;
  EXPECT_NE(progress_text(state, 120).find("  0.8 samples/s"), std::string::npos);
}

TEST(ProgressText, Times) {
  EXPECT_EQ(minutes_and_seconds(0), "0:00");
  EXPECT_EQ(minutes_and_seconds(0.1), "0:01");
  EXPECT_EQ(minutes_and_seconds(60), "1:00");
  EXPECT_EQ(minutes_and_seconds(725), "12:05");
  EXPECT_EQ(minutes_and_seconds(3 * 3600 + 7 * 60 + 9), "3:07:09");
  EXPECT_EQ(minutes_and_seconds(-5), "0:00");
  EXPECT_EQ(minutes_and_seconds(std::nan("")), "0:00");
  EXPECT_EQ(minutes_and_seconds(std::numeric_limits<double>::infinity()), "876000:00:00");
}

}  // namespace
}  // namespace lockstep
