#include "hosts/key.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "launch/launch_error.h"

namespace lockstep::hosts {
namespace {

constexpr const char* kHowToMake = "make one with: (umask 077; openssl rand -hex 32 > FILE)";
constexpr std::chrono::seconds kKeyTime(10);
constexpr size_t kMostText = 256;

[[noreturn]] void refuse_key(const std::string& text) { throw LaunchError(kExitRefusedPeer, text); }

int digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

Key Key::generate() {
  Key key;
  if (RAND_bytes(key.bytes_.data(), kBytes) != 1) throw LaunchError(kExitResourceLimit, "no random bytes for a key");
  return key;
}

Key Key::parse(const std::string& text, const std::string& where) {
  const size_t first = text.find_first_not_of(" \t\r\n"), last = text.find_last_not_of(" \t\r\n");
  const size_t length = first == std::string::npos ? 0 : last + 1 - first;
  Key key;
  bool good = length == 2 * kBytes;
  for (size_t i = 0; good && i < kBytes; ++i) {
    const int high = digit(text[first + 2 * i]), low = digit(text[first + 2 * i + 1]);
    good = high >= 0 && low >= 0;
    key.bytes_[i] = static_cast<unsigned char>(16 * high + low);
  }
  if (!good) refuse_key(where + " does not hold a key of 64 hexadecimal digits; " + kHowToMake);
  return key;
}

Key Key::from_file(const std::string& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) refuse_key("the key file " + path + " cannot be read: " + std::strerror(errno) + "; " + kHowToMake);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode))
    refuse_key("the key file " + path + " is not a file");
  if (status.st_uid != ::geteuid())
    refuse_key("the key file " + path + " belongs to another user; use a file of your own that only you can read");
  if ((status.st_mode & 077) != 0)
    refuse_key("other users can read or write the key file " + path +
               "; make a new key, because they may know this one, and " + "chmod 600 its file");
  std::string text(kMostText, '\0');
  const ssize_t count = ::read(file.get(), text.data(), text.size());
  if (count < 0) refuse_key("the key file " + path + " cannot be read: " + std::strerror(errno));
  text.resize(static_cast<size_t>(count));
  Key key = parse(text, "the key file " + path);
  OPENSSL_cleanse(text.data(), text.size());
  return key;
}

Key Key::from_descriptor(int fd) {
  std::string text;
  const Deadline deadline(kKeyTime);
  while (text.find('\n') == std::string::npos && text.size() < kMostText) {
    pollfd ready{.fd = fd, .events = POLLIN, .revents = 0};
    if (::poll(&ready, 1, deadline.remaining_ms()) <= 0)
      refuse_key(
          "no key arrived on standard input within 10 s; `lockstep run` starts `lockstep agent`, so do not start it "
          "yourself");
    char piece[kMostText];
    const ssize_t count = ::read(fd, piece, sizeof piece);
    if (count <= 0) break;
    text.append(piece, static_cast<size_t>(count));
    OPENSSL_cleanse(piece, sizeof piece);
  }
  Key key = parse(text, "standard input");
  OPENSSL_cleanse(text.data(), text.size());
  return key;
}

Key::~Key() { OPENSSL_cleanse(bytes_.data(), bytes_.size()); }

std::string Key::text() const {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : bytes_) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

}  // namespace lockstep::hosts
