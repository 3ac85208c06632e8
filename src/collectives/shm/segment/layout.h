#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "collectives/shm/segment/label_note.h"

#ifdef LOCKSTEP_SHM_STEPPED_WORD
#include LOCKSTEP_SHM_STEPPED_WORD
#endif

// The layout of a rank's segment. Unless noted otherwise, only the owner writes, and all ranks read. There are no
// locks: words only grow (or are hints whose loss costs a bounded sleep: `awaited`, `bell`), so a rank that dies at any
// instruction leaves nothing half done that another rank would trust.
namespace lockstep::shm {

inline constexpr int kMaxRanks = 64;
inline constexpr size_t kCacheLine = 64;
inline constexpr uint32_t kLayoutVersion = 13;

/// The most operations of a group that may be announced before every rank has finished the first of them.
inline constexpr uint64_t kRingLines = 32;
/// Data this small is stored with the announcement, in the cache lines that follow it, and a rank that has seen the
/// announcement reads all of them at once (measured on 2 ranks, against data elsewhere: 64 bytes 0.12 us instead of
/// 0.16, 1 KiB 0.16 us instead of 0.18).
inline constexpr size_t kInlineBytes = 48 + 1024;
/// The processor of a rank that has not waited yet, or of any rank on a system that does not report it.
inline constexpr uint32_t kNoProcessor = ~uint32_t{0};
/// The last operation that a group can carry out, because an announcement uses 8 bits of its word for something else.
/// At 0.1 us each it is reached after 228 years; start() then throws.
inline constexpr uint64_t kLastOperation = (uint64_t{1} << 56) - 1;

#ifdef LOCKSTEP_SHM_STEPPED_WORD
using Word = SteppedWord;  // the explorer's, which stops before every access to choose which rank runs next
#else
using Word = std::atomic<uint64_t>;
#endif
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(Word) == 8);

/// Whether a word that grows over the life of a group, and may wrap past 2^64, has reached `value`.
constexpr bool reached(uint64_t word, uint64_t value) { return static_cast<int64_t>(word - value) >= 0; }

/// The word of a line: the operation's sequence number, and the number of operations that its announcer had not
/// finished (saturating).
struct Announcement {
  static constexpr uint64_t pack(uint64_t sequence, uint64_t unfinished) {
    return sequence << 8 | std::min<uint64_t>(unfinished, 255);
  }
  static constexpr uint64_t sequence(uint64_t word) { return word >> 8; }
  /// The operations that its announcer had certainly finished.
  static constexpr uint64_t finished(uint64_t word) {
    return (word & 255) == 255 ? 0 : (word >> 8) - std::min(word >> 8, word & 255);
  }
};

inline constexpr uint64_t kNowhere = ~uint64_t{0};

/// Announces one operation: everything about it in one cache line, followed by small data.
struct alignas(kCacheLine) Line {
  Word word;
  uint64_t header;
  union {
    std::byte data[kInlineBytes];
    struct {
      uint64_t eager;     ///< offset of the data from the eager area's begin, or kNowhere
      uint64_t resident;  ///< offset of the data in the resident area, or kNowhere
      double factor;
      uint64_t longest;  ///< kAllToAllUneven: bytes of the largest block that the announcer sends or receives
    } where;
  };
};
static_assert(sizeof(Line) == kCacheLine + 1024);

/// How far one end of a stream of messages has come. Each block of the stream lies in a cell; see Cells.
struct alignas(kCacheLine) StreamEnd {
  static constexpr uint64_t kBlocks = 16;
  Word bytes;  ///< that it has written or read
  /// By block: where the sender has written it, or what the receiver has given back for it. Published with the bytes.
  uint16_t cells[kBlocks];
};
static_assert(sizeof(StreamEnd) == kCacheLine);
inline constexpr uint16_t kNoCell = 0xffff;

struct alignas(kCacheLine) PaddedWord {
  Word value;
};

/// Holds one small message, whole: its envelope, and its data right behind, so that a rank that has seen the word reads
/// all of it at once. The sender's messages to one rank take turns in kBoxes of them; see MessageBoxes.
struct alignas(kCacheLine) Box {
  Word word;  ///< the message's number, counted from 1; that of an earlier one until it is there
  int64_t tag;
  uint64_t bytes_and_type;
  uint64_t received;  ///< messages that the sender had received from this one's receiver
  std::byte* data() { return reinterpret_cast<std::byte*>(this) + kHead; }
  static constexpr size_t kHead = 32;
};
inline constexpr uint64_t kBoxes = 8;

/// The wait of a rank, for StuckSearch. Rewritten only by ranks that have waited for long.
struct WaitNote {
  static constexpr size_t kWords = 7;
  std::atomic<uint64_t> serial;  ///< odd while the words are written
  std::atomic<uint64_t> words[kWords];
};

struct Control {
  // Identity, written before the segment is shared.
  std::byte nonce[16];
  uint32_t version;
  uint32_t rank;
  uint32_t world_size;
  std::atomic<uint32_t> has_met;  ///< 1: this rank needs nothing more of the store where the group has met

  /// Only rank 0's is used. Set once, by the first rank to notice that the group cannot go on (see verdict.h).
  alignas(kCacheLine) Word verdict;

  /// The ranks for which this one sleeps, as bits. A rank that publishes and finds its bit clears all bits and rings
  /// the bell.
  alignas(kCacheLine) Word awaited;
  std::atomic<uint32_t> bell;
  std::atomic<uint32_t> processor;  ///< where this rank last waited, or kNoProcessor: a hint

  /// Large operations move data in rounds, which are numbered over the life of the group, alike on every rank.
  alignas(kCacheLine) Word filled;   ///< rounds of its own chunks a rank has written
  alignas(kCacheLine) Word reduced;  ///< rounds whose slice it has summed
  alignas(kCacheLine) Word drained;  ///< rounds it has read from all others
  Word finished;                     ///< the last operation it has finished

  alignas(kCacheLine) Word closed;  ///< 1 + the last operation announced, once the rank has left properly
  Word stopped_at;                  ///< with a verdict: its reporter's operation, 0 for a send or receive
  Word stopped_in;                  ///< with a verdict for a send or receive: Message::described()
  Word stopped_tag;                 ///< and its tag
  Word missing;                     ///< with a timeout verdict: the ranks it waited for, as bits
  char abort_text[kCacheLine * 8];  ///< with an abort verdict: the reason

  alignas(kCacheLine) WaitNote waiting;

  Line ring[kRingLines];
  LabelNote labels[kRingLines];  ///< of the operations in the ring

  StreamEnd written[kMaxRanks];    ///< of the streams to each rank
  StreamEnd consumed[kMaxRanks];   ///< of the streams from each rank
  PaddedWord received[kMaxRanks];  ///< messages that this rank has received from each, in boxes or by a channel
};

/// The values from which a new group's words start; the same on every rank. For tests, which cannot count that far.
struct Beginning {
  uint64_t operations = 0;
  uint64_t rounds = 0;
  uint64_t message_bytes = 0;
};

/// Sizes and offsets of a segment's areas; the same on every rank.
struct Geometry {
  size_t eager_bytes = size_t{1} << 20;     ///< small operations' data, announced together with the operation
  size_t chunk_bytes = size_t{256} << 10;   ///< one round of a large operation
  size_t chunks = 4;                        ///< rounds of a large all_reduce in flight
  size_t area_bytes = size_t{1} << 20;      ///< rounds of other operations; committed when used
  size_t cold_bytes = size_t{1} << 20;      ///< as the eager area, in memory that nobody caches; committed when used
  size_t channel_bytes = size_t{16} << 10;  ///< a rank's cells for its streams with another one; the same
  size_t cell_bytes = size_t{1} << 10;      ///< a multiple of a cache line; a channel has four or more
  size_t box_bytes = kCacheLine + 1024;     ///< for such a pair, one of kBoxes: a multiple of a cache line
  size_t resident_bytes = 0;                ///< address space for allocations; committed when used
  int world_size = 1;

  static size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }
  size_t eager_at() const { return round_up(sizeof(Control), 4096); }
  size_t chunks_at() const { return eager_at() + eager_bytes; }
  size_t box_at(int to, uint64_t number) const {
    return round_up(chunks_at() + chunks * chunk_bytes, kCacheLine) +
           (static_cast<size_t>(to) * kBoxes + number % kBoxes) * box_bytes;
  }
  /// Also the part of a segment that is committed at the start.
  size_t resident_at() const { return round_up(box_at(world_size, 0), size_t{1} << 16); }
  size_t area_at() const { return resident_at() + round_up(resident_bytes, size_t{1} << 16); }
  size_t cold_at() const { return area_at() + round_up(area_bytes, 4096); }
  size_t channel_at(int to) const {
    return cold_at() + round_up(cold_bytes, 4096) + static_cast<size_t>(to) * channel_bytes;
  }
  /// From the area on: committed when used.
  size_t apart_bytes() const { return segment_bytes() - area_at(); }
  size_t segment_bytes() const { return round_up(channel_at(world_size), size_t{1} << 16); }
  bool operator==(const Geometry&) const = default;
};

}  // namespace lockstep::shm
