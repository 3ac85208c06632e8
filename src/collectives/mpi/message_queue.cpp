#include "collectives/mpi/message_queue.h"

#include <algorithm>
#include <thread>

namespace lockstep::mpi_engine {
namespace {

void end(Message& message, const std::string& error) {
  message.error = error;
  message.keep = nullptr;
  message.state.store(error.empty() ? Message::State::kArrived : Message::State::kFailed, std::memory_order_release);
}

}  // namespace

bool MessageQueue::take_back(const MessagePtr& message) {
  if (std::erase(posted_, message) == 0) return false;
  end(*message, "given up");
  return true;
}

bool MessageQueue::move() {
  bool moved = !posted_.empty();
  for (const MessagePtr& message : posted_) {
    start(*message);
    if (!message->is_over()) moving_.push_back(message);
  }
  posted_.clear();
  if (std::erase_if(moving_, [this](const MessagePtr& message) { return advance(*message); }) > 0) moved = true;
  return moved;
}

bool MessageQueue::is_sending(int tag) const {
  return std::any_of(moving_.begin(), moving_.end(),
                     [tag](const MessagePtr& message) { return message->is_sent && message->tag == tag; });
}

void MessageQueue::give_up() {
  for (const MessagePtr& message : moving_) {
    message->is_given_up = true;
    advance(*message);
  }
}

void MessageQueue::start(Message& message) {
  try {
    message.handle = message.is_sent
                         ? port_.send(message.communicator, message.data, message.bytes, message.peer, message.tag)
                         : port_.receive(message.communicator, message.data, message.bytes, message.peer, message.tag);
    message.state = Message::State::kMoving;
  } catch (const std::exception& failure) {
    end(message, failure.what());
  }
}

bool MessageQueue::advance(Message& message) {
  try {
    if (port_.test(message.handle)) {
      end(message, "");
    } else if (message.is_given_up) {
      port_.give_up(message.handle, message.is_sent);
      end(message, "given up");
    }
  } catch (const std::exception& failure) {
    end(message, failure.what());
  }
  return message.is_over();
}

void rest(Clock::time_point since) {
  constexpr std::chrono::microseconds kYield{500}, kShortest{50}, kLongest{1000};
  const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - since);
  if (waited < kYield) return std::this_thread::yield();
  std::this_thread::sleep_for(std::clamp(waited / 16, kShortest, kLongest));
}

}  // namespace lockstep::mpi_engine
