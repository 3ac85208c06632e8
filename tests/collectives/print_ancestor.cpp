// Prints which process started this one, as starting_process(argv[1]) sees it.

#include <cstdio>

#include "collectives/ancestor.h"

int main(int, char** argv) { std::puts(lockstep::starting_process(argv[1]).c_str()); }
