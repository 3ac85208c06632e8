! Sums over ranks from Fortran:   gfortran sums.f90 -llockstep_c && lockstep run -n 2 -- ./a.out
module lockstep
  use iso_c_binding
  implicit none
  integer(c_int32_t), parameter :: LOCKSTEP_FLOAT32 = 0, LOCKSTEP_SUM = 0
  interface
    integer(c_int32_t) function lockstep_join(options, world) bind(c)
      import
      type(c_ptr), value :: options
      type(c_ptr) :: world
    end function
    integer(c_int32_t) function lockstep_leave(group) bind(c)
      import
      type(c_ptr), value :: group
    end function
    integer(c_int) function lockstep_rank(group) bind(c)
      import
      type(c_ptr), value :: group
    end function
    integer(c_int) function lockstep_size(group) bind(c)
      import
      type(c_ptr), value :: group
    end function
    integer(c_int32_t) function lockstep_all_reduce(group, input, output, count, dtype, op, request) bind(c)
      import
      type(c_ptr), value :: group, request
      real(c_float) :: input(*), output(*)
      integer(c_int64_t), value :: count
      integer(c_int32_t), value :: dtype, op
    end function
    type(c_ptr) function lockstep_last_error() bind(c)
      import
    end function
    integer(c_size_t) function strlen(text) bind(c)
      import
      type(c_ptr), value :: text
    end function
  end interface
contains
  subroutine check(status)
    integer(c_int32_t), intent(in) :: status
    character(kind=c_char), pointer :: text(:)
    if (status == 0) return
    call c_f_pointer(lockstep_last_error(), text, [strlen(lockstep_last_error())])
    write (*, *) text
    error stop 1
  end subroutine
end module

program sums
  use lockstep
  implicit none
  integer, parameter :: n = 1000
  integer(c_int64_t), parameter :: mask = 4294967295_c_int64_t ! 32 bits without a sign
  type(c_ptr) :: world
  real(c_float) :: x(n), total(n)
  integer(c_int64_t) :: state, hash
  integer :: i
  call check(lockstep_join(c_null_ptr, world))
  state = lockstep_rank(world)
  do i = 1, n
    state = iand(state * 1664525_c_int64_t + 1013904223_c_int64_t, mask)
    x(i) = real(ishft(state, -8), c_float) / 16777216.0 - 0.5
  end do
  call check(lockstep_all_reduce(world, x, total, int(n, c_int64_t), LOCKSTEP_FLOAT32, LOCKSTEP_SUM, c_null_ptr))
  hash = 2166136261_c_int64_t
  do i = 1, n
    hash = iand(ieor(hash, iand(int(transfer(total(i), 0_c_int32_t), c_int64_t), mask)) * 16777619_c_int64_t, mask)
  end do
  if (lockstep_rank(world) == 0) write (*, '(a,z8.8,a,i0,a)') 'sums ', hash, ' over ', lockstep_size(world), ' ranks'
  call check(lockstep_leave(world))
end program
