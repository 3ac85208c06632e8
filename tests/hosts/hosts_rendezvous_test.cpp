#include <gtest/gtest.h>
#include <poll.h>

#include <tuple>

#include "base/version.h"
#include "hosts/channel.h"
#include "hosts/hosts_launched.h"
#include "hosts/workplace.h"

// Machines on each of which a user, or Slurm, starts `lockstep run`.

namespace lockstep::hosts {
namespace {

using Words = std::vector<std::string>;

Launched::Options machine(const std::string& name) { return {.environment = {"LOCKSTEP_MACHINE=" + name}}; }

TEST(HostsRendezvous, MachinesThatAreStartedOneByOneMeet) {
  for (const int nodes : {2, 3}) {
    const Rendezvous rendezvous;
    std::vector<std::unique_ptr<Launched>> runs;
    for (int node = nodes - 1; node >= 0; --node)
      runs.push_back(std::make_unique<Launched>(
          rendezvous.options(nodes, node,
                             {"-n", std::to_string(1 + node % 2), "--tee", "all", "sh", "-c",
                              "sleep 0.2; echo $RANK/$WORLD_SIZE $LOCAL_RANK $LOCKSTEP_MACHINE"}),
          machine("m" + std::to_string(node))));
    const auto result = runs.back()->wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_TRUE(contains(result.out, nodes == 2 ? "[2] 2/3 1 m1\n" : "[3] 3/4 0 m2\n")) << result.out << result.err;
    for (auto& run : runs)
      if (run != runs.back()) {
        EXPECT_EQ(run->wait().exit_code, 0);
        EXPECT_TRUE(nothing_left(*run));
      }
  }
}

TEST(HostsRendezvous, AllMachinesEndWithTheRunsExitCode) {
  const Rendezvous rendezvous;
  const Words command = {"sh", "-c", "[ $RANK = 1 ] && exit 3; exec sleep 60"};
  Launched second(rendezvous.options(2, 1, command)), first(rendezvous.options(2, 0, command));
  const auto result = first.wait();
  EXPECT_EQ(result.exit_code, 40);
  EXPECT_TRUE(contains(result.err, "rank 1 of 2 failed first: exit code 3")) << result.err;
  const auto other = second.wait();
  EXPECT_EQ(other.exit_code, 40);
  EXPECT_TRUE(
      contains(other.err, "the run has ended with exit code 40; see the output of its coordinator for the reason"));
}

TEST(HostsRendezvous, AMachineWithoutItsCoordinatorEndsItsRanks) {
  const Rendezvous rendezvous;
  const Words command = {"sh", "-c", "echo up; exec sleep 60"};
  Launched second(rendezvous.options(2, 1, command)), first(rendezvous.options(2, 0, command));
  ASSERT_TRUE(first.wait_for("up"));
  ASSERT_TRUE(eventually([&] { return second.processes().size() >= 3; }));
  ::kill(first.pid(), SIGKILL);
  const auto other = second.wait();
  EXPECT_EQ(other.exit_code, 52);
  EXPECT_TRUE(contains(other.err, "has lost the coordinator")) << other.err;
  EXPECT_TRUE(nothing_left(second));
}

TEST(HostsRendezvous, SlurmsVariablesAreEnough) {
  const Rendezvous rendezvous;
  const auto slurm = [&](const std::string& node) {
    return Launched::Options{.environment = {"SLURM_JOB_ID=" + std::to_string(::getpid()), "SLURM_STEP_ID=0",
                                             "SLURM_STEP_NUM_NODES=2", "SLURM_STEP_NUM_TASKS=2", "SLURM_NODEID=" + node,
                                             "SLURM_STEP_NODELIST=127.0.0.[1-2]", "LOCKSTEP_MACHINE=m" + node,
                                             "LOCKSTEP_KEY_FILE=" + rendezvous.key_file}};
  };
  const Words command = {"-n", "1", LOCKSTEP_BIN_DIR "/store_rank"};
  Launched second(command, slurm("1")), first(command, slurm("0"));
  const auto result = first.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "3\n");
  EXPECT_EQ(second.wait().exit_code, 0);
  Launched many({"-n", "1", "true"},
                {.environment = {"SLURM_STEP_ID=0", "SLURM_STEP_NUM_NODES=2", "SLURM_STEP_NUM_TASKS=4"}});
  const auto refused = many.wait();
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_TRUE(contains(refused.err, "Slurm has started this command 4 times on 2 machines; start it once on each"))
      << refused.err;
}

struct Wrong {
  Words first, second;  ///< options of the two machines, instead of the right ones
  int code;
  std::string text;
};

TEST(HostsRendezvous, WrongSetupsAreNamed) {
  const Rendezvous right, other;
  const auto with = [&](Words words, const std::string& name, const std::string& value) {
    *(std::find(words.begin(), words.end(), name) + 1) = value;
    return words;
  };
  const Words first = right.options(2, 0, {"true"}), second = right.options(2, 1, {"true"});
  Words without_key = second;
  const auto option = std::find(without_key.begin(), without_key.end(), "--key-file");
  without_key.erase(option, option + 2);
  const std::vector<Wrong> cases = {
      {first, without_key, 47, "there is no key: give the same --key-file (or LOCKSTEP_KEY_FILE) on all machines"},
      {first, with(second, "--key-file", other.key_file), 47, "does not have this machine's key"},
      {first, with(second, "--key-file", "/nowhere"), 47, "the key file /nowhere cannot be read"},
      {first, with(second, "--nnodes", "3"), 46, "it was started with --nnodes 3, and the coordinator with 2"},
      {first, right.options(2, 1, {"false"}), 46, "it was started with another command: false there, true here"},
      {first, with(second, "--node-rank", "0"), 46, "the port is taken by another program, or by another run"},
  };
  for (const Wrong& wrong : cases) {
    Launched coordinator(wrong.first, {.environment = {"LOCKSTEP_JOIN_TIMEOUT_S=20"}});
    ASSERT_TRUE(eventually([&] { return !agents_of(coordinator).empty(); }));
    Launched agent(wrong.second);
    const auto result = agent.wait();
    EXPECT_EQ(result.exit_code, wrong.code) << result.err;
    EXPECT_TRUE(contains(result.err, wrong.text)) << result.err;
    // The coordinator still waits for the right one.
    Launched good(second);
    EXPECT_EQ(good.wait().exit_code, 0) << wrong.text;
    EXPECT_EQ(coordinator.wait().exit_code, 0) << wrong.text;
  }
}

/// An agent that says what the test wants: of another version, or on another kind of machine.
class PlayedAgent {
 public:
  explicit PlayedAgent(const Rendezvous& rendezvous) : tls_(Key::from_file(rendezvous.key_file), Side::kAgent) {
    const Deadline deadline(std::chrono::seconds(10));
    std::string why;
    FileDescriptor socket;
    while (!(socket = connect_to(parse_endpoint("test", rendezvous.place), deadline, why)) && !deadline.passed())
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    channel_ = std::make_unique<Channel>(std::move(socket), tls_);
  }

  template <typename Message>
  void send(Kind kind, const Message& message) {
    while (channel_->state() == Channel::State::kHandshake && !deadline_.passed()) turn();
    channel_->send(kind, message);
  }
  /// The body of the next message of this kind; others are passed over.
  template <typename Message>
  Message await(Kind kind) {
    while (!deadline_.passed()) {
      while (const auto message = channel_->next(kMaxFrameBytes))
        if (message->kind == kind) return decode<Message>(message->body);
      channel_->beat(Clock::now());
      turn();
    }
    ADD_FAILURE() << "no message of kind " << static_cast<int>(kind) << ": " << channel_->reason();
    return {};
  }

 private:
  void turn() {
    pollfd polled{.fd = channel_->fd(), .events = channel_->events(), .revents = 0};
    ::poll(&polled, 1, 20);
    channel_->act();
  }

  const Tls tls_;
  const Deadline deadline_{std::chrono::seconds(10)};
  std::unique_ptr<Channel> channel_;
};

TEST(HostsRendezvous, AnotherVersionIsNamedOnBothSides) {
  for (const auto& [protocol, version] : {std::pair{kProtocol, "9.8.7"}, {kProtocol + 1, "9.8.7"}}) {
    const Rendezvous rendezvous;
    Launched first(rendezvous.options(2, 0, {"true"}));
    PlayedAgent agent(rendezvous);
    agent.send(Kind::kHello, Hello{.protocol = protocol, .version = version, .node = 1, .nodes = 2, .host = "node2"});
    const Over over = agent.await<Over>(Kind::kOver);
    EXPECT_EQ(over.exit_code, 46);
    EXPECT_TRUE(contains(over.text, "this machine cannot take part: it runs Lockstep 9.8.7, and the coordinator "))
        << over.text;
    EXPECT_TRUE(contains(over.text, "; install the same version on all machines")) << over.text;
    EXPECT_TRUE(first.wait_for("lockstep: node2 (127.0.0.1) cannot take part: it runs Lockstep 9.8.7")) << "and waits";
    Launched second(rendezvous.options(2, 1, {"true"}));
    EXPECT_EQ(second.wait().exit_code, 0);
    EXPECT_EQ(first.wait().exit_code, 0);
  }
}

TEST(HostsRendezvous, AnotherProcessorIsAWarning) {
  const Rendezvous rendezvous;
  Launched first(rendezvous.options(2, 0, {"true"}));
  PlayedAgent agent(rendezvous);
  agent.send(
      Kind::kHello,
      Hello{.version = library_version(), .node = 1, .nodes = 2, .slots = 1, .host = "node2", .command = "true"});
  const Prepare plan = agent.await<Prepare>(Kind::kPrepare);
  EXPECT_EQ(plan.command, Words{"true"});
  const std::string hash = program_hash("/usr/bin/true", plan.command);
  agent.send(Kind::kReady, Ready{.address = "127.0.0.1", .program_hash = hash, .processor = "Another CPU @ 1 GHz"});
  EXPECT_TRUE(first.wait_for("lockstep: node2 has another processor than node 0: results may differ in the last bits"));
  EXPECT_EQ(agent.await<Start>(Kind::kStart).first_rank, 1) << "and the run begins";
}

TEST(HostsLate, AMachineThatComesAMinuteLateIsWaitedFor) {
  const Rendezvous rendezvous[2];  // at the first machine 1 is late, at the second machine 0
  const auto start = [&](int late, int node) {
    return std::make_unique<Launched>(rendezvous[1 - late].options(2, node, {"true"}));
  };
  const auto coordinator = start(1, 0), agent = start(0, 1);
  std::this_thread::sleep_for(std::chrono::seconds(60));
  for (const int late : {1, 0}) {
    const auto other = start(late, late);
    const auto result = (late == 1 ? coordinator : agent)->wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(other->wait().exit_code, 0);
    const std::string note = late == 1 ? "lockstep: waits for node 1 of 2 machines\n"
                                       : "lockstep: waits for the coordinator at " + rendezvous[1].place;
    EXPECT_GE(counted(result.err, note), 11) << result.err;
  }
}

TEST(HostsRendezvous, AMachineWithAnotherProgramOrScriptIsRefused) {
  const auto makes = [](const std::string& file, const std::string& text) {
    return Launched::Options{.before = "printf '#!/bin/sh\\n" + text + "\\n' > " + file + "; chmod +x " + file};
  };
  for (const auto& [command, file, named] : {std::tuple{Words{"./train"}, "train", "./train"},
                                             {Words{"sh", "-e", "train.sh", "x.sh"}, "train.sh", "sh or train.sh"}}) {
    const Rendezvous rendezvous;
    Launched second(rendezvous.options(2, 1, command), makes(file, "exit 0")),
        first(rendezvous.options(2, 0, command), makes(file, "exit  0"));
    const auto result = first.wait();
    EXPECT_EQ(result.exit_code, 46);
    EXPECT_TRUE(contains(result.err, std::string(" has another ") + named + " than node 0 (SHA-256 ")) << result.err;
    EXPECT_EQ(second.wait().exit_code, 46);
  }
}

TEST(HostsRendezvous, StatusIsTheCoordinatorsAndStacksSayWhatToRunOnTheOtherMachine) {
  const Rendezvous rendezvous;
  const Words command = {kPageRank, "join", "start=12", "sleep=60000"};
  Launched first(rendezvous.options(2, 0, command)), second(rendezvous.options(2, 1, command), machine("m1"));
  std::string status;
  ASSERT_TRUE(eventually([&] {
    status = ask("status", first);
    return contains(status, " on node 0  step 0, in all_reduce #12") && counted(status, "in all_reduce #12") == 2;
  })) << status;
  const std::string stacks = ask("stacks", first);
  const size_t other = stacks.find("=== rank 1, process ");
  ASSERT_NE(other, std::string::npos) << stacks;
  const std::string pid = std::to_string(std::stoi(stacks.substr(other + 20)));
  const std::string mark = "to see them, run on that machine: ";
  const size_t at = stacks.find(mark, other);
  ASSERT_NE(at, std::string::npos) << stacks;
  const std::string line = stacks.substr(at + mark.size(), stacks.find('\n', at) - at - mark.size());
  EXPECT_TRUE(line.ends_with("/lockstep agent --stacks " + pid)) << line;
  const std::string seen = output_of(line + " 2>&1");
  if (contains(seen, "neither gdb nor eu-stack")) GTEST_SKIP() << "SKIPPED BECAUSE no program here prints stacks";
  EXPECT_TRUE(contains(seen, "nanosleep")) << seen;
}

TEST(HostsRendezvous, AMachineThatComesTwiceOrTooLateIsToldWhy) {
  const Rendezvous rendezvous;
  const Words command = {"sh", "-c", "echo up; exec sleep 60"};
  Launched first(rendezvous.options(2, 0, command)), second(rendezvous.options(2, 1, command));
  ASSERT_TRUE(first.wait_for("up"));
  Launched again(rendezvous.options(2, 1, command));
  const auto result = again.wait();
  EXPECT_EQ(result.exit_code, 46);
  EXPECT_TRUE(contains(result.err, "already has a node 1")) << result.err;
  ::kill(first.pid(), SIGINT);
  EXPECT_EQ(first.wait().exit_code, 130);
  EXPECT_EQ(second.wait().exit_code, 130);
}

TEST(HostsRendezvous, AMachineThatDoesNotComeIsNamed) {
  const Rendezvous rendezvous;
  const Launched::Options hurry{.environment = {"LOCKSTEP_JOIN_TIMEOUT_S=1"}};
  Launched first(rendezvous.options(2, 0, {"true"}), hurry);
  const auto result = first.wait();
  EXPECT_EQ(result.exit_code, 46);
  EXPECT_TRUE(contains(result.err, "node 1 of 2 machines did not arrive within 1 s")) << result.err;
  Launched second(rendezvous.options(2, 1, {"true"}), hurry);
  const auto other = second.wait();
  EXPECT_EQ(other.exit_code, 46);
  EXPECT_TRUE(contains(other.err, "could not be reached within 1 s: Connection refused")) << other.err;
}

}  // namespace
}  // namespace lockstep::hosts
