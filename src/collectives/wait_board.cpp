#include "collectives/wait_board.h"

#include <exception>
#include <map>

#include "collectives/message_tags.h"

namespace lockstep {
namespace {

constexpr const char* kVerdict = "waits/verdict";

}  // namespace

WaitBoard::WaitBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size)
    : store_(std::move(store)), rank_(rank), world_size_(world_size) {
  store_->deleteKey(key(rank_));
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

void WaitBoard::leave_tags(const std::list<NotedMessage>& pending) {
  std::map<int, std::vector<int64_t>> tags;
  for (const NotedMessage& message : pending)
    if (message.is_send) tags[message.peer].push_back(message.tag);
  try {
    for (const auto& [peer, list] : tags) store_->set(key_of_tags(rank_, peer), text_of_tags(list));
  } catch (const std::exception&) {
    // Without a store no rank can be told.
  }
}

std::string WaitBoard::unreceived_from(int rank) {
  try {
    if (!store_->check({key_of_tags(rank, rank_)})) return "";
    const std::string sender = "rank " + std::to_string(rank), receiver = "rank " + std::to_string(rank_);
    return sender + " has left the group. " +
           unreceived(sender, receiver, store_->get_to_str(key_of_tags(rank, rank_)));
  } catch (const std::exception&) {
    return "";
  }
}

std::string WaitBoard::verdict() { return store_->check({kVerdict}) ? store_->get_to_str(kVerdict) : ""; }

}  // namespace lockstep
