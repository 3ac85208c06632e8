// libFuzzer: any bytes as tokens, any part of them read.

#include <cstring>
#include <vector>

#include <lockstep/error.h>

#include "data/token_map.h"
#include "fuzz_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  int64_t places[2];
  if (size < sizeof(places)) return 0;
  std::memcpy(places, data, sizeof(places));
  const FuzzFile file(data, size, ".bin");
  for (const int64_t bytes : {1, 2, 4}) {
    try {
      const TokenMap tokens(file.path(), bytes);
      tokens.check_length();
      std::vector<int64_t> all(static_cast<size_t>(tokens.size()));
      tokens.read(0, tokens.size(), all.data());
      const bool fits =
          places[0] >= 0 && places[1] >= 0 && places[0] <= tokens.size() && places[1] <= tokens.size() - places[0];
      tokens.read(places[0], places[1], all.data());
      if (!fits) __builtin_trap();
    } catch (const Error&) {
    }
  }
  return 0;
}
