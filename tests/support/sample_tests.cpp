// Results that the main() of the tests must tell apart; run by tests/programs/test_main_test.py.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

namespace {

TEST(Sample, Passes) {
  EXPECT_EQ(::getenv("LEFT_BY_A_TEST"), nullptr);
  ::setenv("LEFT_BY_A_TEST", "1", 1);
}
TEST(Sample, PassesAlone) { EXPECT_EQ(::getenv("LEFT_BY_A_TEST"), nullptr); }
TEST(Sample, Fails) { EXPECT_EQ(1, 2) << "said by the one that fails"; }
TEST(Sample, IsSkipped) { GTEST_SKIP() << "SKIPPED BECAUSE it is a sample"; }
TEST(Sample, Crashes) { ::raise(SIGSEGV); }
TEST(Sample, Leaves) { ::_exit(0); }
TEST(Sample, Hangs) { std::this_thread::sleep_for(std::chrono::minutes(10)); }
TEST(Sample, DISABLED_IsNotRun) { FAIL(); }

}  // namespace
