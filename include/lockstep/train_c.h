/* Lockstep's training for C, and for every language that can call C: a TorchScript module is trained on raw arrays, on
 * all ranks of a run, on one machine or several. Link liblockstep_train, which needs LibTorch; docs/train_c.md has an
 * introduction. Statuses and dtypes are those of c.h.
 *
 * Every function returns LOCKSTEP_OK or an error status; lockstep_train_last_error() then says what happened, on which
 * rank, and what to do. No exception leaves the library, and it never ends the process.
 *
 * REQUIRES: the ranks of a world make the same calls in the same order, those excepted whose comments say "local". A
 * rank that makes another call, or passes other settings, dtypes or shapes, is named in the error that all ranks get;
 * nothing has been trained then, and the world remains usable.
 *
 * A handle that has been freed, or never was one, is refused. One thread at a time may call a world and what belongs
 * to it; a call during another thread's is refused. */
#ifndef LOCKSTEP_TRAIN_C_H
#define LOCKSTEP_TRAIN_C_H

#include <lockstep/c.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LOCKSTEP_TRAIN_VERSION_MAJOR 1
#define LOCKSTEP_TRAIN_VERSION_MINOR 1

/* Beside the statuses of c.h: a file or folder cannot be read or written. */
#define LOCKSTEP_TRAIN_FILE_FAILED 32

typedef struct lockstep_train_world lockstep_train_world;     /* the ranks of the run */
typedef struct lockstep_train_model lockstep_train_model;     /* a module with its optimizer */
typedef struct lockstep_train_replica lockstep_train_replica; /* parameters of a program that has LibTorch itself */

typedef struct lockstep_train_options {
  size_t size;           /* sizeof(lockstep_train_options): later versions add fields at the end */
  double join_timeout_s; /* how long to wait for all ranks; 0: 120 */
  double timeout_s;      /* how long ranks may wait for each other in a call; 0: 1800 */
  int64_t seed;          /* of LibTorch's generator, to which each rank adds its number; 0: LibTorch's own */
  int64_t threads;       /* of LibTorch's operators; 0: this rank's share of the cores */
} lockstep_train_options;

/* An array in this process's memory, contiguous, whose last index varies fastest. A Fortran array has its shape
 * reversed: a(3,8) has the shape {8, 3}. LibTorch's dtypes that c.h does not name are not supported. */
typedef struct lockstep_train_array {
  void* data; /* not written, unless the array is an output; may be null if the array is empty */
  const int64_t* shape;
  int32_t dimensions;
  lockstep_dtype dtype;
} lockstep_train_array;

/* Local. The error of this thread's last failed call; "" if none has failed. Valid until this thread's next failure. */
LOCKSTEP_API const char* lockstep_train_last_error(void);
/* Local. "LOCKSTEP_MISMATCH"; never null. */
LOCKSTEP_API const char* lockstep_train_status_name(lockstep_status status);
/* Local. Of the library: major * 1000 + minor. */
LOCKSTEP_API int lockstep_train_version(void);

/* Joins the ranks that `lockstep run`, torchrun, Open MPI, MPICH or Slurm started; a process started otherwise is a
 * world of one. `options` may be null. A process has one world at a time, and joins either here or by lockstep_join()
 * of liblockstep_c. */
LOCKSTEP_API lockstep_status lockstep_train_join(const lockstep_train_options* options, lockstep_train_world** world);
/* Joins the ranks of an MPI communicator, which must all call it. `communicator` points to an MPI_Comm; the second form
 * takes the handle of a Fortran program (MPI_COMM_WORLD, or comm%MPI_VAL of mpi_f08). Link liblockstep_train_mpi in
 * place of liblockstep_train, which refuses these calls. Leave the world before MPI_Finalize(). */
LOCKSTEP_API lockstep_status lockstep_train_join_mpi(const void* communicator, const lockstep_train_options* options,
                                                     lockstep_train_world** world);
LOCKSTEP_API lockstep_status lockstep_train_join_mpi_f(int32_t communicator, const lockstep_train_options* options,
                                                       lockstep_train_world** world);
/* Leaves the world and frees it with its models and replicas. Null is ignored. */
LOCKSTEP_API lockstep_status lockstep_train_leave(lockstep_train_world* world);
LOCKSTEP_API int lockstep_train_rank(const lockstep_train_world* world); /* local; -1 if it is no world */
LOCKSTEP_API int lockstep_train_size(const lockstep_train_world* world); /* local; -1 if it is no world */
/* Local. The part of the data that this rank should read: part *number, from 0, of *count equal parts. These are its
 * rank and the size of the world, but with `lockstep run --islands`, where each machine is a world of its own, those
 * among the ranks of all machines. Since 1.1. */
LOCKSTEP_API lockstep_status lockstep_train_shard(const lockstep_train_world* world, int64_t* number, int64_t* count);
/* Sets *stop to whether the run should save and stop, as `lockstep run` asks by SIGTERM. The same call gives the same
 * answer on every rank. */
LOCKSTEP_API lockstep_status lockstep_train_stop_requested(lockstep_train_world* world, int* stop);

/* Loads a TorchScript module (torch.jit.script(net).save(file)) and prepares its training. All ranks start from rank
 * 0's weights. `configuration` is JSON, or the path of a file with it; docs/train_c.md lists its entries:
 *
 *     {"optimizer": {"type": "adam", "lr": 0.001}, "loss": "mse", "lr_scheduler": {"type": "step", "step_size": 100}}
 */
LOCKSTEP_API lockstep_status lockstep_train_create(lockstep_train_world* world, const char* module,
                                                   const char* configuration, lockstep_train_model** model);
/* Local. Null is ignored. */
LOCKSTEP_API lockstep_status lockstep_train_free(lockstep_train_model* model);

/* Trains one step on this rank's part of the batch: forward(inputs...), the loss against the targets, backward, the
 * mean of the ranks' gradients, and a step of optimizer and schedule. Arrays are copied, and may be reused at once.
 * `loss`, unless null, gets the loss over all ranks. If the module refuses a rank's arrays, all ranks get an error that
 * names the rank, and the weights stay as they were. With the configuration's "diloco" all of this is among the ranks
 * of a machine, and machines synchronise every so many steps. */
LOCKSTEP_API lockstep_status lockstep_train_step(lockstep_train_model* model, const lockstep_train_array* inputs,
                                                 int32_t input_count, const lockstep_train_array* targets,
                                                 int32_t target_count, double* loss);
/* The same without training, in evaluation mode: the loss over all ranks, for validation. With "diloco" machines that
 * train by themselves are synchronised first, as by lockstep_train_save() and lockstep_train_load(). */
LOCKSTEP_API lockstep_status lockstep_train_evaluate(lockstep_train_model* model, const lockstep_train_array* inputs,
                                                     int32_t input_count, const lockstep_train_array* targets,
                                                     int32_t target_count, double* loss);
/* The end of the training with "diloco", after the last step: all machines get the same weights, and
 * lockstep_train_step() is refused from then on. With `lockstep run --islands` this machine leaves the rounds, and the
 * others do not wait for it. Without "diloco" it does nothing. Since 1.1. */
LOCKSTEP_API lockstep_status lockstep_train_finish(lockstep_train_model* model);
/* Local. Computes the module's outputs in evaluation mode and writes them to `outputs`, whose shapes and dtypes must be
 * those of the results; otherwise the text names both, and nothing is written. */
LOCKSTEP_API lockstep_status lockstep_train_infer(lockstep_train_model* model, const lockstep_train_array* inputs,
                                                  int32_t input_count, const lockstep_train_array* outputs,
                                                  int32_t output_count);

/* Local. The optimizer's steps so far, those before a resume included. */
LOCKSTEP_API lockstep_status lockstep_train_steps(lockstep_train_model* model, int64_t* steps);
/* Local. The learning rate of the next step. */
LOCKSTEP_API lockstep_status lockstep_train_learning_rate(lockstep_train_model* model, double* rate);
/* Local. Adds a number to the log that the configuration names, at the present step; rank 0 writes. */
LOCKSTEP_API lockstep_status lockstep_train_log(lockstep_train_model* model, const char* name, double value);

/* Rank 0 writes the module with its weights as TorchScript. The file is complete at every instant. */
LOCKSTEP_API lockstep_status lockstep_train_save(lockstep_train_model* model, const char* path);
/* Takes the weights of a TorchScript file that rank 0 reads, whose tensors have the names, shapes and dtypes of the
 * model's. Optimizer and schedule stay as they are. */
LOCKSTEP_API lockstep_status lockstep_train_load(lockstep_train_model* model, const char* path);
/* Saves weights, optimizer, schedule, step and the ranks' random states in `folder`, which belongs to this run and
 * which all ranks see. Returns when the checkpoint is on disk. */
LOCKSTEP_API lockstep_status lockstep_train_save_checkpoint(lockstep_train_model* model, const char* folder);
/* Continues from the newest intact checkpoint in `folder`. *step, unless null, gets its step, or 0 if there is none.
 * Call it before the first step. From then on, checkpoints are also saved as the configuration says. */
LOCKSTEP_API lockstep_status lockstep_train_resume(lockstep_train_model* model, const char* folder, int64_t* step);

/* For programs that hold LibTorch's tensors themselves, such as bindings for Java, R, Ruby or Go: what
 * DistributedDataParallel does, for their parameters. `parameters` are `count` pointers to at::Tensor, of the LibTorch
 * that this process has loaded, with requires_grad. All ranks get rank 0's values. `names` may be null.
 * `when`: LOCKSTEP_TRAIN_IN_BACKWARD takes the mean of the ranks' gradients while backward runs, which then throws
 * lockstep::Error if it fails; LOCKSTEP_TRAIN_WHEN_CALLED takes it in lockstep_train_average(), so that no exception
 * meets the binding. */
enum { LOCKSTEP_TRAIN_IN_BACKWARD = 0, LOCKSTEP_TRAIN_WHEN_CALLED = 1 };
LOCKSTEP_API lockstep_status lockstep_train_attach(lockstep_train_world* world, void* const* parameters,
                                                   const char* const* names, int64_t count, int32_t when,
                                                   lockstep_train_replica** replica);
/* After a backward with LOCKSTEP_TRAIN_WHEN_CALLED: each parameter's .grad becomes the mean of the ranks'. A rank
 * without a gradient counts as zero. */
LOCKSTEP_API lockstep_status lockstep_train_average(lockstep_train_replica* replica);
/* Compares all parameters across the ranks, bit by bit. */
LOCKSTEP_API lockstep_status lockstep_train_check_equal(lockstep_train_replica* replica);
/* Local. The parameters remain usable. Null is ignored. */
LOCKSTEP_API lockstep_status lockstep_train_detach(lockstep_train_replica* replica);

#ifdef __cplusplus
}
#endif

#endif
