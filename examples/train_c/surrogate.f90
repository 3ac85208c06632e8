! A solver that trains a network while it runs: Burgers' equation, and a network that learns the cells' rates of change.
!
!   python3 surrogate.py net.pt
!   gfortran -cpp lockstep_train.f90 surrogate.f90 -llockstep_train && lockstep run -n 2 -- ./a.out
!
! Every rank solves, and trains on its part of the cells. With -DUSE_MPI and -llockstep_train_mpi the ranks are those of
! mpirun.
program surrogate
#ifdef USE_MPI
  use mpi
#endif
  use lockstep_train
  implicit none
  integer, parameter :: cells = 64, steps = 300
  real(c_double), parameter :: dt = 0.002d0, dx = 1d0 / cells, viscosity = 0.01d0
  character(*), parameter :: configuration = '{"optimizer": {"type": "adam", "lr": 0.01}, "loss": "mse", ' // &
    '"lr_scheduler": {"type": "cosine_annealing", "t_max": 300}}' // c_null_char
  type(c_ptr) :: world, model
  real(c_double) :: u(cells), loss
  real(c_double), target :: stencil(3, cells), rate(1, cells), learned(1, cells)
  integer :: i, step, first, part
#ifdef USE_MPI
  integer :: error
  call MPI_Init(error)
  call check(lockstep_train_join_mpi_f(MPI_COMM_WORLD, c_null_ptr, world))
#else
  call check(lockstep_train_join(c_null_ptr, world))
#endif
  part = cells / lockstep_train_size(world)
  first = lockstep_train_rank(world) * part + 1
  call check(lockstep_train_create(world, 'net.pt' // c_null_char, configuration, model))
  u = [(sin(8 * atan(1d0) * i * dx), i = 1, cells)]
  do step = 1, steps
    stencil = reshape([cshift(u, -1), u, cshift(u, 1)], [3, cells], order=[2, 1])
    rate(1, :) = -u * (cshift(u, 1) - cshift(u, -1)) / (2 * dx) + &
      viscosity * (cshift(u, 1) - 2 * u + cshift(u, -1)) / dx**2
    call train(stencil(:, first:first + part - 1), rate(:, first:first + part - 1))
    u = u + dt * rate(1, :)
    if (lockstep_train_rank(world) == 0 .and. mod(step, 100) == 0) write (*, '(a,i0,a,f0.4)') 'step ', step, ': loss ', loss
  end do
  call infer(stencil, learned)
  if (lockstep_train_rank(world) == 0) then
    write (*, '(a,es24.16,a,i0,a)') 'learned ', sum(learned * stencil(2:2, :)), ' over ', lockstep_train_size(world), ' ranks'
  end if
  call check(lockstep_train_save(model, 'trained.pt' // c_null_char))
  call check(lockstep_train_leave(world))
#ifdef USE_MPI
  call MPI_Finalize(error)
#endif

contains

  function array_of(values, shape) result(array)
    real(c_double), intent(in), contiguous, target :: values(:, :)
    integer(c_int64_t), intent(in), target :: shape(2)
    type(lockstep_train_array) :: array
    array = lockstep_train_array(c_loc(values), c_loc(shape), 2, LOCKSTEP_FLOAT64)
  end function

  subroutine train(inputs, targets)
    real(c_double), intent(in), contiguous, target :: inputs(:, :), targets(:, :)
    integer(c_int64_t), target :: input_shape(2), target_shape(2)
    input_shape = [size(inputs, 2), size(inputs, 1)]
    target_shape = [size(targets, 2), size(targets, 1)]
    call check(lockstep_train_step(model, array_of(inputs, input_shape), 1, array_of(targets, target_shape), 1, loss))
  end subroutine

  subroutine infer(inputs, outputs)
    real(c_double), intent(in), contiguous, target :: inputs(:, :), outputs(:, :)
    integer(c_int64_t), target :: input_shape(2), output_shape(2)
    input_shape = [size(inputs, 2), size(inputs, 1)]
    output_shape = [size(outputs, 2), size(outputs, 1)]
    call check(lockstep_train_infer(model, array_of(inputs, input_shape), 1, array_of(outputs, output_shape), 1))
  end subroutine
end program
