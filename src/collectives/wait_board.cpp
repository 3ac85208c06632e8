#include "collectives/wait_board.h"

#include <unistd.h>

#include <exception>
#include <map>

#include "collectives/message_tags.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

constexpr const char* kVerdict = "waits/verdict";

}  // namespace

WaitBoard::WaitBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size)
    : store_(std::move(store)), rank_(rank), world_size_(world_size) {
  store_->deleteKey(key(rank_));
  store_->deleteKey(key_of_leave(rank_));
  for (int peer = 0; peer < world_size_; ++peer) store_->deleteKey(key_of_tags(rank_, peer));
  if (rank_ == 0) store_->deleteKey(kVerdict);
}

void WaitBoard::take_back() {
  try {
    store_->set(key(rank_), std::string("0"));
  } catch (const std::exception&) {
    // The store is gone, and with it every reader.
  }
}

std::vector<ToldWait> WaitBoard::read(const ToldWait& own) {
  std::vector<ToldWait> told(static_cast<size_t>(world_size_));
  for (int rank = 0; rank < world_size_; ++rank)
    if (rank == rank_)
      told[static_cast<size_t>(rank)] = own;
    else if (store_->check({key(rank)}))
      told[static_cast<size_t>(rank)] = ToldWait::unpacked(store_->get_to_str(key(rank)));
  return told;
}

void WaitBoard::declare(const std::string& verdict) {
  try {
    store_->set(kVerdict, verdict);
  } catch (const std::exception&) {
    // Without a store no rank can be told.
  }
}

void WaitBoard::leave(const std::list<NotedMessage>& pending) {
  std::map<int, std::vector<int64_t>> tags;
  for (const NotedMessage& message : pending)
    if (message.is_send) tags[message.peer].push_back(message.tag);
  try {
    for (const auto& [peer, list] : tags) store_->set(key_of_tags(rank_, peer), text_of_tags(list));
    store_->set(key_of_leave(rank_), std::to_string(rank_of_process(::getpid())));
  } catch (const std::exception&) {
    // Without a store no rank can be told.
  }
}

std::string WaitBoard::departure(const NotedMessage& message) {
  const auto& [is_send, rank, tag] = message;
  const std::string peer = "rank " + std::to_string(rank), self = "rank " + std::to_string(rank_);
  std::string text = peer + " has already left the group, but " + self + " called a " +
                     (is_send ? "send to " : "recv from ") + peer + " with tag " + std::to_string(tag) + ". ";
  try {
    if (!store_->check({key_of_leave(rank)})) return "";
    if (is_send)
      text += "Every send needs a recv with the same tag.";
    else
      text += unreceived(peer, self,
                         store_->check({key_of_tags(rank, rank_)}) ? store_->get_to_str(key_of_tags(rank, rank_)) : "");
    own_page().fail(RankFailure::kPeer, std::stoi(store_->get_to_str(key_of_leave(rank))), text);
    return text;
  } catch (const std::exception&) {
    return "";
  }
}

std::string WaitBoard::verdict() { return store_->check({kVerdict}) ? store_->get_to_str(kVerdict) : ""; }

}  // namespace lockstep
