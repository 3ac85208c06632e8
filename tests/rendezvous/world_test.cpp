#include "rendezvous/world.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "base/error.h"

namespace lockstep {
namespace {

using Source = World::Source;

// What each launcher sets for rank 3 of 4, the second of two ranks on its machine.

Environment of_torchrun() {
  return {.rank = "3",
          .world_size = "4",
          .local_rank = "1",
          .local_world_size = "2",
          .master_addr = "host0",
          .master_port = "29500"};
}
Environment of_lockstep() {
  return {.lockstep_store_fd = "5", .rank = "1", .world_size = "2", .local_rank = "1", .local_world_size = "2"};
}
Environment of_open_mpi() {
  return {.master_addr = "host0",
          .master_port = "29500",
          .ompi_comm_world_rank = "3",
          .ompi_comm_world_size = "4",
          .ompi_comm_world_local_rank = "1",
          .ompi_comm_world_local_size = "2"};
}
Environment of_mpich() {
  return {.master_addr = "host0",
          .master_port = "29500",
          .pmi_rank = "3",
          .pmi_size = "4",
          .mpi_localrankid = "1",
          .mpi_localnranks = "2"};
}
Environment of_slurm() {
  return {.master_addr = "host0",
          .master_port = "29500",
          .slurm_step_id = "0",
          .slurm_procid = "3",
          .slurm_step_num_tasks = "4",
          .slurm_localid = "1",
          .slurm_step_num_nodes = "2"};
}

Environment with(Environment environment, const std::function<void(Environment&)>& change) {
  change(environment);
  return environment;
}

/// The message of the error, or "" if there is none.
std::string failure(const Environment& environment) {
  try {
    discover_world(environment);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void expect_failure(const Environment& environment, const std::vector<std::string>& parts) {
  const std::string text = failure(environment);
  for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << "\nis not in\n" << text;
}

TEST(DiscoverWorld, NothingIsAWorldOfOne) {
  const World world = discover_world({});
  EXPECT_EQ(world.source, Source::kAlone);
  EXPECT_EQ(world.rank, 0);
  EXPECT_EQ(world.world_size, 1);
  EXPECT_TRUE(world.one_machine());
}

TEST(DiscoverWorld, WhatBelongsToNoRankDoesNotMakeAWorld) {
  // An address alone, a batch script of Slurm's outside a step, Hydra's local numbers.
  EXPECT_EQ(discover_world({.master_addr = "host0", .master_port = "1"}).source, Source::kAlone);
  EXPECT_EQ(discover_world({.slurm_procid = "0", .slurm_step_num_tasks = "4", .slurm_localid = "0"}).source,
            Source::kAlone);
  EXPECT_EQ(discover_world({.mpi_localrankid = "0", .mpi_localnranks = "2"}).source, Source::kAlone);
  EXPECT_EQ(discover_world({.local_rank = "0", .local_world_size = "2"}).source, Source::kAlone);
}

TEST(DiscoverWorld, LockstepRun) {
  const World world = discover_world(of_lockstep());
  EXPECT_EQ(world.source, Source::kLauncher);
  EXPECT_EQ(world.rank, 1);
  EXPECT_EQ(world.world_size, 2);
  EXPECT_EQ(world.local_rank, 1);
  EXPECT_EQ(world.local_world_size, 2);
  EXPECT_EQ(world.store_fd, 5);
  EXPECT_TRUE(world.one_machine());
}

TEST(DiscoverWorld, EveryOtherLauncher) {
  struct Case {
    Source source;
    Environment environment;
    const char* rank_variable;
    bool knows_local_size = true;
  };
  for (const auto& c :
       {Case{Source::kTorchrun, of_torchrun(), "RANK"}, Case{Source::kOpenMpi, of_open_mpi(), "OMPI_COMM_WORLD_RANK"},
        Case{Source::kMpich, of_mpich(), "PMI_RANK"}, Case{Source::kSlurm, of_slurm(), "SLURM_PROCID", false}}) {
    SCOPED_TRACE(name_of(c.source));
    const World world = discover_world(c.environment);
    EXPECT_EQ(world.source, c.source);
    EXPECT_EQ(world.rank, 3);
    EXPECT_EQ(world.world_size, 4);
    EXPECT_EQ(world.local_rank, 1);
    EXPECT_EQ(world.local_world_size, c.knows_local_size ? std::optional(2) : std::nullopt);
    EXPECT_EQ(world.master_addr, "host0");
    EXPECT_EQ(world.master_port, 29500);
    EXPECT_EQ(world.rank_variable, c.rank_variable);
    EXPECT_FALSE(world.store_is_hosted);
    EXPECT_FALSE(world.one_machine());
  }
}

TEST(DiscoverWorld, OneMachineOfMpiOrSlurmNeedsNoAddress) {
  for (Environment environment : {of_open_mpi(), of_mpich(), of_slurm()}) {
    environment.master_addr.reset();
    environment.master_port.reset();
    environment.ompi_comm_world_local_size = environment.mpi_localnranks = "4";
    environment.slurm_step_num_nodes = "1";
    const World world = discover_world(environment);
    EXPECT_TRUE(world.one_machine());
    EXPECT_EQ(world.local_world_size, 4);
    EXPECT_EQ(world.master_addr, "");
  }
}

TEST(DiscoverWorld, AWorldOfOneOfTorchrunNeedsNoAddress) {
  const World world = discover_world({.rank = "0", .world_size = "1"});
  EXPECT_EQ(world.source, Source::kTorchrun);
  EXPECT_EQ(world.master_port, 0);
}

TEST(DiscoverWorld, TorchrunsAgentMayServeTheStore) {
  const World world = discover_world(with(of_torchrun(), [](Environment& e) {
    e.torchelastic_use_agent_store = "True";
    e.torchelastic_run_id = "job7";
  }));
  EXPECT_TRUE(world.store_is_hosted);
  EXPECT_EQ(world.job, "job7");
  EXPECT_FALSE(discover_world(with(of_torchrun(), [](Environment& e) {
                 e.torchelastic_use_agent_store = "False";
               })).store_is_hosted);
}

TEST(DiscoverWorld, TheInnermostLauncherDecides) {
  // `srun lockstep run`, `mpirun torchrun`: all variables are there at once.
  Environment all = of_slurm();
  const auto add = [&all](const Environment& more, auto... members) { ((all.*members = more.*members), ...); };
  using E = Environment;
  EXPECT_EQ(discover_world(all).source, Source::kSlurm);
  add(of_mpich(), &E::pmi_rank, &E::pmi_size, &E::mpi_localrankid, &E::mpi_localnranks);
  EXPECT_EQ(discover_world(all).source, Source::kMpich);
  add(of_open_mpi(), &E::ompi_comm_world_rank, &E::ompi_comm_world_size, &E::ompi_comm_world_local_rank,
      &E::ompi_comm_world_local_size);
  EXPECT_EQ(discover_world(all).source, Source::kOpenMpi);
  add(of_torchrun(), &E::rank, &E::world_size, &E::local_rank, &E::local_world_size);
  EXPECT_EQ(discover_world(all).source, Source::kTorchrun);
  add(of_lockstep(), &E::lockstep_store_fd, &E::rank, &E::world_size, &E::local_rank, &E::local_world_size);
  EXPECT_EQ(discover_world(all).source, Source::kLauncher);
}

// Slurm's pmi2 plug-in sets PMI_RANK and PMI_SIZE, so such ranks were taken for MPICH's: on one machine, but asked for
// MASTER_ADDR.
TEST(DiscoverWorld, SlurmsOwnPmiVariablesAreNotMpichs) {
  const Environment pmi2 = with(of_slurm(), [](Environment& e) {
    e.master_addr = e.master_port = std::nullopt;
    e.slurm_step_num_nodes = "1";
    e.pmi_rank = "3";
    e.pmi_size = "4";
  });
  const World world = discover_world(pmi2);
  EXPECT_EQ(world.source, Source::kSlurm);
  EXPECT_EQ(world.rank_variable, "SLURM_PROCID");
  EXPECT_EQ(world.local_rank, 1);
  EXPECT_EQ(world.local_world_size, 4);
  // Hydra inside a step: numbers of its own, or its local ones beside them.
  const auto hydra = [&](const std::function<void(Environment&)>& change) {
    return discover_world(with(with(pmi2, change),
                               [](Environment& e) {
                                 e.master_addr = "host0";
                                 e.master_port = "29500";
                               }))
        .source;
  };
  EXPECT_EQ(hydra([](Environment& e) { e.pmi_rank = "2"; }), Source::kMpich);
  EXPECT_EQ(hydra([](Environment& e) { e.pmi_size = "8"; }), Source::kMpich);
  EXPECT_EQ(hydra([](Environment& e) {
              e.mpi_localrankid = "1";
              e.mpi_localnranks = "2";
            }),
            Source::kMpich);
}

TEST(DiscoverWorld, HalfOfAPairIsNeverAWorldOfOne) {
  expect_failure({.rank = "0"}, {"WORLD_SIZE is not set although RANK is", "unset RANK to run as a world of one"});
  expect_failure({.world_size = "2"}, {"RANK is not set although WORLD_SIZE is", "unset WORLD_SIZE"});
  expect_failure({.ompi_comm_world_rank = "0"}, {"OMPI_COMM_WORLD_SIZE is not set although OMPI_COMM_WORLD_RANK is"});
  expect_failure({.ompi_comm_world_size = "1"}, {"OMPI_COMM_WORLD_RANK is not set although OMPI_COMM_WORLD_SIZE is"});
  expect_failure({.pmi_rank = "0"}, {"PMI_SIZE is not set although PMI_RANK is"});
  expect_failure({.pmi_size = "1"}, {"PMI_RANK is not set although PMI_SIZE is"});
  expect_failure({.slurm_step_id = "0", .slurm_procid = "0"},
                 {"SLURM_STEP_NUM_TASKS is not set although SLURM_PROCID is"});
  expect_failure({.lockstep_store_fd = "5"},
                 {"RANK and WORLD_SIZE are not set although LOCKSTEP_STORE_FD=5 is", "`lockstep run`"});
  expect_failure({.lockstep_store_fd = "5", .rank = "0"}, {"WORLD_SIZE is not set although RANK is"});
}

TEST(DiscoverWorld, TheLauncherMayHaveRanksOnOtherMachines) {
  EXPECT_TRUE(discover_world(of_lockstep()).one_machine());
  const World world = discover_world(with(of_lockstep(), [](Environment& e) {
    e.world_size = "4";
    e.lockstep_address = "10.0.0.1";
  }));
  EXPECT_FALSE(world.one_machine());
  EXPECT_EQ(world.address, "10.0.0.1");
}

TEST(DiscoverWorld, NumbersAreNumbers) {
  for (const char* value : {"abc", "2x", " 2", "+2", "2.0", "0x2", "-1", "0", "99999999999999999999", "1048577"})
    expect_failure(
        with(of_torchrun(), [&](Environment& e) { e.world_size = value; }),
        {std::string("WORLD_SIZE=") + value + " is not a whole number from 1 to 1048576", "the launcher sets it"});
  expect_failure(with(of_torchrun(), [](Environment& e) { e.rank = "-1"; }), {"RANK=-1 is not a whole number from 0"});
  expect_failure(with(of_torchrun(), [](Environment& e) { e.local_rank = "x"; }), {"LOCAL_RANK=x is not"});
  expect_failure(with(of_torchrun(), [](Environment& e) { e.local_world_size = "0"; }), {"LOCAL_WORLD_SIZE=0 is not"});
  expect_failure(with(of_lockstep(), [](Environment& e) { e.lockstep_store_fd = "-1"; }),
                 {"LOCKSTEP_STORE_FD=-1 is not"});
  expect_failure(with(of_open_mpi(), [](Environment& e) { e.ompi_comm_world_size = "x"; }),
                 {"OMPI_COMM_WORLD_SIZE=x is not"});
  expect_failure(with(of_mpich(), [](Environment& e) { e.pmi_rank = "x"; }), {"PMI_RANK=x is not"});
  expect_failure(with(of_slurm(), [](Environment& e) { e.slurm_localid = "x"; }), {"SLURM_LOCALID=x is not"});
}

TEST(DiscoverWorld, NumbersThatContradictEachOther) {
  expect_failure(with(of_torchrun(), [](Environment& e) { e.rank = "4"; }),
                 {"RANK=4 contradicts WORLD_SIZE=4", "ranks count from 0 to size - 1"});
  expect_failure(with(of_torchrun(), [](Environment& e) { e.local_world_size = "5"; }),
                 {"LOCAL_WORLD_SIZE=5 contradicts WORLD_SIZE=4", "a machine cannot hold more ranks than there are"});
  expect_failure(with(of_torchrun(), [](Environment& e) { e.local_rank = "2"; }),
                 {"LOCAL_RANK=2 contradicts LOCAL_WORLD_SIZE=2", "local ranks count from 0 to local size - 1"});
  expect_failure(with(of_mpich(), [](Environment& e) { e.pmi_rank = "9"; }), {"PMI_RANK=9 contradicts PMI_SIZE=4"});
  expect_failure(with(of_open_mpi(), [](Environment& e) { e.ompi_comm_world_local_rank = "2"; }),
                 {"OMPI_COMM_WORLD_LOCAL_RANK=2 contradicts OMPI_COMM_WORLD_LOCAL_SIZE=2"});
  expect_failure(with(of_slurm(), [](Environment& e) { e.slurm_procid = "4"; }),
                 {"SLURM_PROCID=4 contradicts SLURM_STEP_NUM_TASKS=4"});
}

TEST(DiscoverWorld, SeveralMachinesNeedAnAddress) {
  const auto without = [](const Environment& environment) {
    return with(environment, [](Environment& e) { e.master_addr = std::nullopt; });
  };
  expect_failure(without(of_torchrun()),
                 {"MASTER_ADDR is not set, but 4 ranks need it to meet, as torchrun's variables say", "(RANK is set)",
                  "set it to an address of rank 0's machine"});
  expect_failure(without(of_open_mpi()),
                 {"as Open MPI may have started them on several machines", "(OMPI_COMM_WORLD_RANK is set)"});
  expect_failure(without(of_mpich()), {"as MPICH may have", "(PMI_RANK is set)"});
  expect_failure(without(of_slurm()), {"as Slurm may have", "(SLURM_PROCID is set)"});
  expect_failure(with(of_torchrun(), [](Environment& e) { e.master_port = std::nullopt; }),
                 {"MASTER_PORT is not set although MASTER_ADDR=host0 is", "a free port of rank 0's machine"});
  for (const char* port : {"0", "65536", "http", "-1"})
    expect_failure(with(of_torchrun(), [&](Environment& e) { e.master_port = port; }),
                   {std::string("MASTER_PORT=") + port + " is not a whole number from 1 to 65535",
                    "set it to a free port of rank 0's machine"});
}

}  // namespace
}  // namespace lockstep
