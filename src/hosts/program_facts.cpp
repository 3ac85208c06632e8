#include "hosts/program_facts.h"

#include <openssl/evp.h>

#include <array>
#include <fstream>
#include <memory>

namespace lockstep::hosts {
namespace {

using Digest = std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)>;

bool add_file(const Digest& digest, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return false;
  std::array<char, 64 << 10> piece;
  while (file.read(piece.data(), piece.size()), file.gcount() > 0)
    EVP_DigestUpdate(digest.get(), piece.data(), static_cast<size_t>(file.gcount()));
  return true;
}

}  // namespace

std::string script_of(const std::vector<std::string>& command) {
  for (size_t i = 1; i < command.size(); ++i)
    if (command[i].ends_with(".py") || command[i].ends_with(".sh")) return command[i];
  return "";
}

std::string program_hash(const std::string& program, const std::vector<std::string>& command) {
  const Digest digest(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  if (!digest || EVP_DigestInit_ex(digest.get(), EVP_sha256(), nullptr) != 1 || !add_file(digest, program)) return "";
  if (const std::string script = script_of(command); !script.empty()) add_file(digest, script);
  std::array<unsigned char, EVP_MAX_MD_SIZE> bytes{};
  unsigned int size = 0;
  EVP_DigestFinal_ex(digest.get(), bytes.data(), &size);
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (unsigned int i = 0; i < size; ++i) {
    text.push_back(kDigits[bytes[i] >> 4]);
    text.push_back(kDigits[bytes[i] & 15]);
  }
  return text;
}

}  // namespace lockstep::hosts
