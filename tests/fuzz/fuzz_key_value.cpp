// libFuzzer: any bytes from one rank to the launcher's key-value store, while another rank uses it in good order.

#include <lockstep/error.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstdlib>
#include <string>

#include "base/socket.h"
#include "rendezvous/key_value_server.h"

namespace {

using namespace lockstep;

void check(bool holds) {
  if (!holds) std::abort();
}

/// Serves whatever is there; bounded, since a client that does not read is not served.
void serve(KeyValueServer& server) {
  for (int turn = 0; turn < 100; ++turn) {
    std::vector<pollfd> polled;
    server.append_polled(polled);
    if (polled.empty() || ::poll(polled.data(), polled.size(), 0) <= 0) return;
    for (const pollfd& ready : polled) server.handle(ready);
  }
}

std::string receive(int socket) {
  std::string bytes;
  std::array<char, 16 << 10> piece;
  for (ssize_t count; (count = ::recv(socket, piece.data(), piece.size(), MSG_DONTWAIT)) > 0;)
    bytes.append(piece.data(), static_cast<size_t>(count));
  return bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  KeyValueServer server;
  SocketPair hostile = make_socket_pair(), good = make_socket_pair();
  server.add_client(std::move(hostile.first));
  server.add_client(std::move(good.first));
  ::send(hostile.second.get(), data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
  serve(server);
  // What it answers are whole frames.
  const std::string answers = receive(hostile.second.get());
  for (std::string_view left = answers; !left.empty();) {
    const auto frame = parse_frame(left);
    check(frame.has_value());
    left.remove_prefix(frame->bytes);
  }
  hostile.second.reset();
  serve(server);
  // The other rank's requests are answered as if nothing had been.
  std::string request;
  append_frame(request, 7, static_cast<uint8_t>(KeyValueRequest::kSet), {"of the good one", "value"});
  append_frame(request, 8, static_cast<uint8_t>(KeyValueRequest::kGet), {"of the good one"});
  ::send(good.second.get(), request.data(), request.size(), MSG_NOSIGNAL);
  serve(server);
  const std::string reply = receive(good.second.get());
  const auto first = parse_frame(reply);
  check(first && first->id == 7 && first->code == static_cast<uint8_t>(KeyValueReply::kDone));
  const auto second = parse_frame(std::string_view(reply).substr(first->bytes));
  check(second && second->id == 8 && second->fields.size() == 1 && second->fields[0] == "value");
  return 0;
}
