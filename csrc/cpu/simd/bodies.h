// All that is written once for every instruction set, on the vectors of one of them.
//
// A body, not a header: a file of kernels includes it inside of its own namespace.

#include "cpu/simd/arithmetic.h"

#include "cpu/simd/conversion.h"

#include "cpu/simd/elements.h"

#include "cpu/simd/tile_rows.h"

#include "cpu/simd/row_block.h"

#include "cpu/simd/few_rows.h"

#include "cpu/simd/many_rows.h"

#include "cpu/simd/table.h"
