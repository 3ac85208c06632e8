#include "collectives/shm/protocol/channels.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "collectives/message_tags.h"
#include "collectives/shm/protocol/verdict.h"
#include "rank_page/rank_board.h"

namespace lockstep::shm {

Channels::Channels(const World& world)
    : world_(world),
      boxes_(world),
      streams_(world),
      sends_(static_cast<size_t>(world.size())),
      incoming_(static_cast<size_t>(world.size())),
      set_aside_(static_cast<size_t>(world.size())) {}

MessagePtr Channels::send(const void* data, size_t bytes, int to, int64_t tag, std::shared_ptr<void> keep_alive,
                          DataType type) {
  if (!sends_[static_cast<size_t>(to)].empty() || !boxes_.has_room(to, bytes)) streams_.commit(to);
  auto message = std::make_shared<Message>();
  message->data_ = static_cast<std::byte*>(const_cast<void*>(data));
  message->bytes_ = bytes;
  message->type_ = type;
  message->tag_ = tag;
  message->source_ = world_.rank();
  message->is_send_ = true;
  message->to_ = to;
  message->keep_alive_ = std::move(keep_alive);
  sends_[static_cast<size_t>(to)].push_back(message);
  ++pending_;
  return message;
}

MessagePtr Channels::receive(void* data, size_t bytes, int from, int64_t tag, std::shared_ptr<void> keep_alive,
                             DataType type) {
  auto message = std::make_shared<Message>();
  message->data_ = static_cast<std::byte*>(data);
  message->bytes_ = bytes;
  message->type_ = type;
  message->tag_ = tag;
  message->source_ = from;
  message->keep_alive_ = std::move(keep_alive);
  ++pending_;
  if (!take_set_aside(*message)) receives_.push_back(message);
  return message;
}

MessagePtr Channels::send_at_once(const void* data, size_t bytes, int to, int64_t tag, DataType type) {
  if (!sends_[static_cast<size_t>(to)].empty()) return send(data, bytes, to, tag, nullptr, type);
  const Envelope envelope(tag, bytes, type);
  size_t moved = bytes;
  if (!boxes_.put(to, envelope, data)) {
    streams_.commit(to);
    if (!streams_.has_room(to, sizeof envelope)) return send(data, bytes, to, tag, nullptr, type);
    streams_.begin(to, &envelope, sizeof envelope);
    boxes_.pass(to);
    moved = streams_.write(to, data, bytes);
  }
  ++advances_;
  if (moved == bytes) return nullptr;
  MessagePtr message = send(data, bytes, to, tag, nullptr, type);
  message->announced_ = true;
  message->moved_ = moved;
  return message;
}

MessagePtr Channels::receive_at_once(void* data, size_t bytes, int from, int64_t tag, DataType type) {
  const Envelope wanted(tag, bytes, type);
  const bool streamed = streams_.has(from, sizeof(Envelope));  // before the box: see open_incoming()
  if (Box* const box = boxes_.next(from); box != nullptr) {
    if (MessageBoxes::envelope_of(*box) != wanted) return receive(data, bytes, from, tag, nullptr, type);
    boxes_.take(*box, from, data);
    ++advances_;
    return nullptr;
  }
  Envelope envelope;
  if (streamed) streams_.peek(from, &envelope, sizeof envelope);
  if (!streamed || envelope != wanted) return receive(data, bytes, from, tag, nullptr, type);
  streams_.open(from, &envelope, sizeof envelope);
  boxes_.passed(from);
  ++advances_;
  const size_t moved = streams_.read(from, data, bytes);
  if (moved == bytes) return nullptr;
  MessagePtr message = receive(data, bytes, from, tag, nullptr, type);
  receives_.pop_back();
  incoming_[static_cast<size_t>(from)] = {.open = true, .envelope = envelope, .moved = moved, .receiver = message};
  return message;
}

bool Channels::push(int to, uint64_t blocked_bit, uint64_t& blocked_on) {
  auto& queue = sends_[static_cast<size_t>(to)];
  bool moved = false;
  while (!queue.empty()) {
    Message& message = *queue.front();
    const Envelope envelope(message.tag_, message.bytes_, message.type_);
    if (!message.announced_ && boxes_.put(to, envelope, message.data_)) {
      message.moved_ = message.bytes_;
      message.announced_ = moved = true;
    } else {
      if (!message.announced_) {
        if (!streams_.has_room(to, sizeof envelope)) break;  // an envelope is written whole
        streams_.begin(to, &envelope, sizeof envelope);
        boxes_.pass(to);
        message.announced_ = moved = true;
      }
      const size_t count = streams_.write(to, message.data_ + message.moved_, message.bytes_ - message.moved_);
      message.moved_ += count;
      moved = moved || count > 0;
    }
    if (message.moved_ < message.bytes_) break;
    message.keep_alive_.reset();
    message.succeed();
    --pending_;
    queue.pop_front();
  }
  if (!queue.empty()) blocked_on |= blocked_bit;
  return moved;
}

MessagePtr Channels::match(int from, int64_t tag) {
  for (auto it = receives_.begin(); it != receives_.end(); ++it) {
    if ((*it)->tag_ != tag || ((*it)->source_ != from && (*it)->source_ != kAnySource)) continue;
    MessagePtr message = *it;
    receives_.erase(it);
    return message;
  }
  return nullptr;
}

bool Channels::wanted_behind(int from) const {
  return std::any_of(receives_.begin(), receives_.end(),
                     [&](const auto& m) { return m->source_ == from || m->source_ == kAnySource; });
}

bool Channels::fits(const Message& message, const Envelope& envelope) {
  return message.bytes_ == envelope.bytes() && message.type_ == envelope.type();
}

void Channels::refuse(const Message& message, int from, const Envelope& envelope) {
  std::snprintf(world_.mine().abort_text, sizeof world_.mine().abort_text,
                "%zu elements of %s sent, %zu of %s expected (tag %lld)",
                static_cast<size_t>(envelope.bytes()) / element_bytes(envelope.type()), name(envelope.type()),
                message.bytes_ / element_bytes(message.type_), name(message.type_),
                static_cast<long long>(message.tag_));
  Verdict{Verdict::Cause::kMessage, world_.rank(), from, 0}.declare(world_);
}

void Channels::finish_receive(const MessagePtr& message, int from) {
  message->source_ = from;
  message->keep_alive_.reset();
  message->succeed();
  --pending_;
}

bool Channels::take_set_aside(Message& message) {
  for (int r = 0; r < world_.size(); ++r) {
    if (message.source_ != r && message.source_ != kAnySource) continue;
    auto& kept = set_aside_[static_cast<size_t>(r)];
    const auto found =
        std::find_if(kept.begin(), kept.end(), [&](const auto& k) { return k.envelope.tag == message.tag_; });
    if (found == kept.end()) continue;
    if (!fits(message, found->envelope)) {
      refuse(message, r, found->envelope);
      return false;
    }
    std::copy(found->data.begin(), found->data.end(), message.data_);
    kept.erase(found);
    message.source_ = r;
    message.keep_alive_.reset();
    message.succeed();
    --pending_;
    return true;
  }
  return false;
}

bool Channels::open_incoming(int from, Incoming& incoming) {
  incoming.box = boxes_.next(from);
  if (incoming.box == nullptr) {
    if (!streams_.has(from, sizeof(Envelope))) return false;
    // The stream may since have brought the message that follows one which has since come in a box.
    incoming.box = boxes_.next(from);
  }
  if (incoming.box != nullptr) {
    incoming.envelope = MessageBoxes::envelope_of(*incoming.box);
  } else {
    streams_.open(from, &incoming.envelope, sizeof(Envelope));
    boxes_.passed(from);
  }
  incoming.open = true;
  incoming.moved = 0;
  incoming.receiver = match(from, incoming.envelope.tag);
  if (incoming.receiver == nullptr) {
    incoming.copy.resize(incoming.envelope.bytes());
  } else if (!fits(*incoming.receiver, incoming.envelope)) {
    receives_.push_front(incoming.receiver);
    refuse(*incoming.receiver, from, incoming.envelope);
    incoming.receiver = nullptr;
    incoming.copy.resize(incoming.envelope.bytes());
  }
  return true;
}

bool Channels::take_in(int from, Incoming& incoming) {
  std::byte* const target = incoming.receiver ? incoming.receiver->data_ : incoming.copy.data();
  if (incoming.box != nullptr) {
    boxes_.take(*incoming.box, from, target);
    incoming.moved = incoming.envelope.bytes();
    return true;
  }
  const size_t count = streams_.read(from, target + incoming.moved, incoming.envelope.bytes() - incoming.moved);
  incoming.moved += count;
  return count > 0;
}

bool Channels::pull(int from) {
  Incoming& incoming = incoming_[static_cast<size_t>(from)];
  bool moved = false;
  // While nobody could want a message it stays where it is; if that is the stream, its sender waits.
  while (incoming.open ? incoming.receiver != nullptr || wanted_behind(from) : wanted_behind(from)) {
    if (!incoming.open && !open_incoming(from, incoming)) return moved;
    if (take_in(from, incoming)) moved = true;
    if (incoming.moved < incoming.envelope.bytes()) return moved;
    if (incoming.receiver) {
      finish_receive(incoming.receiver, from);
    } else {
      set_aside_[static_cast<size_t>(from)].push_back({incoming.envelope, std::move(incoming.copy)});
      // A receive for it may have been started meanwhile.
      MessagePtr late = match(from, incoming.envelope.tag);
      if (late && !take_set_aside(*late)) receives_.push_front(late);
    }
    incoming = Incoming{};
    moved = true;
  }
  return moved;
}

void Channels::progress(uint64_t& blocked_on, uint64_t& blocked_on_any) {
  if (pending_ == 0) return;
  bool moved;
  do {
    moved = false;
    for (int r = 0; r < world_.size(); ++r) {
      if (r == world_.rank()) continue;
      if (!sends_[static_cast<size_t>(r)].empty()) moved |= push(r, world_.bit(r), blocked_on);
      if (incoming_[static_cast<size_t>(r)].open || !receives_.empty()) moved |= pull(r);
    }
    if (!moved) continue;
    own_page().beat();
    ++advances_;
  } while (moved);
  for (const auto& message : receives_) {
    if (message->source_ == kAnySource)
      blocked_on_any |= world_.others();
    else
      blocked_on |= world_.bit(message->source_);
  }
  for (int r = 0; r < world_.size(); ++r)
    if (incoming_[static_cast<size_t>(r)].receiver) blocked_on |= world_.bit(r);
}

uint64_t Channels::sends_to() const {
  uint64_t ranks = 0;
  for (int r = 0; r < world_.size(); ++r)
    if (!sends_[static_cast<size_t>(r)].empty()) ranks |= world_.bit(r);
  return ranks;
}

uint64_t Channels::receives_of() const {
  uint64_t ranks = 0;
  for (const auto& message : receives_)
    ranks |= message->source_ == kAnySource ? world_.others() : world_.bit(message->source_);
  for (int r = 0; r < world_.size(); ++r)
    if (incoming_[static_cast<size_t>(r)].receiver) ranks |= world_.bit(r);
  return ranks;
}

std::optional<int64_t> Channels::unwanted_tag(int from) const {
  if (from == kAnySource || set_aside_[static_cast<size_t>(from)].empty()) return std::nullopt;
  return set_aside_[static_cast<size_t>(from)].front().envelope.tag;
}

std::string Channels::unwanted_tags(int from) const {
  if (const Incoming& incoming = incoming_[static_cast<size_t>(from)]; incoming.open && incoming.receiver)
    return part_of_message(incoming.moved, incoming.envelope.bytes(), incoming.envelope.tag);
  std::vector<int64_t> tags;
  for (const SetAside& kept : set_aside_[static_cast<size_t>(from)]) tags.push_back(kept.envelope.tag);
  return text_of_tags(std::move(tags));
}

void Channels::fail_all(const std::string& why) {
  const auto fail = [&](const MessagePtr& message) {
    message->keep_alive_.reset();
    message->fail(why);
  };
  for (auto& queue : sends_) {
    for (const auto& message : queue) fail(message);
    queue.clear();
  }
  for (const auto& message : receives_) fail(message);
  receives_.clear();
  for (auto& incoming : incoming_) {
    if (incoming.receiver) fail(incoming.receiver);
    incoming = Incoming{};
  }
  pending_ = 0;
}

}  // namespace lockstep::shm
