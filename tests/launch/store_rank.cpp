// A rank that meets the others in the launcher's key-value store: prints the sum of all ranks plus one. With `steps END
// TIMES` it goes on with steps of 2 ms of work and a meeting in the store each, until there is a file END; rank 0
// appends a line to TIMES for each: when it ended on the steady clock, and how long it took, both in microseconds.

#include <unistd.h>

#include <fstream>
#include <iostream>

#include "base/clock.h"
#include "base/environment.h"
#include "rendezvous/key_value_client.h"

namespace {

using lockstep::KeyValueClient;

int64_t now_us() {
  const auto now = lockstep::Clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

/// Whether it was the last: whoever arrives last decides for all.
bool step(KeyValueClient& store, int64_t number, int world_size, const char* end) {
  for (const lockstep::Deadline work{std::chrono::milliseconds(2)}; !work.passed();) continue;
  const std::string arrived = "step/" + std::to_string(number), all = arrived + "/all";
  if (store.add(arrived, 1) == world_size) store.set(all, {static_cast<uint8_t>(::access(end, F_OK) == 0 ? 1 : 0)});
  return store.get(all, std::chrono::seconds(30)).at(0) != 0;
}

void take_steps(KeyValueClient& store, int rank, int world_size, const char* end, const char* times_path) {
  std::ofstream times;
  if (rank == 0) times.open(times_path);
  bool last = false;
  for (int64_t number = 0; !last; ++number) {
    const int64_t began = now_us();
    last = step(store, number, world_size, end);
    const int64_t ended = now_us();
    if (rank != 0) continue;
    times << ended << ' ' << ended - began << std::endl;
    // Of this step somebody may still read the answer; nobody reads the one's before.
    if (number > 0) store.delete_key("step/" + std::to_string(number - 1));
    if (number > 0) store.delete_key("step/" + std::to_string(number - 1) + "/all");
  }
}

}  // namespace

int main(int count, char** words) {
  const auto environment = lockstep::Environment::from_process();
  const int world_size = std::stoi(environment.world_size.value()), rank = std::stoi(environment.rank.value());
  KeyValueClient store(lockstep::FileDescriptor(std::stoi(environment.lockstep_store_fd.value())));
  store.add("sum", rank + 1);
  if (store.add("arrived", 1) == world_size) store.set("all", {});
  store.wait({"all"}, std::chrono::seconds(10));
  std::cout << store.add("sum", 0) << std::endl;
  if (count == 4 && std::string(words[1]) == "steps") take_steps(store, rank, world_size, words[2], words[3]);
}
