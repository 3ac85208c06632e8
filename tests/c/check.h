#ifndef LOCKSTEP_TESTS_C_CHECK_H
#define LOCKSTEP_TESTS_C_CHECK_H

#include <lockstep/c.h>

#define LAST_ERROR lockstep_last_error
#include "../support/c_check.h"

void test_every_collective(lockstep_group* world);
void test_in_flight(lockstep_group* world);
void test_messages(lockstep_group* world);
void test_parts(lockstep_group* world);
void test_threads(lockstep_group* world);
void test_handles(lockstep_group* world);
void test_group_order(lockstep_group* world);
void test_group_lateness(lockstep_group* world);
void test_overlaps(lockstep_group* world);
void test_memory(lockstep_group* world);
void test_busy_memory(lockstep_group* world);
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
void test_polled(lockstep_group* world);
void test_aborts(lockstep_group* world);
void test_stops_by_itself(lockstep_group* world);
void test_trains_until_stopped(lockstep_group* world);

#endif
