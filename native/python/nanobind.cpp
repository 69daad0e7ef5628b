// nanobind's own code, which is distributed as source, compiled with this module's. As a system header, it may cause
// warnings.
#include <cstdio>

#include <nb_combined.cpp>
