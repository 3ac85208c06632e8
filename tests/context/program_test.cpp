#include <lockstep/program.h>

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <lockstep/context.h>
#include <lockstep/error.h>

namespace lockstep {
namespace {

struct Ended {
  int code;
  std::string said;  ///< on stderr
};

Ended run_as(std::initializer_list<const char*> words, const std::function<int()>& body) {
  std::vector<std::string> texts(words.begin(), words.end());
  std::vector<char*> arguments;
  for (std::string& text : texts) arguments.push_back(text.data());
  ::testing::internal::CaptureStderr();
  const int code = run_program(static_cast<int>(arguments.size()), arguments.data(), body);
  return {code, ::testing::internal::GetCapturedStderr()};
}

int must_not_run() {
  ADD_FAILURE() << "the body ran";
  return 0;
}

/// Some programs declare main(int, const char* argv[]).
TEST(RunProgram, TakesArgumentsThatAreConst) {
  const char* const words[] = {"bin/train", "--epochs", "3"};
  const char** argv = const_cast<const char**>(words);
  EXPECT_EQ(run_program(3, argv,
                        [&] {
                          const Context context(3, argv, {.announce = false});
                          return context.world_size() - 1;
                        }),
            0);
}

TEST(RunProgram, ReturnsWhatItsBodyReturns) {
  for (const int code : {0, 1, kPreempted}) {
    const Ended ended = run_as({"bin/train", "--epochs", "3"}, [&] { return code; });
    EXPECT_EQ(ended.code, code);
    EXPECT_EQ(ended.said, "");
  }
}

TEST(RunProgram, PrintsWhatItsBodyThrowsBehindTheProgramsName) {
  const Ended world = run_as({"bin/train"}, []() -> int { throw Error("the file is short"); });
  EXPECT_EQ(world.code, 1);
  EXPECT_EQ(world.said, "train: the file is short\n  explain   lockstep explain 40\n");
  const Ended misuse = run_as({"bin/train"}, []() -> int {
    TORCH_CHECK(false, "epochs must be at least 1");
    return 0;
  });
  EXPECT_EQ(misuse.code, 1);
  EXPECT_EQ(misuse.said, "train: epochs must be at least 1\n  explain   lockstep explain 40\n")
      << "without a stack trace";
}

TEST(RunProgram, RefusesRanksInARank) {
  ::setenv("RANK", "0", 1);
  ::setenv("WORLD_SIZE", "2", 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", "29500", 1);
  for (const auto& words : {std::initializer_list<const char*>{"train", "--ranks", "3"}, {"train", "--ranks=3"}}) {
    const Ended ended = run_as(words, must_not_run);
    EXPECT_EQ(ended.code, 1);
    EXPECT_TRUE(ended.said.starts_with("train: --ranks 3 is for a program that is started alone")) << ended.said;
    EXPECT_TRUE(ended.said.ends_with("leave --ranks out\n  explain   lockstep explain 40\n")) << ended.said;
  }
  EXPECT_EQ(run_as({"train", "--", "--ranks", "3"}, [] { return 7; }).code, 7) << "after -- it is the program's own";
}

}  // namespace
}  // namespace lockstep
