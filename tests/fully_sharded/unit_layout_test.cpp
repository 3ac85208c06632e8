#include "fully_sharded/unit_layout.h"

#include <gtest/gtest.h>

#include "data_parallel/gradient_norm.h"

namespace lockstep::fully_sharded {
namespace {

TEST(UnitLayout, CutsParametersBetweenBlocks) {
  for (const int slices : {1, 2, 3, 4, 16})
    for (const std::vector<int64_t>& elements :
         {std::vector<int64_t>{1}, {0, 5}, {64, 64, 64}, {100000}, {3, 2049, 4096, 7, 50000}, {2048, 1, 2048, 1}}) {
      const UnitLayout layout = UnitLayout::of(elements, slices);
      int64_t free = 0, all = 0;
      for (size_t i = 0; i < elements.size(); ++i) {
        EXPECT_GE(layout.offsets[i], free) << "it lies in the one before";
        EXPECT_EQ(layout.offsets[i] % UnitLayout::kAligned, 0);
        free = layout.offsets[i] + elements[i];
        all += elements[i];
        int64_t next = 0;
        for (int slice = 0; slice < slices; ++slice) {
          const auto [begin, end] = layout.part_of(layout.offsets[i], elements[i], slice);
          if (begin >= end) continue;
          EXPECT_EQ(begin, next);
          EXPECT_EQ(begin % GradientNorm::kBlock, 0);
          next = end;
        }
        EXPECT_EQ(next, elements[i]);
      }
      EXPECT_LE(free, layout.slice * slices);
      EXPECT_LE(layout.slice * slices, all + slices * (2 * GradientNorm::kBlock) +
                                           static_cast<int64_t>(elements.size()) * UnitLayout::kAligned);
    }
}

}  // namespace
}  // namespace lockstep::fully_sharded
