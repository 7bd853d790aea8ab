// Every header that the kernels of an instruction set need, to be included before it is switched on.

#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention.h"
#include "element_conversion.h"
#include "fp8.h"
