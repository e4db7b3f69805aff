// The order in which the threads of a block run, for the tests.
#include "cuda_cpu.h"

extern "C" void set_seed(unsigned seed) { cuda_cpu::seed() = seed; }
