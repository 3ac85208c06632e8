#include "faultbox/memory_saves.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/environment.h"
#include "base/state_memory.h"
#include "rank_page/rank_board.h"

namespace lockstep::faultbox {
namespace {

constexpr uint64_t kOwner = 12, kWords = 32 << 10;

uint64_t begin_of(int rank, int ranks) { return kWords * static_cast<uint64_t>(rank) / static_cast<uint64_t>(ranks); }

/// What lies at a place of the image.
uint64_t word_of(const ElasticState& state, uint64_t place) {
  if (place == 0) return static_cast<uint64_t>(state.step);
  return place == 1 ? state.parameter : mix(state.parameter + place);
}

uint64_t own_word(const ElasticState& state, int rank) {
  return mix(state.parameter ^ (uint64_t{1} << 40) ^ static_cast<uint64_t>(rank));
}

int memory_descriptor() {
  const auto text = Environment::from_process().lockstep_memory_fd;
  return text ? std::atoi(text->c_str()) : -1;
}

}  // namespace

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

class MemorySaves::MortalSlots : public SlotMemory {
 public:
  MortalSlots(Injector& injector, SlotMemory& slots)
      : injector_(injector), slots_(slots), noise_(std::random_device()()) {}

  void start_save() { writes_ = 0; }

  uint64_t load(uint64_t offset) const override { return slots_.load(offset); }
  void store(uint64_t offset, uint64_t word) override {
    before_write();
    slots_.store(offset, word);
  }
  void write(uint64_t offset, const void* data, uint64_t bytes) override {
    before_write();
    slots_.write(offset, data, bytes);
  }
  void read(uint64_t offset, void* to, uint64_t bytes) const override { slots_.read(offset, to, bytes); }

 private:
  void before_write() {
    if (injector_.mine().die_at_write == ++writes_) {
      injector_.mine().die_at_write = 0;
      injector_.note_fault();
      ++injector_.page().cut_saves;
      ::kill(::getpid(), SIGKILL);
    }
    // So that those who kill from outside meet it here, too.
    if (noise_() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(noise_() % 200));
  }

  Injector& injector_;
  SlotMemory& slots_;
  std::minstd_rand noise_;
  int64_t writes_ = 0;
};

MemorySaves::MemorySaves(Injector& injector, int rank, int ranks)
    : injector_(injector),
      rank_(rank),
      ranks_(ranks),
      slots_(std::make_shared<MappedSlots>(memory_descriptor())),
      mortal_(std::make_shared<MortalSlots>(injector, *slots_)) {
  injector_.mine().die_at_write = 0;  // meant for the process before
  const uint64_t begin = 8 * begin_of(rank, ranks), bytes = 8 * begin_of(rank + 1, ranks) - begin;
  for (const int slot : {0, 1}) {
    slots_->open_window(slot == 0 ? MappedSlots::kCommon0 : MappedSlots::kCommon1, StateMemory::common_at(slot) + begin,
                        bytes);
    slots_->open_window(slot == 0 ? MappedSlots::kOwn0 : MappedSlots::kOwn1, StateMemory::own_at(slot, rank), 8);
  }
}

std::optional<ElasticState> MemorySaves::resume() {
  writer_.emplace(*mortal_, rank_, ranks_, first_turn(*slots_));
  const auto whole = whole_slots(*slots_);
  if (whole.empty()) return {};
  const WholeSlot& newest = whole.front();
  std::vector<uint64_t> image(kWords);
  slots_->read(StateMemory::common_at(newest.slot), image.data(), 8 * kWords);
  const ElasticState state{static_cast<int64_t>(image[0]), image[1]};
  const auto check = [](bool is_right, const std::string& what) {
    if (!is_right) throw std::runtime_error("the newest state in memory is torn: " + what);
  };
  check(newest.header.step == state.step, "another step");
  for (uint64_t place = 0; place < kWords; ++place)
    check(image[place] == word_of(state, place), "word " + std::to_string(place));
  for (int rank = 0; rank < newest.world_size(); ++rank) {
    uint64_t own = 0;
    slots_->read(StateMemory::own_at(newest.slot, rank), &own, 8);
    check(own == own_word(state, rank), "rank " + std::to_string(rank));
  }
  return state;
}

void MemorySaves::save(const ElasticState& state) {
  while (writer_->unfinished_rank() >= 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  mortal_->start_save();
  writer_->begin();
  const uint64_t begin = begin_of(rank_, ranks_), count = begin_of(rank_ + 1, ranks_) - begin;
  std::vector<uint64_t> words(count);
  for (uint64_t i = 0; i < count; ++i) words[i] = word_of(state, begin + i);
  for (uint64_t piece = 0; piece < kPieces; ++piece) {
    const uint64_t first = count * piece / kPieces, last = count * (piece + 1) / kPieces;
    writer_->write_common(8 * (begin + first), &words[first], 8 * (last - first));
  }
  const uint64_t own = own_word(state, rank_);
  writer_->write_own(0, &own, 8);
  writer_->finish({.step = state.step, .owner = kOwner, .layout = 1, .common_bytes = 8 * kWords}, 8);
  own_page().note_memory_checkpoint(state.step);
}

}  // namespace lockstep::faultbox
