#pragma once

#include <functional>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace lockstep::gloo_engine {

/// Starts to send or to receive bytes. Messages of one stage between two ranks arrive in the order of the calls.
enum class Stage { kOperands, kResults };
using Post = std::function<c10::intrusive_ptr<c10d::Work>(const at::Tensor& bytes, int peer, Stage stage)>;

/// How the ranks of one collective send to each other.
struct Messages {
  Post send, receive;
};

/// The number of bits of a program's tag. Six more distinguish a message's parts by size (typed_message.h).
inline constexpr int kTagBits = 24;

inline int part_tag(int tag, int part) {
  TORCH_CHECK(tag >= 0 && tag < 1 << kTagBits, "a message's tag over Gloo is at least 0 and less than ", 1 << kTagBits,
              "; it is ", tag);
  return tag | part << kTagBits;
}

/// A part of the memory of a collective, for or from a rank.
using PartOfRank = c10::function_ref<at::Tensor(int rank)>;
/// Every rank sends the others their parts, in pieces, and receives its own from them. Throws what a message's wait()
/// throws.
void exchange_parts(PartOfRank sent, PartOfRank received, int rank, int world_size, Stage stage,
                    const Messages& messages);

/// Row r of `rows` becomes rank r's `row`, which may be that row itself: every rank sends its row to all others, and
/// receives theirs in place. Both are contiguous. Throws what a message's wait() throws.
void all_gather(const at::Tensor& rows, const at::Tensor& row, int rank, int world_size, const Messages& messages);

}  // namespace lockstep::gloo_engine
