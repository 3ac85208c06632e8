#include "base/processor.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(Processor, IsNamedAsItsKernelNamesIt) {
  EXPECT_EQ(processor_name_in(
                "processor\t: 0\nmodel\t\t: 1\nmodel name\t: AMD EPYC 9R14\nprocessor\t: 1\nmodel name\t: another\n"),
            "AMD EPYC 9R14");
  EXPECT_EQ(processor_name_in("processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
                              "CPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n"),
            "ARM, implementer 0x41, part 0xd0c, variant 0x3");
  EXPECT_EQ(processor_name_in(""), "");
  EXPECT_EQ(processor_name_in("model name\nCPU part\n:\n"), "");
  EXPECT_NE(processor_name(), "");
}

TEST(Processor, OthersThanTheFirstAreWarnedOf) {
  EXPECT_EQ(warning_of_other_processors({}), "");
  EXPECT_EQ(warning_of_other_processors({{"a", "x y"}, {"a", "x y"}, {"b", "x y"}}), "");
  const std::string why = ": results may differ in the last bits from those of equal machines";
  EXPECT_EQ(warning_of_other_processors({{"a", "x"}, {"b", "y"}, {"b", "y"}}), "b has another processor than a" + why);
  EXPECT_EQ(warning_of_other_processors({{"a", "x"}, {"b", "y"}, {"c", ""}}),
            "b, c have another processor than a" + why);
}

}  // namespace
}  // namespace lockstep
