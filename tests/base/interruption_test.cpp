#include "base/interruption.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <stdexcept>
#include <thread>

namespace lockstep::interruption_test {
namespace {

struct Stop final : std::runtime_error, Interruption {
  Stop() : runtime_error("stop") {}
};

int handled = 0;

void handle(int) { ++handled; }

TEST(Interruption, IsAskedForAfterASignalOnTheMainThreadAlone) {
  ::signal(SIGINT, handle);
  EXPECT_FALSE(can_be_interrupted());
  check_for_interruption();
  let_waits_be_interrupted([] { throw Stop(); });
  EXPECT_TRUE(can_be_interrupted());
  check_for_interruption();
  ::raise(SIGINT);
  EXPECT_EQ(handled, 1) << "the program's handler runs as always";
  EXPECT_TRUE(interruption_is_pending());
  std::thread([] { check_for_interruption(); }).join();
  EXPECT_THROW(check_for_interruption(), Interruption);
  check_for_interruption();
}

TEST(Interruption, GoesBeforeAHandlerThatTheProgramSetsLater) {
  let_waits_be_interrupted([] { throw Stop(); });
  check_for_interruption();
  ::signal(SIGINT, handle);
  check_for_interruption();
  ::raise(SIGINT);
  EXPECT_EQ(handled, 1);
  EXPECT_THROW(check_for_interruption(), Stop);
  ::signal(SIGINT, SIG_IGN);
  check_for_interruption();
  ::raise(SIGINT);
  check_for_interruption();
}

}  // namespace
}  // namespace lockstep::interruption_test
