// Loads a checkpoint and saves it under another name, for a test that compares what another reader sees in both.

#include <cstdio>

#include <lockstep/checkpoint.h>
#include <lockstep/error.h>

int main(int, char** argv) {
  try {
    lockstep::save(lockstep::load(argv[1]), argv[2]);
  } catch (const lockstep::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
