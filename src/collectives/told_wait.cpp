#include "collectives/told_wait.h"

#include <algorithm>
#include <sstream>

namespace lockstep {

bool ToldWait::has(const NotedMessage& wanted) const {
  return std::find(pending.begin(), pending.end(), wanted) != pending.end();
}

std::string ToldWait::says(int rank) const {
  const std::string waits = "rank " + std::to_string(rank) + " waits ";
  if (!message) return waits + "in operation " + std::to_string(number) + ", " + text;
  const std::string peer = "rank " + std::to_string(message->peer), tag = " with tag " + std::to_string(message->tag);
  return waits + (message->is_send ? "until " + peer + " receives its message" : "for a message from " + peer) + tag;
}

std::string ToldWait::packed() const {
  std::ostringstream words;
  const auto add = [&](const NotedMessage& one) { words << one.is_send << ' ' << one.peer << ' ' << one.tag << ' '; };
  words << serial << ' ' << number << ' ' << called << ' ' << message.has_value() << ' ';
  if (message) add(*message);
  words << pending.size() << ' ';
  for (const NotedMessage& one : pending) add(one);
  for (const auto* counts : {&sent, &received}) {
    words << counts->size() << ' ';
    for (const auto& [peer, count] : *counts) words << peer << ' ' << count << ' ';
  }
  words << text;
  return words.str();
}

ToldWait ToldWait::unpacked(const std::string& bytes) {
  ToldWait note;
  std::istringstream words(bytes);
  const auto read = [&] {
    NotedMessage one;
    words >> one.is_send >> one.peer >> one.tag;
    return one;
  };
  bool has_message = false;
  size_t size = 0;
  words >> note.serial >> note.number >> note.called >> has_message;
  if (has_message) note.message = read();
  words >> size;
  for (size_t i = 0; i < size && words; ++i) note.pending.push_back(read());
  for (auto* counts : {&note.sent, &note.received}) {
    size = 0;
    words >> size;
    for (size_t i = 0; i < size && words; ++i) {
      int peer = 0;
      uint64_t count = 0;
      words >> peer >> count;
      (*counts)[peer] = count;
    }
  }
  words.get();
  std::getline(words, note.text);
  return note;
}

}  // namespace lockstep
