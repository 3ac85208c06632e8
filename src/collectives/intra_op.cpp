#include "collectives/intra_op.h"

#include <memory>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

namespace lockstep {

void intra_op_for(int64_t count, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> body) {
  if (count <= 0) return;
  if (count <= grain || at::get_num_threads() == 1 || at::in_parallel_region()) return body(0, count);
  // TensorIterator's loop is compiled into LibTorch, with its threads. The memory that it iterates over is never
  // accessed: the addresses passed to a thread identify its part.
  const std::unique_ptr<char[]> places(new char[static_cast<size_t>(count)]);
  const at::Tensor tensor = at::from_blob(places.get(), {count}, at::kByte);
  at::TensorIterator::borrowing_nullary_op(tensor).for_each(
      [&](char** data, const int64_t* /*strides*/, int64_t size, int64_t /*one_row*/) {
        const int64_t begin = data[0] - places.get();
        body(begin, begin + size);
      },
      grain);
}

}  // namespace lockstep
