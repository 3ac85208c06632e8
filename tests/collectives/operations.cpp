#include "collectives/operations.h"

#include <gtest/gtest.h>

#include <sstream>

namespace lockstep::testing {
namespace {

constexpr int64_t kPeriod = 251;
constexpr int kFiller = 77;

/// Rank `me`'s data for the trial: `parts` times its elements.
at::Tensor data_of(const Trial& trial, int me, int64_t parts = 1) {
  return values_of(me, trial.dtype, trial.op, trial.elements * parts, trial.salt);
}

at::Tensor reduced_of_all(const Group& group, const Trial& trial, int64_t parts = 1) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < group.world_size(); ++rank) all.push_back(data_of(trial, rank, parts));
  return reduced(trial.op, all);
}

at::Tensor place(const Group& group, const Trial& trial, const at::Tensor& values) {
  std::vector<int64_t> shape = values.sizes().vec();
  shape.push_back(trial.strided ? 2 : 1);
  const int64_t elements = values.numel() * shape.back();
  at::Tensor memory =
      trial.resident ? group.allocate(elements, values.options()) : at::empty({elements}, values.options());
  return memory.fill_(kFiller).view(shape).select(-1, 0).copy_(values);
}

/// The memory between the elements of a strided tensor does not matter.
void expect_gaps(const at::Tensor& tensor, const std::string& what) {
  if (tensor.numel() == 0 || tensor.stride(-1) != 2) return;
  const at::Tensor gaps = tensor.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset() + 1);
  EXPECT_TRUE(at::equal(gaps, at::full_like(gaps, kFiller))) << what << " wrote between the elements";
}

/// Memory for results, filled with something else.
at::Tensor blank(const Group& group, const Trial& trial, at::IntArrayRef shape) {
  return place(group, trial, at::full(shape, kFiller, at::TensorOptions(trial.dtype)));
}

std::string describe(const char* operation, const Group& group, const Trial& trial) {
  std::ostringstream text;
  text << operation << " " << trial << ", rank " << group.rank() << " of " << group.world_size() << " by "
       << group.backend();
  return text.str();
}

int root_of(const Group& group, const Trial& trial) { return trial.root % group.world_size(); }

Started all_reduce(const Group& group, const Trial& trial) {
  const at::Tensor tensor = place(group, trial, data_of(trial, group.rank()));
  return {{group.all_reduce_async(tensor, trial.op)},
          [=] { expect_same(tensor, reduced_of_all(group, trial), describe("all_reduce", group, trial)); },
          tensor};
}

Started reduce(const Group& group, const Trial& trial) {
  const at::Tensor mine = data_of(trial, group.rank()), tensor = place(group, trial, mine);
  const int root = root_of(group, trial);
  return {{group.reduce_async(tensor, root, trial.op)},
          [=] {
            expect_same(tensor, group.rank() == root ? reduced_of_all(group, trial) : mine,
                        describe("reduce", group, trial));
          },
          tensor};
}

Started reduce_scatter(const Group& group, const Trial& trial) {
  const int n = group.world_size();
  const at::Tensor mine = data_of(trial, group.rank(), n), input = place(group, trial, mine);
  const at::Tensor output = blank(group, trial, {trial.elements});
  return {{group.reduce_scatter_async(output, input, trial.op)},
          [=] {
            expect_same(output, reduced_of_all(group, trial, n).view({n, -1})[group.rank()],
                        describe("reduce_scatter", group, trial));
            expect_same(input, mine, describe("reduce_scatter's input", group, trial));
          },
          output};
}

Started broadcast(const Group& group, const Trial& trial) {
  const int root = root_of(group, trial);
  const at::Tensor tensor = place(group, trial, data_of(trial, group.rank()));
  return {{group.broadcast_async(tensor, root)},
          [=] { expect_same(tensor, data_of(trial, root), describe("broadcast", group, trial)); },
          tensor};
}

at::Tensor rows_of_all(const Group& group, const Trial& trial) {
  std::vector<at::Tensor> rows;
  for (int rank = 0; rank < group.world_size(); ++rank) rows.push_back(data_of(trial, rank));
  return at::stack(rows);
}

Started all_gather(const Group& group, const Trial& trial) {
  const at::Tensor mine = data_of(trial, group.rank()), input = place(group, trial, mine);
  const at::Tensor output = blank(group, trial, {group.world_size(), trial.elements});
  return {{group.all_gather_async(output, input)},
          [=] {
            expect_same(output, rows_of_all(group, trial), describe("all_gather", group, trial));
            expect_same(input, mine, describe("all_gather's input", group, trial));
          },
          output};
}

Started gather(const Group& group, const Trial& trial) {
  const int root = root_of(group, trial);
  const at::Tensor mine = data_of(trial, group.rank()), input = place(group, trial, mine);
  at::Tensor output;
  if (group.rank() == root) output = blank(group, trial, {group.world_size(), trial.elements});
  return {{group.gather_async(output, input, root)},
          [=] {
            if (output.defined()) expect_same(output, rows_of_all(group, trial), describe("gather", group, trial));
            expect_same(input, mine, describe("gather's input", group, trial));
          },
          output};
}

Started scatter(const Group& group, const Trial& trial) {
  const int root = root_of(group, trial);
  at::Tensor input;
  if (group.rank() == root) input = place(group, trial, rows_of_all(group, trial));
  const at::Tensor output = blank(group, trial, {trial.elements});
  return {{group.scatter_async(output, input, root)},
          [=] {
            expect_same(output, data_of(trial, group.rank()), describe("scatter", group, trial));
            if (input.defined())
              expect_same(input, rows_of_all(group, trial), describe("scatter's input", group, trial));
          },
          output};
}

/// Row `to` of what rank `from` sends in an all_to_all.
at::Tensor row_between(const Group& group, const Trial& trial, int from, int to) {
  return data_of(trial, from, group.world_size()).view({group.world_size(), -1})[to];
}

Started all_to_all(const Group& group, const Trial& trial) {
  const int n = group.world_size();
  const at::Tensor mine = data_of(trial, group.rank(), n).view({n, -1}), input = place(group, trial, mine);
  const at::Tensor output = blank(group, trial, {n, trial.elements});
  return {{group.all_to_all_async(output, input)},
          [=] {
            for (int from = 0; from < n; ++from)
              expect_same(output[from], row_between(group, trial, from, group.rank()),
                          describe("all_to_all", group, trial));
            expect_same(input, mine, describe("all_to_all's input", group, trial));
          },
          output};
}

/// Elements that rank `from` sends to rank `to` in an uneven all_to_all; none for some.
int64_t uneven(const Trial& trial, int from, int to) { return trial.elements * ((from * 3 + to * 5) % 4) / 2; }

at::Tensor uneven_part(const Trial& trial, int from, int to) {
  return values_of(from * 8 + to, trial.dtype, trial.op, uneven(trial, from, to), trial.salt);
}

Started all_to_all_uneven(const Group& group, const Trial& trial) {
  const int me = group.rank();
  std::vector<int64_t> sends, receives;
  std::vector<at::Tensor> out, in;
  for (int rank = 0; rank < group.world_size(); ++rank) {
    out.push_back(uneven_part(trial, me, rank));
    in.push_back(uneven_part(trial, rank, me));
    sends.push_back(out.back().numel());
    receives.push_back(in.back().numel());
  }
  const at::Tensor input = place(group, trial, at::cat(out)), expected = at::cat(in);
  const at::Tensor output = blank(group, trial, expected.sizes());
  return {{group.all_to_all_async(output, input, sends, receives)},
          [=] { expect_same(output, expected, describe("uneven all_to_all", group, trial)); },
          output};
}

/// Every rank sends to the next and receives from the one before.
Started ring(const Group& group, const Trial& trial) {
  const int n = group.world_size(), next = (group.rank() + 1) % n, previous = (group.rank() + n - 1) % n;
  const at::Tensor sent = place(group, trial, data_of(trial, group.rank()));
  const at::Tensor received = blank(group, trial, {trial.elements});
  Started started;
  started.works.push_back(group.send_async(sent, next, trial.salt));
  started.works.push_back(group.recv_async(received, previous, trial.salt));
  started.check = [=] {
    expect_same(received, data_of(trial, previous), describe("send and recv", group, trial));
    expect_same(sent, data_of(trial, group.rank()), describe("what was sent", group, trial));
  };
  started.result = received;
  return started;
}

Started barrier(const Group& group, const Trial&) {
  return {{group.barrier_async()}, [] {}, {}};
}

}  // namespace

const char* name_of(ReduceOp op) {
  static const char* const kNames[] = {"sum", "mean", "product", "min", "max", "and", "or"};
  return kNames[static_cast<int>(op)];
}

bool is_meaningful(ReduceOp op, at::ScalarType dtype) {
  const bool complex = at::isComplexType(dtype), numbers = complex || at::isFloatingType(dtype);
  if (op == ReduceOp::kMean) return numbers;
  if (op == ReduceOp::kAnd || op == ReduceOp::kOr) return !numbers;
  if (op == ReduceOp::kMin || op == ReduceOp::kMax) return !complex;
  return true;
}

at::Tensor values_of(int rank, at::ScalarType dtype, ReduceOp op, int64_t elements, int salt) {
  // A window into an endless sequence with a prime period, at a different position for every rank and salt.
  const int64_t skipped = (rank * 37 + salt * 11) % kPeriod;
  const at::Tensor mixed = at::arange(kPeriod, at::kLong).mul_(97).add_(13).remainder_(kPeriod);
  at::Tensor pattern;
  if (dtype == at::kBool)
    pattern = mixed.remainder(2).to(dtype);
  else if (at::isComplexType(dtype))
    pattern =
        at::complex(mixed.remainder(3).to(at::kDouble), mixed.div(3, "floor").remainder(2).to(at::kDouble)).to(dtype);
  else if (op == ReduceOp::kProduct)
    pattern = mixed.remainder(2).add_(1).to(dtype);
  else if (op == ReduceOp::kSum || op == ReduceOp::kMean)
    pattern = mixed.remainder(5).to(dtype);
  else
    pattern = mixed.remainder(101).to(dtype);
  return pattern.repeat({(elements + skipped) / kPeriod + 1}).narrow(0, skipped, elements).contiguous();
}

at::Tensor reduced(ReduceOp op, const std::vector<at::Tensor>& all) {
  const bool boolean = all[0].scalar_type() == at::kBool;
  at::Tensor result = all[0].clone();
  for (size_t r = 1; r < all.size(); ++r) {
    if (op == ReduceOp::kSum || op == ReduceOp::kMean)
      result = boolean ? at::logical_or(result, all[r]) : result.add_(all[r]);
    else if (op == ReduceOp::kProduct)
      result = boolean ? at::logical_and(result, all[r]) : result.mul_(all[r]);
    else if (op == ReduceOp::kMin)
      result = at::minimum(result, all[r]);
    else if (op == ReduceOp::kMax)
      result = at::maximum(result, all[r]);
    else
      result = op == ReduceOp::kAnd ? at::bitwise_and(result, all[r]) : at::bitwise_or(result, all[r]);
  }
  if (op != ReduceOp::kMean) return result;
  // ATen's complex division rounds more than once.
  (result.is_complex() ? at::view_as_real(result) : result).div_(static_cast<int64_t>(all.size()));
  return result;
}

std::ostream& operator<<(std::ostream& out, const Trial& trial) {
  return out << c10::toString(trial.dtype) << " [" << trial.elements << "] " << name_of(trial.op) << ", root "
             << trial.root << (trial.resident ? ", resident" : ", private") << (trial.strided ? ", strided" : "")
             << ", salt " << trial.salt;
}

const std::vector<Operation>& operations() {
  static const std::vector<Operation> all = {
      {"all_reduce", true, all_reduce},
      {"reduce", true, reduce},
      {"reduce_scatter", true, reduce_scatter},
      {"broadcast", false, broadcast},
      {"all_gather", false, all_gather},
      {"gather", false, gather},
      {"scatter", false, scatter},
      {"all_to_all", false, all_to_all},
      {"all_to_all_uneven", false, all_to_all_uneven},
      {"ring", false, ring},
      {"barrier", false, barrier},
  };
  return all;
}

void expect_same(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  if (actual.dim() > 0) expect_gaps(actual, what);
  if (at::equal(actual, expected)) return;
  const at::Tensor differs = actual.reshape({-1}).ne(expected.reshape({-1})).nonzero();
  const auto first = differs[0].item<int64_t>();
  ADD_FAILURE() << what << ": " << differs.size(0) << " elements differ, the first at " << first << ": got "
                << actual.reshape({-1})[first] << ", expected " << expected.reshape({-1})[first];
}

}  // namespace lockstep::testing
