#include "base/hash.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace lockstep {
namespace {

std::string digits(const std::string& bytes, size_t piece) {
  StreamHash hash;
  for (size_t at = 0; at < bytes.size(); at += piece) hash.add(bytes.data() + at, std::min(piece, bytes.size() - at));
  EXPECT_EQ(hash.bytes(), bytes.size());
  return hash.digits();
}

TEST(StreamHash, IsTheSameWhereverTheStreamIsCut) {
  std::mt19937 chance(1);
  std::string bytes(1000, '\0');
  for (char& byte : bytes) byte = static_cast<char>(chance());
  for (const size_t piece : {1, 3, 7, 8, 31, 32, 33, 100, 1000})
    for (const size_t size : {1000, 999, 64, 33, 32, 31, 1}) {
      const std::string part = bytes.substr(0, size);
      EXPECT_EQ(digits(part, piece), digits(part, 1000)) << piece << " of " << size;
    }
}

TEST(StreamHash, EveryBitAndTheLengthMatter) {
  std::string bytes(100, '\0');
  std::set<std::string> seen = {digits(bytes, 100), digits(bytes.substr(1), 100), digits("", 1)};
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] = static_cast<char>(1 << bit % 8);
    EXPECT_TRUE(seen.insert(digits(bytes, 100)).second) << "bit " << bit;
    bytes[bit / 8] = 0;
  }
}

}  // namespace
}  // namespace lockstep
