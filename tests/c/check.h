#ifndef LOCKSTEP_TESTS_C_CHECK_H
#define LOCKSTEP_TESTS_C_CHECK_H

#include <lockstep/c.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ends the program, with the place and what the library says. */
#define CHECK(condition)                                                                                              \
  do {                                                                                                                \
    if (!(condition)) {                                                                                               \
      fprintf(stderr, "%s:%d: %s is false; last error: %s\n", __FILE__, __LINE__, #condition, lockstep_last_error()); \
      _Exit(3);                                                                                                       \
    }                                                                                                                 \
  } while (0)
#define OK(call) CHECK((call) == LOCKSTEP_OK)
/* The call is refused with this status, and the text has these words. */
#define REFUSED(status, words, call)                       \
  do {                                                     \
    CHECK((call) == (status));                             \
    CHECK(strstr(lockstep_last_error(), (words)) != NULL); \
  } while (0)

void test_every_collective(lockstep_group* world);
void test_in_flight(lockstep_group* world);
void test_messages(lockstep_group* world);
void test_parts(lockstep_group* world);
void test_threads(lockstep_group* world);
void test_handles(lockstep_group* world);
void test_overlaps(lockstep_group* world);
void test_memory(lockstep_group* world);
void test_sharded_step(lockstep_group* world);
void test_typed_step(lockstep_group* world);
void test_typed_misuse(lockstep_group* world);
void test_sharded_misuse(lockstep_group* world);
void test_sharded_faults(lockstep_group* world);
void test_misuse(lockstep_group* world);
void test_join_again(lockstep_group* world);
void test_mismatch(lockstep_group* world);
void test_killed(lockstep_group* world);
void test_leaves(lockstep_group* world);
void test_times_out(lockstep_group* world);
void test_aborts(lockstep_group* world);
void test_stops_by_itself(lockstep_group* world);
void test_trains_until_stopped(lockstep_group* world);

#endif
