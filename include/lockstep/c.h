/* Lockstep for C, and for every language that can call C: collectives of the ranks of one machine, and optimizers whose
 * step is divided between them, on raw memory. Needs no LibTorch. Link liblockstep_c; docs/c.md has an introduction.
 *
 * Functions return LOCKSTEP_OK or an error status; lockstep_last_error() then says what happened, to which rank, and
 * what to do. The library never ends the process, installs no signal handler and leaves no thread. Every wait ends.
 *
 * REQUIRES: all ranks of a group call the same collectives in the same order; one thread at a time calls a group. */
#ifndef LOCKSTEP_C_H
#define LOCKSTEP_C_H

#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#define LOCKSTEP_API __attribute__((visibility("default")))
#else
#define LOCKSTEP_API
#endif

#define LOCKSTEP_C_VERSION_MAJOR 1
#define LOCKSTEP_C_VERSION_MINOR 2

typedef int32_t lockstep_status;
enum {
  LOCKSTEP_OK = 0,
  LOCKSTEP_INVALID_ARGUMENT = 1, /* this call is wrong; nothing was started, the group is unchanged */
  LOCKSTEP_JOIN_FAILED = 2,      /* the ranks, or the members of a subgroup, could not meet */
  LOCKSTEP_SEVERAL_MACHINES = 3, /* the launcher started ranks on other machines, too; this library supports one */
  LOCKSTEP_RANK_GONE = 4,        /* a rank ended, or left the group, while others needed it */
  LOCKSTEP_MISMATCH = 5,         /* the ranks' calls do not match */
  LOCKSTEP_TIMED_OUT = 6,        /* the text names the ranks that did not arrive */
  LOCKSTEP_ABORTED = 7,          /* a rank called lockstep_abort, or could not continue */
  LOCKSTEP_OUT_OF_RESOURCES = 8, /* memory or descriptors */
  LOCKSTEP_INTERNAL_ERROR = 9
};

typedef int32_t lockstep_dtype;
enum {
  LOCKSTEP_FLOAT32 = 0,
  LOCKSTEP_FLOAT64 = 1,
  LOCKSTEP_FLOAT16 = 2,
  LOCKSTEP_BFLOAT16 = 3,
  LOCKSTEP_INT8 = 4,
  LOCKSTEP_UINT8 = 5,
  LOCKSTEP_INT16 = 6,
  LOCKSTEP_INT32 = 7,
  LOCKSTEP_INT64 = 8
};

/* Sums of fp16, bf16 and fp32 are computed in fp32, along one tree over the ranks: all ranks and all runs get the same
 * bits. The mean of integers is rounded towards zero. AND, OR and XOR are for integers. */
typedef int32_t lockstep_op;
enum {
  LOCKSTEP_SUM = 0,
  LOCKSTEP_MEAN = 1,
  LOCKSTEP_PRODUCT = 2,
  LOCKSTEP_MIN = 3,
  LOCKSTEP_MAX = 4,
  LOCKSTEP_AND = 5,
  LOCKSTEP_OR = 6,
  LOCKSTEP_XOR = 7
};

typedef struct lockstep_group lockstep_group;     /* ranks that work together: the world, or a part of it */
typedef struct lockstep_request lockstep_request; /* a collective or message in flight */

typedef struct lockstep_options {
  size_t size;           /* sizeof(lockstep_options): later versions add fields at the end */
  double join_timeout_s; /* how long to wait for all ranks; 0: 120 */
  double timeout_s;      /* how long a collective or message may take, the same on all ranks; 0: 1800 */
} lockstep_options;

/* The error of this thread's last failed call; "" if none has failed. Valid until this thread's next failure. */
LOCKSTEP_API const char* lockstep_last_error(void);
LOCKSTEP_API const char* lockstep_status_name(lockstep_status status); /* "LOCKSTEP_MISMATCH"; never null */
LOCKSTEP_API int lockstep_c_version(void);                             /* major * 1000 + minor, of the library */

/* Joins the ranks that `lockstep run`, torchrun, Open MPI, MPICH or Slurm started; a process started otherwise is a
 * world of one. Returns when all ranks have joined. A process has one world at a time. `options` may be null. */
LOCKSTEP_API lockstep_status lockstep_join(const lockstep_options* options, lockstep_group** world);
/* Leaves a group and frees it, without waiting. Pending operations fail, also on ranks that still need this one. Leave
 * subgroups before the world. Null is ignored. */
LOCKSTEP_API lockstep_status lockstep_leave(lockstep_group* group);
/* Forms a group of the ranks that pass the same color, ordered by key, then by rank. Every rank of `group` must call
 * it; a rank with a negative color gets a null group. */
LOCKSTEP_API lockstep_status lockstep_split(lockstep_group* group, int color, int key, lockstep_group** part);
/* Ends the group on every rank: pending and later operations fail with this text. */
LOCKSTEP_API lockstep_status lockstep_abort(lockstep_group* group, const char* why);

LOCKSTEP_API int lockstep_rank(const lockstep_group* group); /* -1 for null */
LOCKSTEP_API int lockstep_size(const lockstep_group* group); /* -1 for null */

/* Allocates page-aligned memory that collectives of this group use without a copy. Leaving the group frees it. */
LOCKSTEP_API lockstep_status lockstep_allocate(lockstep_group* group, size_t bytes, void** memory);
/* Allocates such memory once for all ranks, at a different address on each, initially zero: all ranks see a write by
 * one. Every rank must call it, with the same size, and later lockstep_free(). */
LOCKSTEP_API lockstep_status lockstep_allocate_together(lockstep_group* group, size_t bytes, void** memory);
/* Frees memory of either kind. An error, which names the operation and frees nothing, while a request of this rank uses
 * it and is not done. For the second kind all ranks wait for each other. Null is ignored. */
LOCKSTEP_API lockstep_status lockstep_free(lockstep_group* group, void* memory);

/* The collectives. `count` counts elements of one block and must be the same on every rank. Input and output are one
 * block each or, where a comment says so, one block for each rank, in rank order. They may be the same memory if both
 * are one block, and must not overlap otherwise. Null memory is allowed where nothing is read or written. If `request`
 * is null, the call returns when this rank's part is done, otherwise at once; the caller must then leave the memory
 * alone until lockstep_wait(). */
LOCKSTEP_API lockstep_status lockstep_barrier(lockstep_group* group, lockstep_request** request);
LOCKSTEP_API lockstep_status lockstep_all_reduce(lockstep_group* group, const void* input, void* output, int64_t count,
                                                 lockstep_dtype dtype, lockstep_op op, lockstep_request** request);
/* Only the root's output is written. */
LOCKSTEP_API lockstep_status lockstep_reduce(lockstep_group* group, const void* input, void* output, int64_t count,
                                             lockstep_dtype dtype, lockstep_op op, int root,
                                             lockstep_request** request);
/* Input: a block for each rank. Output: this rank's block, reduced. */
LOCKSTEP_API lockstep_status lockstep_reduce_scatter(lockstep_group* group, const void* input, void* output,
                                                     int64_t count, lockstep_dtype dtype, lockstep_op op,
                                                     lockstep_request** request);
LOCKSTEP_API lockstep_status lockstep_broadcast(lockstep_group* group, void* data, int64_t count, lockstep_dtype dtype,
                                                int root, lockstep_request** request);
/* Output: a block for each rank. */
LOCKSTEP_API lockstep_status lockstep_all_gather(lockstep_group* group, const void* input, void* output, int64_t count,
                                                 lockstep_dtype dtype, lockstep_request** request);
/* Output: a block for each rank, on the root. */
LOCKSTEP_API lockstep_status lockstep_gather(lockstep_group* group, const void* input, void* output, int64_t count,
                                             lockstep_dtype dtype, int root, lockstep_request** request);
/* Input: a block for each rank, on the root. */
LOCKSTEP_API lockstep_status lockstep_scatter(lockstep_group* group, const void* input, void* output, int64_t count,
                                              lockstep_dtype dtype, int root, lockstep_request** request);
/* Input and output: a block for each rank. */
LOCKSTEP_API lockstep_status lockstep_all_to_all(lockstep_group* group, const void* input, void* output, int64_t count,
                                                 lockstep_dtype dtype, lockstep_request** request);
/* send_counts[r] elements go to rank r, receive_counts[r] come from it. The counts are copied. */
LOCKSTEP_API lockstep_status lockstep_all_to_all_v(lockstep_group* group, const void* input, const int64_t* send_counts,
                                                   void* output, const int64_t* receive_counts, lockstep_dtype dtype,
                                                   lockstep_request** request);

/* Messages with the same sender, receiver and tag arrive in order, and must have the count and dtype that the receiver
 * expects. A send completes before it is received while less than 48 KiB, 16 B of each message, are on their way. */
#define LOCKSTEP_ANY_RANK (-1) /* to receive from */
LOCKSTEP_API lockstep_status lockstep_send(lockstep_group* group, const void* data, int64_t count, lockstep_dtype dtype,
                                           int to, int tag, lockstep_request** request);
/* `source`, unless null, gets the sender; with a request, in lockstep_wait(). */
LOCKSTEP_API lockstep_status lockstep_recv(lockstep_group* group, void* data, int64_t count, lockstep_dtype dtype,
                                           int from, int tag, int* source, lockstep_request** request);

/* Sets *done to 1 if the request is done or has failed, else to 0; returns its error if it has failed. Makes progress,
 * but never waits. If it is tested for longer than the group's limit, it fails as in lockstep_wait(). */
LOCKSTEP_API lockstep_status lockstep_test(lockstep_request* request, int* done);
/* Returns when the request is done, frees it whatever the status, and sets it to null. Wait once for every request.
 * If it takes longer than `seconds` (negative: the group's limit), the group ends on every rank. */
LOCKSTEP_API lockstep_status lockstep_wait(lockstep_request** request, double seconds);

/* One step of an optimizer, divided between the ranks: each takes the mean of its slice of all ranks' gradients, steps
 * that slice, and writes it for all ranks. Every rank must call it, with the same numbers. It returns when all
 * parameters have been stepped. The bits equal those of ZeroRedundancyOptimizer in C++.
 * Arrays are `count` floats, anywhere within an allocation of this group.
 *   parameters  of lockstep_allocate_together(), or of lockstep_allocate(): a copy on each rank, with the same values
 *   gradients   of lockstep_allocate(): this rank's. They are not changed.
 *   the others  the optimizer's state, of lockstep_allocate_together(). Zeros before step 1.
 * step: 1, 2, 3 ... If ranks differ where it matters, all get LOCKSTEP_MISMATCH; nothing is stepped, the group stays
 * usable. The functions that end in _typed take all arrays in LOCKSTEP_FLOAT32, FLOAT64, FLOAT16 or BFLOAT16. `master`
 * may be null. For 16-bit parameters it may be `count` floats of lockstep_allocate_together(), which hold the precision
 * that the parameters lack; the state is then in floats as well. If a master does not round to its parameter, the
 * parameter counts, so a master may start with any value. */
typedef struct lockstep_sgd {
  size_t size;                                  /* sizeof(lockstep_sgd): later versions add fields at the end */
  double lr, momentum, dampening, weight_decay; /* momentum 0: the array may be null */
  int64_t nesterov;                             /* 0 or 1 */
} lockstep_sgd;
LOCKSTEP_API lockstep_status lockstep_sharded_sgd(lockstep_group* group, const lockstep_sgd* options, int64_t step,
                                                  float* parameters, const float* gradients, float* momentum,
                                                  int64_t count);
LOCKSTEP_API lockstep_status lockstep_sharded_sgd_typed(lockstep_group* group, const lockstep_sgd* options,
                                                        int64_t step, void* parameters, const void* gradients,
                                                        void* momentum, float* master, int64_t count,
                                                        lockstep_dtype dtype);
typedef struct lockstep_adam {
  size_t size;                                /* sizeof(lockstep_adam) */
  double lr, beta1, beta2, eps, weight_decay; /* with AMSGrad, max_exp_avg_sq is its maximum, else null */
  int64_t decoupled_weight_decay;             /* 1: AdamW. 0: Adam, which adds the decay to the gradient */
} lockstep_adam;
LOCKSTEP_API lockstep_status lockstep_sharded_adam(lockstep_group* group, const lockstep_adam* options, int64_t step,
                                                   float* parameters, const float* gradients, float* exp_avg,
                                                   float* exp_avg_sq, float* max_exp_avg_sq, int64_t count);
LOCKSTEP_API lockstep_status lockstep_sharded_adam_typed(lockstep_group* group, const lockstep_adam* options,
                                                         int64_t step, void* parameters, const void* gradients,
                                                         void* exp_avg, void* exp_avg_sq, void* max_exp_avg_sq,
                                                         float* master, int64_t count, lockstep_dtype dtype);

/* Sets *stop to whether the run should stop: `lockstep run` was asked to end it, or a rank called
 * lockstep_request_stop(), as a signal handler may. Every rank must call it equally often, and all get one answer. */
LOCKSTEP_API lockstep_status lockstep_stop_requested(lockstep_group* group, int* stop);
LOCKSTEP_API void lockstep_request_stop(void);

#ifdef __cplusplus
}
#endif
#endif
