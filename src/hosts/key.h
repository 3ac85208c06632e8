#pragma once

#include <array>
#include <string>

namespace lockstep::hosts {

/// The secret that a run's agents must prove to hold: 256 random bits, written as 64 hexadecimal digits.
class Key {
 public:
  static constexpr size_t kBytes = 32;

  /// A new random key.
  static Key generate();
  /// Throws LaunchError (authentication refused), naming `where`, unless `text` is 64 digits, apart from surrounding
  /// spaces.
  static Key parse(const std::string& text, const std::string& where);
  /// Reads a file that belongs to this user and is readable by no one else. Throws LaunchError (authentication
  /// refused).
  static Key from_file(const std::string& path);
  /// Reads a line from `fd`, waiting for at most ten seconds. Throws LaunchError (authentication refused).
  static Key from_descriptor(int fd);
  ~Key();

  std::string text() const;
  const unsigned char* data() const { return bytes_.data(); }

 private:
  std::array<unsigned char, kBytes> bytes_{};
};

}  // namespace lockstep::hosts
