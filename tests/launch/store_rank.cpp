// A rank that meets the others in the launcher's key-value store: prints the sum of all ranks plus one.

#include <iostream>

#include "base/environment.h"
#include "rendezvous/key_value_client.h"

int main() {
  const auto environment = lockstep::Environment::from_process();
  const int world_size = std::stoi(environment.world_size.value());
  lockstep::KeyValueClient store(lockstep::FileDescriptor(std::stoi(environment.lockstep_store_fd.value())));
  store.add("sum", std::stoi(environment.rank.value()) + 1);
  if (store.add("arrived", 1) == world_size) store.set("all", {});
  store.wait({"all"}, std::chrono::seconds(10));
  std::cout << store.add("sum", 0) << std::endl;
}
