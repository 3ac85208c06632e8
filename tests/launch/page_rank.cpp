// A rank that writes to its page what its arguments say, one after the other: `page_rank WORD...`. A word that begins
// with "1:" is for rank 1 alone, with "first:" for the first start of a run that restarts.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <string>
#include <thread>

#include "base/environment.h"
#include "base/error.h"
#include "rank_page/error_file.h"
#include "rank_page/rank_board.h"
#include "rank_page/stop_agreement.h"

namespace {

using lockstep::Clock;
using lockstep::RankFailure;
using lockstep::RankStatus;

void note(const std::string& text) { std::cout << text << std::endl; }

void sleep_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

/// Steps of 10 ms until told to leave, then a checkpoint unless `unsaved`.
void train(bool save) {
  lockstep::StopAgreement agreement(*lockstep::launchers_board(), lockstep::own_page());
  int64_t step = 0;
  note("training");
  while (!agreement.should_stop()) {
    sleep_ms(10 + lockstep::own_page().pid() % 7);
    lockstep::own_page().count_step();
    ++step;
  }
  note("left after " + std::to_string(step));
  if (save) lockstep::own_page().note_checkpoint("/run/step.pt", step, Clock::now());
}

std::string purpose;  // of the operations that follow

/// In this process's group.
void leave_a_child(int64_t ms) {
  if (::fork() != 0) return;
  sleep_ms(ms);
  ::_exit(0);
}

void spin_ms(int64_t ms) {
  for (const lockstep::Deadline deadline{std::chrono::milliseconds(ms)}; !deadline.passed();) continue;
}

/// In a process of its own, in a session of its own, for which this one only waits.
void let_a_child_spin(int64_t ms) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::setsid();
    spin_ms(ms);
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
}

/// Heartbeats, as a long download would send them.
void beat_ms(int64_t ms) {
  for (const lockstep::Deadline deadline{std::chrono::milliseconds(ms)}; !deadline.passed(); sleep_ms(50))
    lockstep::own_page().heartbeat();
}

void await_leave(int rank) {
  const auto& board = *lockstep::launchers_board();
  while (board.page(rank).read(board.world_size()).phase != RankStatus::Phase::kLeft) sleep_ms(5);
}

void act(const std::string& word, int64_t number) {
  auto& page = lockstep::own_page();
  if (word == "joining") page.set_phase(RankStatus::Phase::kJoining);
  if (word == "join") page.set_phase(RankStatus::Phase::kJoined);
  if (word == "communicate") page.communicates();
  if (word == "leave") page.set_phase(RankStatus::Phase::kLeft);
  if (word == "start") {
    const int64_t shape[] = {64, 10};
    page.start_operation(static_cast<uint64_t>(number), "all_reduce", "Float", 640, shape, 2, Clock::now(), purpose);
  }
  if (word == "of_a_bucket") purpose = "bucket 1 of 2 (out.bias to out.weight)";
  if (word == "leave_a_child") leave_a_child(number);
  if (word == "finish") page.finish_operation(static_cast<uint64_t>(number));
  if (word == "wait_for") page.set_waits_for(uint64_t{1} << number);
  if (word == "waiting") page.set_waiting(number != 0);
  if (word == "timeout_ms") page.set_collective_timeout(std::chrono::milliseconds(number));
  if (word == "spin") spin_ms(number);
  if (word == "let_a_child_spin") let_a_child_spin(number);
  if (word == "await_leave") await_leave(static_cast<int>(number));
  if (word == "beat") beat_ms(number);
  if (word == "give_up_on") page.fail(RankFailure::kMissing, static_cast<int>(number), "rank 0 gave up waiting");
  if (word == "terminate") std::terminate();
  if (word == "step") page.count_step();
  if (word == "checkpoint") page.note_checkpoint("/run/step.pt", number, Clock::now());
  if (word == "memory") page.note_memory_checkpoint(number);
  if (word == "victim_of") page.fail(RankFailure::kPeer, static_cast<int>(number), "a peer is gone");
  if (word == "sleep") sleep_ms(number);
  if (word == "say") note("at " + std::to_string(number));
  if (word == "exit") std::_Exit(static_cast<int>(number));
  if (word == "raise") ::raise(static_cast<int>(number));
  if (word == "ignore_term") ::signal(SIGTERM, SIG_IGN);
  if (word == "train") train(true);
  if (word == "train_unsaved") train(false);
  if (word == "refuse") throw lockstep::RefusedInput("the file is damaged");
  if (word == "refuse_and_catch") try {
      throw lockstep::RefusedInput("the file is damaged");
    } catch (const lockstep::Error&) {
    }
  if (word == "throw") throw std::runtime_error("the words of the exception");
}

}  // namespace

int main(int, char** argv) {
  const auto environment = lockstep::Environment::from_process();
  const std::string rank = environment.rank.value_or("0") + ":";
  const bool first = environment.torchelastic_restart_count.value_or("0") == "0";
  lockstep::note_uncaught_exceptions();
  for (char** argument = argv + 1; *argument != nullptr; ++argument) {
    std::string word = *argument;
    if (std::isdigit(static_cast<unsigned char>(word[0])) != 0) {
      if (!word.starts_with(rank)) continue;
      word.erase(0, rank.size());
    }
    if (word.starts_with("first:")) {
      if (!first) continue;
      word.erase(0, std::strlen("first:"));
    }
    const size_t equals = word.find('=');
    act(word.substr(0, equals), equals == std::string::npos ? 0 : std::stoll(word.substr(equals + 1)));
  }
}
