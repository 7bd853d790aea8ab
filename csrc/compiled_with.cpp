// Says in the library's bytes which torch's headers it was compiled with. torch_pagedkv/native.py
// finds it there, also in a library that does not load.

#include <torch/headeronly/version.h>

extern "C" __attribute__((used)) const char torch_pagedkv_compiled_with[] =
    "torch_pagedkv compiled with torch " TORCH_VERSION;
