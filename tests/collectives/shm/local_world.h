#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "collectives/shm/protocol/communicator.h"

// Ranks as threads of one process. They share the same mappings, at the same addresses, so that ThreadSanitizer sees
// every access of every rank.
namespace lockstep::shm {

inline constexpr auto kTestTimeout = std::chrono::seconds(30);

/// Small chunks, so that small data takes many rounds.
inline Geometry small_geometry(int world_size) {
  Geometry geometry;
  geometry.chunk_bytes = size_t{16} << 10;
  geometry.area_bytes = geometry.cold_bytes = size_t{100} << 10;
  geometry.channel_bytes = size_t{12} << 10;
  geometry.cell_bytes = 512;
  geometry.world_size = world_size;
  geometry.resident_bytes = size_t{32} << 20;
  return geometry;
}

/// `beginning`: what the groups' words count from.
inline std::vector<World> local_worlds(Geometry geometry, const Beginning& beginning = {}) {
  const int n = geometry.world_size;
  std::vector<std::shared_ptr<SharedSegment>> segments;
  for (int r = 0; r < n; ++r) {
    segments.push_back(std::make_shared<SharedSegment>("test", geometry.segment_bytes(), geometry.resident_at(),
                                                       geometry.apart_bytes()));
    const std::byte nonce[16] = {};
    initialize_segment(*segments.back(), r, n, nonce, beginning);
  }
  std::vector<std::vector<PeerWatch>> watches(static_cast<size_t>(n));
  for (auto& row : watches) row.resize(static_cast<size_t>(n));
  for (size_t a = 0; a < watches.size(); ++a)
    for (size_t b = a + 1; b < watches.size(); ++b) {
      int ends[2];
      if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("socketpair");
      watches[a][b] = PeerWatch(FileDescriptor(ends[0]), ::getpid(), "here");
      watches[b][a] = PeerWatch(FileDescriptor(ends[1]), ::getpid(), "here");
    }
  const bool spin = static_cast<unsigned>(n) <= std::thread::hardware_concurrency();
  std::vector<World> worlds;
  for (int r = 0; r < n; ++r)
    worlds.emplace_back(r, geometry, segments, std::move(watches[static_cast<size_t>(r)]), spin);
  return worlds;
}

/// Runs body(rank) on a thread for each rank and rethrows the first exception. Ends the process if it takes longer than
/// a test may.
inline void on_threads(int ranks, const std::function<void(int)>& body,
                       std::chrono::seconds limit = std::chrono::seconds(100)) {
  std::vector<std::future<void>> threads;
  for (int r = 0; r < ranks; ++r) threads.push_back(std::async(std::launch::async, body, r));
  const auto end = std::chrono::steady_clock::now() + limit;
  for (int r = 0; r < ranks; ++r)
    if (threads[static_cast<size_t>(r)].wait_until(end) != std::future_status::ready) {
      std::fprintf(stderr, "rank %d still runs after %lld s\n", r, static_cast<long long>(limit.count()));
      std::abort();
    }
  for (auto& thread : threads) thread.get();
}

/// body(group) for each rank of one group.
inline void with_group(int ranks, const std::function<void(Communicator&)>& body, Geometry geometry,
                       const Beginning& beginning = {}) {
  auto worlds = local_worlds(geometry, beginning);
  on_threads(ranks, [&](int rank) {
    Communicator group(std::move(worlds[static_cast<size_t>(rank)]), std::make_shared<ProgressSet>());
    body(group);
  });
}

inline void with_group(int ranks, const std::function<void(Communicator&)>& body) {
  with_group(ranks, body, small_geometry(ranks));
}

}  // namespace lockstep::shm
