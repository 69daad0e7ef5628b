// nanobind's own code, compiled with ours: it comes as source. Found among the system's headers, its warnings are its
// own.
#include <cstdio>

#include <nb_combined.cpp>
