// libFuzzer: any bytes as an IDX file, plain and as gzip.

#include <lockstep/error.h>

#include "data/idx_file.h"
#include "fuzz_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  for (const char* suffix : {"", ".gz"}) {
    const FuzzFile file(data, size, suffix);
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{0}, {0, 28, 28}, {0, 0, 0}}) {
      try {
        const IdxFile idx = read_idx(file.path(), shape);
        int64_t count = 1;
        for (const int64_t each : idx.shape) count *= each;
        if (count != static_cast<int64_t>(idx.bytes.size())) __builtin_trap();
      } catch (const Error&) {
      }
    }
  }
  return 0;
}
