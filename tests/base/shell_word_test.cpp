#include "base/shell_word.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <memory>

namespace lockstep {
namespace {

TEST(ShellWord, IsQuotedWhereAShellWouldChangeIt) {
  for (const char* plain : {"--lr=0.1", "a_b-c+d=e./f:g,h@i%j",
                            "gr\xc3\xb6\xc3\x9f"
                            "e"})
    EXPECT_EQ(shell_word(plain), plain);
  EXPECT_EQ(shell_word(""), "''");
  EXPECT_EQ(shell_word("a b"), "'a b'");
  EXPECT_EQ(shell_word("$x"), "'$x'");
  EXPECT_EQ(shell_word("~/data"), "'~/data'");
  EXPECT_EQ(shell_word("it's"), "'it'\\''s'");
}

/// What `sh` makes of a word.
std::string read_by_shell(const std::string& word) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(("printf %s " + word).c_str(), "r"), ::pclose);
  std::array<char, 1024> text{};
  return {text.data(), std::fread(text.data(), 1, text.size(), pipe.get())};
}

TEST(ShellWord, ComesBackFromAShellAsItWas) {
  std::string all;
  for (int c = 1; c < 256; ++c) {
    all += static_cast<char>(c);
    const std::string one(1, static_cast<char>(c));
    if (c > 32 && c < 127) {
      EXPECT_EQ(read_by_shell(shell_word(one)), one) << c;
    }
  }
  EXPECT_EQ(read_by_shell(shell_word(all)), all);
}

}  // namespace
}  // namespace lockstep
