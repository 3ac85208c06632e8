#include <lockstep/replay_buffer.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "data/random.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

constexpr const char *kAdded = "added", *kDraws = "draws";
constexpr int64_t kMostAdded = int64_t{1} << 62;  ///< more can be added without an overflow
const std::string kColumn = "samples.";

/// "Float [3]": of one sample.
std::string kind_and_shape(const at::Tensor& tensor, at::IntArrayRef shape) {
  std::ostringstream text;
  text << tensor.scalar_type() << ' ' << shape;
  if (tensor.layout() != at::kStrided) text << " (" << tensor.layout() << ')';
  return text.str();
}
std::string kind_of(const at::Tensor& rows) { return kind_and_shape(rows, rows.sizes().slice(1)); }

/// Throws on all ranks if they differ. Columns and options need not be valid: of equal ones, each rank finds the same
/// fault.
void compare(const NamedTensors& columns, const Group& group, const ReplayBufferOptions& options) {
  const OperationLabel label("ReplayBuffer");
  std::ostringstream lines;
  lines << "capacity: " << options.capacity << "\nbatch_size: " << options.batch_size
        << "\nseed: " << options.seed.value_or(0) << '\n';
  for (const auto& [name, tensor] : columns)
    lines << name << ": " << (tensor.defined() ? kind_and_shape(tensor, tensor.sizes()) : "undefined") << '\n';
  const std::string difference = first_difference("line", group.all_gather_bytes(lines.str()));
  if (difference.empty()) return;
  own_page().fail(RankFailure::kMismatch, -1, "ReplayBuffer: columns or options differ: " + difference);
  throw Error("ReplayBuffer: columns and options must be equal on all ranks, but of the list of them, " + difference);
}

int64_t number(const StateDict& state, const char* name) {
  const at::Tensor* found = state.find(name);
  if (found == nullptr || found->numel() != 1)
    throw Error(std::string("ReplayBuffer: the state has no number `") + name + "`");
  return found->item<int64_t>();
}

/// Of the samples of all ranks that saved, the places of those that this rank gets, oldest first: rank and number.
/// They are dealt out by age, the newest of every rank in the last round.
std::vector<std::pair<size_t, int64_t>> dealt(const std::vector<int64_t>& sizes, int rank, int world_size) {
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  std::vector<std::pair<size_t, int64_t>> own;
  int64_t place = 0;
  for (int64_t age = longest; age > 0; --age)
    for (size_t from = 0; from < sizes.size(); ++from)
      if (age <= sizes[from] && place++ % world_size == rank) own.emplace_back(from, sizes[from] - age);
  return own;
}

}  // namespace

ReplayBuffer::ReplayBuffer(const NamedTensors& columns, const Group& group, ReplayBufferOptions options)
    : options_(with_seed(options, 0)), rank_(group.rank()), world_size_(group.world_size()) {
  compare(columns, group, options_);
  TORCH_CHECK(options.capacity > 0, "ReplayBuffer: capacity is ", options.capacity, "; it must be at least 1");
  TORCH_CHECK(options.batch_size > 0, "ReplayBuffer: batch_size is ", options.batch_size, "; it must be at least 1");
  TORCH_CHECK(!columns.empty(), "ReplayBuffer: there is no column; give the tensors of one sample");
  for (const auto& [name, tensor] : columns) {
    TORCH_CHECK(!name.empty() && !columns_.contains(name), "ReplayBuffer: the name `", name,
                "` is empty or occurs twice among the columns");
    TORCH_CHECK(tensor.defined(), "ReplayBuffer: the column `", name, "` is an undefined tensor");
    TORCH_CHECK(tensor.layout() == at::kStrided, "ReplayBuffer: the column `", name, "` has the layout ",
                tensor.layout(), "; give a dense tensor, and add samples by to_dense()");
    std::vector<int64_t> shape = tensor.sizes().vec();
    shape.insert(shape.begin(), options.capacity);
    columns_.insert(name, at::empty(shape, tensor.options().requires_grad(false)));
  }
}

void ReplayBuffer::add(const NamedTensors& samples) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK(samples.size() == columns_.size(),
              "ReplayBuffer::add: ", counted(static_cast<int64_t>(samples.size()), "column", "columns"),
              ", but the constructor was given ", columns_.size());
  int64_t count = -1;
  for (const auto& [name, rows] : samples) {
    const at::Tensor* column = columns_.find(name);
    TORCH_CHECK(column != nullptr, "ReplayBuffer::add: there is no column `", name, "`");
    TORCH_CHECK(rows.defined() && rows.dim() > 0, "ReplayBuffer::add: `", name, "` has no first dimension of samples");
    TORCH_CHECK(kind_of(rows) == kind_of(*column), "ReplayBuffer::add: samples of `", name, "` are ", kind_of(rows),
                ", but the column's are ", kind_of(*column));
    TORCH_CHECK(rows.device() == column->device(), "ReplayBuffer::add: samples of `", name, "` are on ", rows.device(),
                ", but the column is on ", column->device());
    TORCH_CHECK(count < 0 || rows.size(0) == count, "ReplayBuffer::add: `", name, "` has ", rows.size(0),
                " samples, and `", samples.front().first, "` has ", count);
    count = rows.size(0);
    for (const auto& other : samples)
      TORCH_CHECK(&other.second == &rows || other.first != name, "ReplayBuffer::add: `", name, "` occurs twice");
  }
  const int64_t kept = std::min(count, options_.capacity);
  const int64_t grown = std::min(size_ + kept, options_.capacity);
  const int64_t left = size_ + kept - grown;  // samples that leave
  const at::Tensor places = (at::arange(kept) + (oldest_ + size_)).remainder(options_.capacity);
  for (const auto& [name, rows] : samples)
    columns_[name].index_copy_(0, places.to(rows.device()), rows.detach().narrow(0, count - kept, kept));
  oldest_ = (oldest_ + left) % options_.capacity;
  size_ = grown;
  added_ += count;
}

at::Tensor ReplayBuffer::rows_of(const at::Tensor& numbers) const {
  return (numbers + oldest_).remainder(options_.capacity);
}

StateDict ReplayBuffer::sample() {
  TORCH_CHECK(size_ > 0, "ReplayBuffer::sample: this rank has no samples yet; add() some first");
  const uint64_t own = scramble(*options_.seed + kGoldenStep) + static_cast<uint64_t>(rank_) + kGoldenStep;
  auto random =
      at::make_generator<at::CPUGeneratorImpl>(scramble(scramble(own) + static_cast<uint64_t>(draws_++) + kGoldenStep));
  const at::Tensor rows = rows_of(at::randint(size_, {options_.batch_size}, random, at::kLong));
  StateDict batch;
  for (const auto& column : columns_)
    batch.insert(column.key(), column.value().index_select(0, rows.to(column.value().device())));
  return batch;
}

StateDict ReplayBuffer::state_dict() const {
  StateDict state;
  const at::Tensor rows = rows_of(at::arange(size_));
  for (const auto& column : columns_)
    state.insert(kColumn + column.key(), column.value().index_select(0, rows.to(column.value().device())));
  state.insert(kAdded, at::scalar_tensor(added_, at::kLong));
  state.insert(kDraws, at::scalar_tensor(draws_, at::kLong));
  return state;
}

void ReplayBuffer::check(const StateDict& state) const {
  std::string wrong;
  int64_t count = -1;
  for (const auto& column : columns_) {
    const at::Tensor* saved = state.find(kColumn + column.key());
    if (saved == nullptr || saved->dim() == 0)
      wrong += "\n  `" + column.key() + "` is missing";
    else if (kind_of(*saved) != kind_of(column.value()))
      wrong += "\n  `" + column.key() + "` is " + kind_of(*saved) + ", expected " + kind_of(column.value());
    else if (count >= 0 && saved->size(0) != count)
      wrong += "\n  `" + column.key() + "` has " + std::to_string(saved->size(0)) + " samples, expected " +
               std::to_string(count);
    else
      count = saved->size(0);
  }
  for (const auto& item : state)
    if (item.key().starts_with(kColumn) && !columns_.contains(item.key().substr(kColumn.size())))
      wrong += "\n  `" + item.key().substr(kColumn.size()) + "` is unknown";
  if (!wrong.empty()) throw Error("ReplayBuffer: the state has other columns:" + wrong);
  const int64_t added = number(state, kAdded);
  if (added < count || added > kMostAdded || (count == 0 && added != 0) || number(state, kDraws) < 0)
    throw Error("ReplayBuffer: the state's counts of samples and draws do not fit its " + std::to_string(count) +
                " samples");
}

void ReplayBuffer::clear() { size_ = added_ = draws_ = oldest_ = 0; }

void ReplayBuffer::load_state_dict(const StateDict& state) {
  check(state);
  clear();
  NamedTensors samples;
  for (const auto& column : columns_)
    samples.emplace_back(column.key(), state[kColumn + column.key()].to(column.value().device()));
  add(samples);
  added_ = number(state, kAdded);
  draws_ = number(state, kDraws);
}

void ReplayBuffer::load_from_ranks(const std::vector<StateDict>& ranks) {
  if (ranks.empty()) throw Error("ReplayBuffer: the list of the ranks' states is empty");
  std::vector<int64_t> sizes;
  int64_t draws = 0;
  for (const StateDict& state : ranks) {
    check(state);
    sizes.push_back(state[kColumn + columns_.front().key()].size(0));
    draws = std::max(draws, number(state, kDraws));
  }
  const auto own = dealt(sizes, rank_, world_size_);
  clear();
  NamedTensors samples;
  for (const auto& column : columns_) {
    std::vector<at::Tensor> rows;
    for (const auto& [from, place] : own) rows.push_back(ranks[from][kColumn + column.key()].narrow(0, place, 1));
    samples.emplace_back(column.key(),
                         rows.empty() ? column.value().narrow(0, 0, 0) : at::cat(rows).to(column.value().device()));
  }
  add(samples);
  draws_ = draws;
}

}  // namespace lockstep
