/* A rank of the tests of liblockstep_c: joins, runs the test that its argument names, and leaves. */
#include "check.h"

static const struct {
  const char* name;
  void (*run)(lockstep_group*);
} kTests[] = {
    {"every_collective", test_every_collective},
    {"in_flight", test_in_flight},
    {"messages", test_messages},
    {"parts", test_parts},
    {"threads", test_threads},
    {"handles", test_handles},
    {"overlaps", test_overlaps},
    {"group_order", test_group_order},
    {"group_lateness", test_group_lateness},
    {"memory", test_memory},
    {"busy_memory", test_busy_memory},
    {"sharded_step", test_sharded_step},
    {"typed_step", test_typed_step},
    {"typed_misuse", test_typed_misuse},
    {"sharded_misuse", test_sharded_misuse},
    {"sharded_faults", test_sharded_faults},
    {"misuse", test_misuse},
    {"join_again", test_join_again},
    {"mismatch", test_mismatch},
    {"killed", test_killed},
    {"leaves", test_leaves},
    {"times_out", test_times_out},
    {"polled", test_polled},
    {"aborts", test_aborts},
    {"stops_by_itself", test_stops_by_itself},
    {"trains_until_stopped", test_trains_until_stopped},
};

int main(int argc, char** argv) {
  lockstep_group* world = NULL;
  const lockstep_options options = {sizeof options, 20, 20};
  size_t i;
  int rank;
  CHECK(argc == 2);
  if (strcmp(argv[1], "join") == 0) { /* fails: says how */
    const lockstep_status status = lockstep_join(&options, &world);
    printf("%s: %s\n", lockstep_status_name(status), lockstep_last_error());
    return status == LOCKSTEP_OK ? 0 : 9;
  }
  if (strcmp(argv[1], "differ") == 0) { /* as join */
    const lockstep_options other = {sizeof other, 20, getenv("RANK") != NULL && atoi(getenv("RANK")) == 1 ? 7.5 : 20};
    const lockstep_status status = lockstep_join(&other, &world);
    printf("%s: %s\n", lockstep_status_name(status), lockstep_last_error());
    return status == LOCKSTEP_OK ? 9 : 0; /* a failure would end the others before they say it */
  }
  OK(lockstep_join(&options, &world));
  rank = lockstep_rank(world);
  for (i = 0; i < sizeof kTests / sizeof kTests[0]; ++i) {
    if (strcmp(argv[1], kTests[i].name) != 0) continue;
    kTests[i].run(world);
    OK(lockstep_leave(world));
    printf("%s: ok on rank %d\n", argv[1], rank);
    return 0;
  }
  fprintf(stderr, "there is no test %s\n", argv[1]);
  return 2;
}
