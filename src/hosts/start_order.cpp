#include "hosts/start_order.h"

#include <algorithm>

#include "hosts/link_address.h"

namespace lockstep::hosts {
namespace {

/// The encrypted links of `order`.
void add_links(Start& order, const std::deque<Node>& nodes, const std::string& run_id, const std::string& relay) {
  std::vector<LinkMachine> machines;
  for (const Node& node : nodes)
    if (node.has_ranks())
      machines.push_back({{node.host.name, node.ready->address, node.ready->link_port}, node.ready->network});
  order.links = plan_links(machines, order.node, run_id);
  order.links.start = static_cast<uint32_t>(order.restarts);
  order.links.relay = relay_among(machines, relay);
  const int count = static_cast<int>(machines.size());
  order.address =
      order.links.machines.empty() ? "127.0.0.1" : LinkAddresses(order.links.first_address, count).text_of(order.node);
  order.master_port = 0;  // torch's store would listen in the clear
}

}  // namespace

Start start_order(const Node& node, const std::deque<Node>& nodes, int world_size, const TeamSetup& setup, int restarts,
                  const Encryption& encryption) {
  const auto has_ranks = [](const Node& one) { return one.has_ranks(); };
  const Node& first = *std::find_if(nodes.begin(), nodes.end(), has_ranks);
  Start order{.slots = node.host.slots,
              .first_rank = node.first_rank,
              .world_size = world_size,
              .node = static_cast<int>(std::count_if(nodes.begin(), nodes.begin() + node.number, has_ranks)),
              .nodes = static_cast<int>(std::count_if(nodes.begin(), nodes.end(), has_ranks)),
              .restarts = restarts,
              .master_address = first.ready->address,
              .master_port = first.ready->master_port};
  for (int rank = node.first_rank; node.has_rank(rank); ++rank)
    if (const auto columns = setup.display.columns_for(rank)) {
      order.terminal_rank = rank;
      order.terminal_columns = *columns;
    }
  if (encryption.is_on && order.nodes > 1) add_links(order, nodes, setup.run_id, encryption.relay);
  return order;
}

}  // namespace lockstep::hosts
