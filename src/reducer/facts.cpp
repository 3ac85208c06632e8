#include "reducer/facts.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>

#include <ATen/ATen.h>

namespace lockstep {
namespace {

// Four bits per element: even in bfloat16, the mean over any number of ranks still distinguishes them.
using Row = std::array<uint8_t, kFactElements>;
constexpr size_t kFlags = 0, kPasses = 1, kObject = 3, kWeight = 5, kWeightElements = 16, kSkip = 21, kData = 22,
                 kPolicy = 38, kChecks = 39, kFrozen = 41, kMore = 43;

void put_byte(Row& row, size_t at, int byte) {
  row[at] = byte & 15;
  row[at + 1] = byte >> 4 & 15;
}
int byte_in(const Row& row, size_t at) { return row[at] | row[at + 1] << 4; }

void put(Row& row, size_t at, uint64_t bits) {
  for (size_t i = 0; i < kWeightElements; ++i) row[at + i] = bits >> 4 * i & 15;
}

uint64_t bits_in(const Row& row, size_t at) {
  uint64_t bits = 0;
  for (size_t i = 0; i < kWeightElements; ++i) bits |= uint64_t{row[at + i]} << 4 * i;
  return bits;
}

Row encode(const Facts& facts) {
  Row row{};
  row[kFlags] = static_cast<uint8_t>((facts.active ? 1 : 0) | (facts.joining ? 2 : 0) | (facts.trouble ? 4 : 0) |
                                     (facts.late ? 8 : 0));
  row[kSkip] = static_cast<uint8_t>((facts.skipped ? 1 : 0) | (facts.spoiled ? 2 : 0) | (facts.idle ? 4 : 0) |
                                    (facts.odd_shard ? 8 : 0));
  put_byte(row, kPasses, facts.passes);
  put_byte(row, kObject, facts.object);
  row[kPolicy] = static_cast<uint8_t>(static_cast<int>(facts.policy) | (facts.settings.divides_by_active ? 4 : 0) |
                                      (facts.settings.throws_early ? 8 : 0));
  put_byte(row, kChecks, facts.settings.checks);
  put_byte(row, kFrozen, facts.settings.frozen);
  row[kMore] = facts.local_step ? 1 : 0;
  put(row, kWeight, std::bit_cast<uint64_t>(facts.weight));
  put(row, kData, facts.data);
  return row;
}

Facts decode(const Row& row) {
  Facts facts;
  facts.active = (row[kFlags] & 1) != 0;
  facts.joining = (row[kFlags] & 2) != 0;
  facts.trouble = (row[kFlags] & 4) != 0;
  facts.late = (row[kFlags] & 8) != 0;
  facts.skipped = (row[kSkip] & 1) != 0;
  facts.spoiled = (row[kSkip] & 2) != 0;
  facts.idle = (row[kSkip] & 4) != 0;
  facts.odd_shard = (row[kSkip] & 8) != 0;
  facts.passes = byte_in(row, kPasses);
  facts.object = byte_in(row, kObject);
  facts.policy = static_cast<NonFinitePolicy>(row[kPolicy] & 3);
  facts.settings = {.divides_by_active = (row[kPolicy] & 4) != 0,
                    .throws_early = (row[kPolicy] & 8) != 0,
                    .checks = byte_in(row, kChecks),
                    .frozen = byte_in(row, kFrozen)};
  facts.local_step = (row[kMore] & 1) != 0;
  facts.weight = std::bit_cast<double>(bits_in(row, kWeight));
  facts.data = bits_in(row, kData);
  return facts;
}

}  // namespace

bool is_void(const std::vector<Facts>& ranks) {
  const auto any = [&](auto fact) { return std::any_of(ranks.begin(), ranks.end(), std::mem_fn(fact)); };
  return any(&Facts::spoiled) || (any(&Facts::skipped) && !any(&Facts::took_part));
}

int first_that_took_part(const std::vector<Facts>& ranks) {
  return static_cast<int>(std::find_if(ranks.begin(), ranks.end(), std::mem_fn(&Facts::took_part)) - ranks.begin());
}

void write_facts(const at::Tensor& table, int rank, const Facts& facts) {
  write_facts(table, rank, std::vector<Facts>{facts});
}

void write_facts(const at::Tensor& table, int first, const std::vector<Facts>& rows) {
  at::Tensor values = at::zeros({table.numel()}, at::kFloat);
  float* place = values.data_ptr<float>() + first * kFactElements;
  for (const Facts& facts : rows) {
    const Row row = encode(facts);
    place = std::copy(row.begin(), row.end(), place);
  }
  table.copy_(values);
}

std::vector<Facts> read_facts(const at::Tensor& table, bool averaged) {
  const at::Tensor real = table.is_complex() ? at::real(table) : table;
  const at::Tensor values = real.to(at::kCPU, at::kDouble).contiguous();
  const int64_t ranks = values.numel() / kFactElements;
  const double* element = values.const_data_ptr<double>();
  std::vector<Facts> facts;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    Row row{};
    for (uint8_t& value : row)
      value = static_cast<uint8_t>(std::lround(*element++ * (averaged ? static_cast<double>(ranks) : 1.0)));
    facts.push_back(decode(row));
  }
  return facts;
}

}  // namespace lockstep
