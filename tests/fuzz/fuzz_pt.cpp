// libFuzzer: any bytes as a .pt file, read to the last tensor.

#include <lockstep/error.h>

#include "checkpoint/format/pt_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  const MemorySource source("fuzz.pt", {reinterpret_cast<const char*>(data), size});
  try {
    const PtFile file(source);
    const PickleTree& tree = file.tree();
    uint64_t budget = 1 << 20;  // views may repeat their elements
    for (const Leaf& leaf : leaves_of(tree)) {
      if (tree[leaf.node].kind != NodeKind::kTensor) continue;
      const PickledTensor& tensor = tree.tensors[static_cast<size_t>(tree[leaf.node].integer)];
      std::string storage(file.storage_bytes(tensor.storage), '\0');
      file.read_storage(tensor.storage, storage.data());
      if (bytes_of(tree, tensor) > budget) continue;
      budget -= bytes_of(tree, tensor);
      uint64_t sum = 0;
      for_each_run(tree, tensor, storage.data(), [&](const char* bytes, uint64_t count) {
        for (uint64_t i = 0; i < count; ++i) sum += static_cast<unsigned char>(bytes[i]);
      });
      volatile uint64_t kept = sum;
      static_cast<void>(kept);
    }
  } catch (const Error&) {
  }
  return 0;
}
