#include "rendezvous/key_value_server_thread.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <utility>

#include "base/error.h"
#include "base/library_thread.h"
#include "base/socket.h"
#include "rendezvous/key_value_server.h"

namespace lockstep {
namespace {

constexpr useconds_t kPauseUs = 20'000;

}  // namespace

KeyValueServerThread::KeyValueServerThread(FileDescriptor listener)
    : listener_(std::move(listener)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) throw_errno("making an eventfd");
  thread_ = library_thread([this] { serve(); });
}

KeyValueServerThread::~KeyValueServerThread() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  wake();
  thread_.join();
}

void KeyValueServerThread::add_client(FileDescriptor socket) {
  {
    const MutexLock lock(mutex_);
    arrived_.push_back(std::move(socket));
  }
  wake();
}

FileDescriptor KeyValueServerThread::connect() {
  auto [ours, theirs] = make_socket_pair();
  add_client(std::move(ours));
  return std::move(theirs);
}

void KeyValueServerThread::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);  // full means already awake
}

void KeyValueServerThread::serve() {
  KeyValueServer server;
  std::vector<pollfd> polled;
  for (;;) {
    polled.clear();
    polled.push_back({.fd = wake_.get(), .events = POLLIN, .revents = 0});
    polled.push_back({.fd = listener_.get(), .events = POLLIN, .revents = 0});  // poll skips -1
    server.append_polled(polled);
    if (::poll(polled.data(), polled.size(), -1) < 0) continue;  // EINTR, or out of memory for a moment
    if (polled[0].revents != 0) {
      uint64_t count;
      [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof count);
      const MutexLock lock(mutex_);
      if (stop_) return;
      for (auto& socket : std::exchange(arrived_, {})) server.add_client(std::move(socket));
    }
    if (polled[1].revents != 0) {
      errno = 0;
      if (FileDescriptor socket = accept_same_user(listener_.get()))
        server.add_client(std::move(socket));
      else if (errno == EMFILE || errno == ENFILE)
        ::usleep(kPauseUs);  // the client stays in the queue, and poll would return at once
    }
    for (size_t i = 2; i < polled.size(); ++i) server.handle(polled[i]);
    server.take_dropped();
  }
}

}  // namespace lockstep
