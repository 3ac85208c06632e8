#include "collectives/engines.h"

namespace lockstep::testing {

const std::vector<Engine>& engines() {
  static const std::vector<Engine> all = {{1, ""},
                                          {2, "shm"},
                                          {3, "shm"},
                                          {4, "shm"},
                                          {8, "shm"},
                                          {2, "gloo"},
                                          {3, "gloo"},
                                          {4, "gloo"},
                                          {8, "gloo"},
                                          // Machines of 2 + 1, 2 + 2, 3 + 1 and 4 + 4 ranks, three machines, and
                                          // ranks in turns; one machine of 4 ranks, and 4 of one.
                                          {3, "hierarchical", "aab"},
                                          {4, "hierarchical", "aabb"},
                                          {4, "hierarchical", "aaab"},
                                          {4, "hierarchical", "abac"},
                                          {4, "hierarchical", "aaaa"},
                                          {4, "hierarchical", "abcd"},
                                          {8, "hierarchical", "aaaabbbb"},
                                          {8, "hierarchical", "aabbcabc"}};
  return all;
}

}  // namespace lockstep::testing
