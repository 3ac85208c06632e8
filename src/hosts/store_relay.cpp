#include "hosts/store_relay.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>

#include "hosts/messages.h"

namespace lockstep::hosts {
namespace {

/// A reader that leaves more than this is broken, because no request or answer of the store is as large.
constexpr size_t kMostUnread = 64 << 20;

}  // namespace

void StoreRelay::add(int rank, FileDescriptor socket) {
  ::fcntl(socket.get(), F_SETFL, O_NONBLOCK);
  connections_[rank].socket = std::move(socket);
}

void StoreRelay::watch(PollSet& polled, const std::function<bool(int rank)>& may_send) {
  for (const auto& [rank, connection] : connections_) {
    const int wanted = (may_send(rank) ? POLLIN : 0) | (connection.queue.empty() ? 0 : POLLOUT);
    if (wanted != 0)
      polled.add(connection.socket.get(), static_cast<short>(wanted),
                 [this, number = rank](const pollfd& ready) { serve(number, ready.revents); });
  }
}

void StoreRelay::serve(int rank, short events) {
  const auto found = connections_.find(rank);
  if (found == connections_.end()) return;
  if ((events & POLLOUT) != 0) flush(rank, found->second);
  if ((events & ~POLLOUT) == 0 || !connections_.contains(rank)) return;
  std::array<char, kMaxStoreBytes> piece;
  const ssize_t count = ::recv(found->second.socket.get(), piece.data(), piece.size(), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (count <= 0) connections_.erase(found);
  send_(rank, {piece.data(), count > 0 ? static_cast<size_t>(count) : 0});
}

void StoreRelay::deliver(int rank, std::string_view bytes) {
  const auto found = connections_.find(rank);
  if (found == connections_.end()) return;
  found->second.queue += bytes;
  if (bytes.empty() || found->second.queue.size() > kMostUnread)
    connections_.erase(found);
  else
    flush(rank, found->second);
}

void StoreRelay::flush(int rank, Connection& connection) {
  const ssize_t count =
      ::send(connection.socket.get(), connection.queue.data(), connection.queue.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (count > 0)
    connection.queue.erase(0, static_cast<size_t>(count));
  else if (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
    connections_.erase(rank);
}

}  // namespace lockstep::hosts
