// Long work of one rank while the others wait, and ranks that throw: long_work WHAT.

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <thread>

#include <unistd.h>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

bool is(const char* word, const char* other) { return std::strcmp(word, other) == 0; }

/// Rank 0 works alone for some seconds, the others wait for it.
void work_alone(const lockstep::Context& context, const char* how) {
  context.group().barrier();
  const auto end = steady_clock::now() + milliseconds(is(how, "sleeps") ? 8000 : 4000);
  while (context.is_main() && steady_clock::now() < end) {
    if (is(how, "computes")) torch::mm(torch::rand({64, 64}), torch::rand({64, 64}));
    if (!is(how, "computes")) std::this_thread::sleep_for(milliseconds(50));
    if (is(how, "beats")) lockstep::heartbeat();
  }
  context.group().barrier();
}

/// One collective that takes long, as the test lets ranks compute for a part of the time. Rank 0 says who they are.
void move_for_long(const lockstep::Context& context) {
  const int64_t mebi_elements = context.group().backend() == "gloo" ? 48 : 256;  // at most 1 GiB
  const at::Tensor tensor = at::ones({mebi_elements << 20});
  std::string line = "moving:";
  for (const std::string& pid : context.group().all_gather_bytes(std::to_string(::getpid()))) line += " " + pid;
  if (context.is_main()) std::cout << line << std::endl;
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // until the test has begun
  const auto start = steady_clock::now();
  context.group().all_reduce(tensor);
  if (context.is_main())
    std::cout << "moved for " << std::chrono::duration<double>(steady_clock::now() - start).count() << " s"
              << std::endl;
}

/// The others give up on rank 0 after a second; it comes late and learns that.
void come_late(const lockstep::Context& context) {
  if (context.is_main()) std::this_thread::sleep_for(milliseconds(2500));
  const at::Tensor tensor = at::ones({4});
  context.group().all_reduce(tensor);
}

void join_and_throw() {
  const lockstep::Context context({.announce = false});
  context.group().barrier();
  if (context.rank() == 1) throw std::runtime_error("no space for the moon");
  context.group().barrier();
}

/// As a test would: the function has a Context.
int spawn_ranks_that_throw(int ranks) {
  try {
    lockstep::spawn(ranks, [](int) { join_and_throw(); });
  } catch (const lockstep::RankError& error) {
    std::cout << error.what() << " (" << error.exit_code() << ")" << std::endl;
    return 0;
  }
  return 1;
}

int come_late_and_catch(const lockstep::Context& context) {
  try {
    come_late(context);
  } catch (const lockstep::Error& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const char* what = argv[1];
  if (is(what, "spawns")) return spawn_ranks_that_throw(std::atoi(argv[2]));
  if (is(what, "throws")) {
    try {
      join_and_throw();
    } catch (...) {
      throw;  // the Context is gone by now
    }
    return 0;
  }
  const bool late = is(what, "late") || is(what, "late_and_catches");
  lockstep::ContextOptions options{.backend = argc > 2 && argv[2][0] != '-' ? argv[2] : "", .announce = false};
  if (late) options.collective_timeout = milliseconds(1000);
  const lockstep::Context context(argc, argv, options);
  if (is(what, "late_and_catches")) return come_late_and_catch(context);
  if (late)
    come_late(context);
  else if (is(what, "moves"))
    move_for_long(context);
  else
    work_alone(context, what);
}
