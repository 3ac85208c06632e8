#include "faultbox/injector.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <vector>

namespace lockstep::faultbox {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

int64_t now_ns() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * kSecond + time.tv_nsec;
}

/// The kernel kills this process at that instant, wherever it is then: no other process has to be in time.
void kill_at(int64_t instant_ns) {
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGKILL;
  timer_t timer;
  itimerspec time{};
  time.it_value.tv_sec = instant_ns / kSecond;
  time.it_value.tv_nsec = instant_ns % kSecond;
  if (::timer_create(CLOCK_MONOTONIC, &event, &timer) != 0 ||
      ::timer_settime(timer, TIMER_ABSTIME, &time, nullptr) != 0)
    throw std::runtime_error(std::string("faultbox: no timer: ") + std::strerror(errno));
}

void write_flood(int64_t bytes) {
  const std::string line = std::string(126, 'x') + " \n";
  std::string piece;
  while (piece.size() < 64 << 10) piece += line;
  for (int64_t left = bytes; left > 0;) {
    const ssize_t count =
        ::write(STDOUT_FILENO, piece.data(), std::min<size_t>(piece.size(), static_cast<size_t>(left)));
    if (count <= 0) return;
    left -= count;
  }
}

/// Allocates memory until it reaches a limit a little above what this process has.
void run_out_of_memory() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const auto limit = static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE) + (int64_t{64} << 20));
  const rlimit limits{.rlim_cur = limit, .rlim_max = limit};
  ::setrlimit(RLIMIT_AS, &limits);
  std::vector<std::unique_ptr<char[]>> taken;
  for (;;) taken.emplace_back(new char[4 << 20])[0] = 1;
}

/// A child that stays in the rank's process group and keeps all that the rank had open.
void fork_one_that_stays() {
  if (::fork() != 0) return;
  for (;;) ::sleep(60);
}

}  // namespace

Injector::Injector(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    if (const size_t sign = text.find('='); sign != std::string::npos)
      words_[text.substr(0, sign)] = text.substr(sign + 1);
  }
  const char* rank = std::getenv("RANK");
  rank_ = rank == nullptr ? 0 : std::atoi(rank);
  if (rank_ < 0 || rank_ >= FaultPage::kMostRanks) throw std::runtime_error("faultbox: RANK is out of range");
  chosen_ = number("rank", -1) == rank_;
  const std::string path = word("page", "");
  void* memory = nullptr;
  if (path.empty()) {
    memory = ::mmap(nullptr, sizeof(FaultPage), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  } else {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    memory = fd < 0 ? MAP_FAILED : ::mmap(nullptr, sizeof(FaultPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0) ::close(fd);
  }
  if (memory == MAP_FAILED) throw std::runtime_error("faultbox: cannot map the page " + path);
  page_ = static_cast<FaultPage*>(memory);
  if (rank_ == 0) page_->made_before = page_->made.load();
  mine().pid = ::getpid();
}

std::string Injector::word(const std::string& name, const std::string& otherwise) const {
  const auto found = words_.find(name);
  return found == words_.end() ? otherwise : found->second;
}

int64_t Injector::number(const std::string& name, int64_t otherwise) const {
  const auto found = words_.find(name);
  return found == words_.end() ? otherwise : std::stoll(found->second);
}

void Injector::note_fault() { mine().fault_ns = now_ns(); }

void Injector::wait_for_kill(int64_t step) const {
  std::istringstream steps(word("kill_steps", ""));
  std::string next;
  for (int64_t kill = 0; std::getline(steps, next, ','); ++kill)
    while (std::stoll(next) == step && page_->kills <= kill) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void Injector::arrive(Place place, int64_t step, int64_t bucket) {
  mine().step = step;
  mine().place = place;
  if (place == Place::kForward) wait_for_kill(step);
  if (!chosen_ || word("at", "") != kPlaceNames[static_cast<size_t>(place)]) return;
  const bool stepless = place == Place::kStart || place == Place::kRendezvous || place == Place::kExit;
  if (!stepless && step != number("step", 0)) return;
  if (place == Place::kBucket && bucket != number("bucket", 0)) return;
  // A program that was restarted or resumed has had its fault.
  if (mine().fault_ns == 0 || number("always", 0) != 0) inject();
}

void Injector::inject() {
  const std::string fault = word("fault", "none");
  if (fault == "none") return;
  note_fault();
  if (fault == "kill") {
    const int64_t instant = now_ns() + 1000 * number("delay_us", 0);
    mine().fault_ns = instant;
    kill_at(instant);
  } else if (fault == "segv") {
    *static_cast<volatile int*>(nullptr) = 1;
  } else if (fault == "abort") {
    std::abort();
  } else if (fault == "exception") {
    throw std::runtime_error("the exception that faultbox asked for");
  } else if (fault == "exit0") {
    std::exit(0);
  } else if (fault == "_exit") {
    ::_exit(3);
  } else if (fault == "fork") {
    fork_one_that_stays();
    note_fault();
    ::raise(SIGKILL);
  } else if (fault == "stop") {
    ::raise(SIGSTOP);
  } else if (fault == "memory") {
    run_out_of_memory();
  } else if (fault == "flood") {
    write_flood(number("bytes", 1 << 20));
  } else {
    throw std::runtime_error("faultbox: no such fault: " + fault);
  }
}

}  // namespace lockstep::faultbox
