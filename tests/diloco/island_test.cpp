// One machine of `lockstep run --islands`, whose agent is played by a thread of the test.

#include <cstdlib>
#include <thread>

#include "base/hub_frame.h"
#include "base/socket.h"
#include "diloco/hub_client.h"
#include "diloco/training.h"
#include "rank_page/rank_board.h"
#include "support/heard_warnings.h"

namespace lockstep::diloco_test {
namespace {

using namespace lockstep::testing;  // NOLINT
using diloco::HubClient;
using hub::Kind;

constexpr std::chrono::seconds kSoon(20);

/// The agent of machine 1 of 2.
class PlayedAgent {
 public:
  struct Frame {
    Kind kind;
    std::string body;
  };

  std::string place() const { return "1/2@" + listener_.name; }
  diloco::HubPlace hub_place() const { return {.island = 1, .islands = 2, .agent = listener_.name}; }
  void accept() {
    for (const Deadline deadline(kSoon); !rank_ && !deadline.passed();)
      rank_ = accept_same_user(listener_.socket.get());
    ASSERT_TRUE(rank_);
  }
  Frame receive() {
    char head[hub::kHeadBytes];
    receive_all(rank_.get(), head, sizeof head, Deadline(kSoon));
    std::string_view rest(head, sizeof head);
    const auto size = hub::take<uint32_t>(rest);
    Frame frame{hub::take<Kind>(rest), std::string(size, '\0')};
    receive_all(rank_.get(), frame.body.data(), size, Deadline(kSoon));
    return frame;
  }
  void send(Kind kind, const std::string& body = {}) {
    const std::string frame = hub::frame(kind, body);
    send_all(rank_.get(), frame.data(), frame.size(), Deadline(kSoon));
  }
  static std::string empty_round(int64_t number) {
    std::string body;
    hub::put(body, number);
    hub::put(body, static_cast<int32_t>(-1));
    hub::put(body, static_cast<int32_t>(0));
    return body;
  }

 private:
  const UnixListener listener_ = listen_unix();
  FileDescriptor rank_;
};

/// A client that has joined, and gives the first state.
void join_as_first(PlayedAgent& agent, HubClient& client) {
  std::thread played([&] {
    agent.accept();
    EXPECT_EQ(agent.receive().kind, Kind::kJoin);
    agent.send(Kind::kGive);
  });
  EXPECT_EQ(client.join(0, "sync_every 4\n").kind, Kind::kGive);
  played.join();
}

TEST(HubClient, TheFirstStateArrivesBeforeTheContributionThatFollowsAtOnce) {
  for (int i = 0; i < 30; ++i) {
    PlayedAgent agent;
    HubClient client(agent.hub_place());
    join_as_first(agent, client);
    std::thread played([&] {
      EXPECT_EQ(agent.receive().kind, Kind::kState);
      EXPECT_EQ(agent.receive().kind, Kind::kContribute);
      agent.send(Kind::kResult, PlayedAgent::empty_round(1));
    });
    client.give(std::string(1 << 16, 's'));
    std::deque<std::string> come;
    EXPECT_EQ(client.contribute(1, "numbers", come), HubClient::Sent::kYes);
    EXPECT_TRUE(client.results_until(1, come));
    EXPECT_EQ(come, std::deque<std::string>{PlayedAgent::empty_round(1)});
    played.join();
  }
}

TEST(HubClient, ItsStateArrivesBeforeItLeaves) {
  for (int i = 0; i < 30; ++i) {
    PlayedAgent agent;
    HubClient client(agent.hub_place());
    join_as_first(agent, client);
    client.give(std::string(1 << 16, 's'));
    client.leave();
    EXPECT_EQ(agent.receive().kind, Kind::kState);
    EXPECT_EQ(agent.receive().kind, Kind::kLeave);
  }
}

TEST(HubClient, OneThatHasMissedRoundsSaysThatItIsThere) {
  PlayedAgent agent;
  HubClient client(agent.hub_place());
  join_as_first(agent, client);
  agent.send(Kind::kResult, PlayedAgent::empty_round(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  std::deque<std::string> missed;
  EXPECT_EQ(client.contribute(1, "numbers", missed), HubClient::Sent::kLate);
  EXPECT_EQ(missed, std::deque<std::string>{PlayedAgent::empty_round(1)});
  EXPECT_EQ(agent.receive().kind, Kind::kLate);
}

TEST(HubClient, ItSendsTheNextRoundWhileTheLastIsUnderWay) {
  PlayedAgent agent;
  HubClient client(agent.hub_place());
  join_as_first(agent, client);
  std::deque<std::string> come;
  EXPECT_EQ(client.contribute(1, "one", come), HubClient::Sent::kYes);
  EXPECT_EQ(client.contribute(2, "two", come), HubClient::Sent::kYes);
  EXPECT_EQ(agent.receive().body, "one");
  EXPECT_EQ(agent.receive().body, "two");
  agent.send(Kind::kResult, PlayedAgent::empty_round(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_EQ(client.contribute(3, "three", come), HubClient::Sent::kYes) << "round 1 has its contribution";
  EXPECT_EQ(come.size(), 1u);
  agent.send(Kind::kResult, PlayedAgent::empty_round(2));
  agent.send(Kind::kResult, PlayedAgent::empty_round(3));
  come.clear();
  EXPECT_TRUE(client.results_until(3, come));
  EXPECT_EQ(come.size(), 2u);
}

TEST(HubClient, AWaitForTheOthersHasAnEnd) {
  run_ranks(1, [](Context&) {
    own_page().set_collective_timeout(std::chrono::seconds(1));
    PlayedAgent agent;
    HubClient client(agent.hub_place());
    join_as_first(agent, client);
    try {
      std::deque<std::string> come;
      client.contribute(1, "numbers", come);
      client.results_until(1, come);
      ADD_FAILURE() << "it does not wait";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("the result of a round has not come"), std::string::npos)
          << error.what();
    }
  });
}

struct FewImpl : torch::nn::Module {
  at::Tensor numbers = register_parameter("numbers", torch::ones({3}));
  at::Tensor scale = register_parameter("scale", torch::ones({3}));
};
TORCH_MODULE(Few);

/// What a DiLoCo of machine 1 throws, and what its agent hears.
struct Heard {
  std::string thrown, lines, problem, warned;
};
template <typename Use>
Heard on_machine_1(Context& context, const DiLoCoOptions& options, int rounds, const Use& use) {
  PlayedAgent agent;
  ::setenv("LOCKSTEP_ISLAND", agent.place().c_str(), 1);
  Heard heard;
  std::thread played([&] {
    if (context.rank() != 0) return;
    agent.accept();
    heard.lines = agent.receive().body.substr(2 * sizeof(int64_t));
    agent.send(Kind::kGive);
    try {
      for (int64_t round = 1;;) {
        const auto frame = agent.receive();
        if (frame.kind == Kind::kProblem) heard.problem = frame.body;
        if (frame.kind == Kind::kContribute && round <= rounds)
          agent.send(Kind::kResult, PlayedAgent::empty_round(round++));
      }
    } catch (const Error&) {  // it has gone
    }
  });
  const testing::HeardWarnings warnings;
  {
    Few net;
    DistributedDataParallel model(net, context);
    try {
      DiLoCo diloco(model, context, options);
      for (int step = 0; step < 6; ++step) {
        use(net, step);
        diloco.step();
      }
    } catch (const Error& error) {
      heard.thrown = error.what();
    }
  }
  played.join();
  heard.warned = warnings.text();
  return heard;
}

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(Island, ItTellsAllOptionsAndTheModel) {
  run_ranks(1, [](Context& context) {
    const DiLoCoOptions options{.sync_every = 4, .outer_optimizer = [](const std::vector<at::Tensor>& parameters) {
                                  return std::make_unique<torch::optim::Adam>(parameters,
                                                                              torch::optim::AdamOptions(0.125));
                                }};
    const std::string lines = on_machine_1(context, options, 9, [](Few&, int) {}).lines;
    for (const char* const part :
         {"sync_every 4\n", "max_nonfinite_rounds 3\n", "0.125", "ranks 1\n", "parameter numbers Float [3]\n"})
      expect_part(lines, part);
  });
}

TEST(Island, ErrorsNameItsNumberAndReachTheOtherMachines) {
  for (const int ranks : {1, 2})
    run_ranks(ranks, [](Context& context) {
      const Heard heard = on_machine_1(context, {.sync_every = 4}, 9, [](Few& net, int step) {
        if (step == 2) net->numbers.requires_grad_(false);
      });
      expect_part(heard.thrown, context.world_size() == 1 ? "parameter numbers of machine 1 (rank 0) was frozen"
                                                          : "parameter numbers of machine 1 (ranks 0, 1) was frozen");
      if (context.rank() == 0) expect_part(heard.problem, heard.thrown);
    });
}

TEST(Island, OneThatDoesNotFinishWarns) {
  run_ranks(1, [](Context& context) {
    expect_part(on_machine_1(context, {.sync_every = 4, .max_nonfinite_rounds = 9}, 9, [](Few&, int) {}).warned,
                "DiLoCo: destroyed");
  });
}

}  // namespace
}  // namespace lockstep::diloco_test
