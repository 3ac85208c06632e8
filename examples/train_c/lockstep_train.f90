! liblockstep_train for Fortran: the functions of <lockstep/train_c.h> that the example uses.
module lockstep_train
  use iso_c_binding
  implicit none
  integer(c_int32_t), parameter :: LOCKSTEP_FLOAT64 = 1

  ! A Fortran array has its shape reversed: x(3,8) has the shape [8, 3].
  type, bind(c) :: lockstep_train_array
    type(c_ptr) :: data, shape
    integer(c_int32_t) :: dimensions, dtype
  end type

  interface
    integer(c_int32_t) function lockstep_train_join(options, world) bind(c)
      import
      type(c_ptr), value :: options
      type(c_ptr) :: world
    end function
    ! Of liblockstep_train_mpi: the ranks of MPI_COMM_WORLD, say.
    integer(c_int32_t) function lockstep_train_join_mpi_f(communicator, options, world) bind(c)
      import
      integer(c_int32_t), value :: communicator
      type(c_ptr), value :: options
      type(c_ptr) :: world
    end function
    integer(c_int32_t) function lockstep_train_leave(world) bind(c)
      import
      type(c_ptr), value :: world
    end function
    integer(c_int) function lockstep_train_rank(world) bind(c)
      import
      type(c_ptr), value :: world
    end function
    integer(c_int) function lockstep_train_size(world) bind(c)
      import
      type(c_ptr), value :: world
    end function
    integer(c_int32_t) function lockstep_train_create(world, module, configuration, model) bind(c)
      import
      type(c_ptr), value :: world
      character(c_char) :: module(*), configuration(*)
      type(c_ptr) :: model
    end function
    integer(c_int32_t) function lockstep_train_step(model, inputs, input_count, targets, target_count, loss) bind(c)
      import
      type(c_ptr), value :: model
      type(lockstep_train_array) :: inputs, targets
      integer(c_int32_t), value :: input_count, target_count
      real(c_double) :: loss
    end function
    integer(c_int32_t) function lockstep_train_infer(model, inputs, input_count, outputs, output_count) bind(c)
      import
      type(c_ptr), value :: model
      type(lockstep_train_array) :: inputs, outputs
      integer(c_int32_t), value :: input_count, output_count
    end function
    integer(c_int32_t) function lockstep_train_save(model, path) bind(c)
      import
      type(c_ptr), value :: model
      character(c_char) :: path(*)
    end function
    type(c_ptr) function lockstep_train_last_error() bind(c)
      import
    end function
    integer(c_size_t) function strlen(text) bind(c)
      import
      type(c_ptr), value :: text
    end function
  end interface

contains

  ! Ends the program, with what the library says.
  subroutine check(status)
    integer(c_int32_t), intent(in) :: status
    character(c_char), pointer :: text(:)
    if (status == 0) return
    call c_f_pointer(lockstep_train_last_error(), text, [strlen(lockstep_train_last_error())])
    write (*, '(*(a))') text
    stop 1
  end subroutine
end module
