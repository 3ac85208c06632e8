// libFuzzer: any bytes as a .safetensors file, read to the last tensor.

#include <lockstep/error.h>

#include "checkpoint/format/safetensors_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  const MemorySource source("fuzz.safetensors", {reinterpret_cast<const char*>(data), size});
  try {
    const SafetensorsFile file(source);
    for (const TensorEntry& entry : file.entries()) {
      std::string bytes(entry.bytes(), '\0');
      file.read(entry, bytes.data());
    }
  } catch (const Error&) {
  }
  return 0;
}
