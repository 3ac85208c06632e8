// libFuzzer: any bytes as the pickle of a .pt file.

#include <lockstep/error.h>

#include "checkpoint/format/contents.h"
#include "checkpoint/format/pickle_tree.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  PickleTree tree(std::string(reinterpret_cast<const char*>(data), size));
  try {
    read_pickle(tree);
    for (const Leaf& leaf : leaves_of(tree))
      if (tree[leaf.node].kind == NodeKind::kTensor)
        bytes_of(tree, tree.tensors[static_cast<size_t>(tree[leaf.node].integer)]);
      else
        text_of(tree, tree[leaf.node]);
  } catch (const Error&) {
  }
  return 0;
}
