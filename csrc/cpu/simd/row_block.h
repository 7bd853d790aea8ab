// The arithmetic of a block of query rows on a tile whose keys and values are used where they are.
//
// A body, not a header: a file of kernels includes it inside of its own namespace.
//
// Scores lie in vectors of 4 keys for each of kBlockRows rows, which makes the softmax of a block of
// rows run down whole vectors.
//
// Inner loops are never inlined, what they call always is: otherwise the compiler runs out of registers
// and keeps sums in memory.

inline constexpr int kBlockRows = kLanes / kBlockKeys;

// The softmax of a block of rows, each row's four lanes alike but for the denominators' parts.
struct RowBlock {
  Float maximum, denominator, slopes;
  Int positions, low, high;  // of a tile's first key: less the row's position; the keys it sees

  bool is_visible_to_all(int first, int last) const {
    bool is_visible = true;
    for (int lane = 0; lane < kLanes; lane += kBlockKeys) {
      is_visible = is_visible && low[lane] <= first && last <= high[lane];
    }
    return is_visible;
  }
};

inline Int select(Int condition, Int a, Int b) { return condition ? a : b; }
inline Float select(Int condition, Float a, Float b) { return condition ? a : b; }

inline Int keys_of_block(int block) {
  return (lane_numbers() & (kBlockKeys - 1)) + block * kBlockKeys;
}

// Turns the dots of blocks [begin, end) into weights relative to the rows' new maxima, and returns
// the factors that bring what was summed before to those.
template <class Units, bool kMasked>
[[gnu::noinline]] Float weigh_block(
    RowBlock& rows,
    const ScoreRule& rule,
    float* scores,
    uint32_t* weights,
    int begin,
    int end,
    RowsAhead& rows_ahead) {
  RowsAhead ahead = rows_ahead;
  Float largest = broadcast(-kInfinity);
  for (int block = begin; block < end; ++block) {
    ahead.moment();
    const Int keys = keys_of_block(block);
    Float score = load(scores + block * kLanes);
    if (rule.is_plain) {
      score = clamp_to_finite(score * rule.scale);
    } else {
      const Float distances = __builtin_convertvector(keys + rows.positions, Float);
      score = score_of(score, rule, rows.slopes, distances);
    }
    if (kMasked) {
      score = select((rows.low <= keys) & (keys < rows.high), score, broadcast(-kInfinity));
    }
    largest = larger(score, largest);
    store(scores + block * kLanes, score);
  }
  const Float maximum = larger(largest_of_four(largest), rows.maximum);
  const Float decay = select(
      maximum > rows.maximum, exp_of_nonpositive(rows.maximum - maximum), broadcast(1.0f));
  Float total = {};
  for (int block = begin; block < end; ++block) {
    ahead.moment();
    Float weight = exp_of_nonpositive(load(scores + block * kLanes) - maximum);
    if (kMasked) {
      const Int keys = keys_of_block(block);
      weight = select((rows.low <= keys) & (keys < rows.high), weight, Float{});
    }
    total += weight;
    if constexpr (Units::kPair == 1) {
      store_bits(weights + block * kLanes, (Bits)weight);
    } else {
#ifdef TORCH_PAGEDKV_AVX512_BF16
      store_bfloat16_pairs(weights + block * (kLanes / 2), weight);
#endif
    }
  }
  rows_ahead = ahead;
  rows.maximum = maximum;
  rows.denominator = multiply_add(rows.denominator, decay, total);
  return decay;
}

// The sums of a block's dots before their lanes are added.
template <class Units>
using DotSums = Float[kBlockRows][kBlockKeys / Units::kKeysTogether];

// Dots of kRows query rows with a block of keys.
template <class Units, int kRows>
[[gnu::always_inline]] inline void dot_block(
    const uint32_t* queries, const char* const* keys, int64_t steps, DotSums<Units>& sums,
    RowsAhead& ahead) {
  constexpr int kTogether = Units::kKeysTogether, kLoads = kBlockKeys / kTogether;
  constexpr int kVectors = Units::kKeyVectors * kTogether;
  constexpr int kBytes = Units::kStep * Units::kBytes;
#pragma GCC unroll 4
  for (int i = 0; i < kBlockRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kLoads; ++j) sums[i][j] = Float{};
  }
  for (int64_t step = 0; step < steps; ++step) {
    ahead.moment();
    Bits key[kLoads][kVectors];
    const uint32_t* const query = queries + step * kVectors * kBlockRows * kLanes;
#pragma GCC unroll 4
    for (int j = 0; j < kLoads; ++j) {
      if constexpr (kTogether == 2) {
        Units::load_two_keys(keys + j * 2, step * kBytes, key[j]);
      } else {
        Units::load_keys(keys[j] + step * kBytes, key[j]);
      }
      if constexpr (kLoads * kVectors > 8) {  // more than the registers hold at once
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
          for (int i = 0; i < kRows; ++i) {
            const Bits units = load_bits(query + (v * kBlockRows + i) * kLanes);
            sums[i][j] = Units::multiply_add_units(units, key[j][v], sums[i][j]);
          }
        }
      }
    }
    if constexpr (kLoads * kVectors <= 8) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
          const Bits units = load_bits(query + (v * kBlockRows + i) * kLanes);
#pragma GCC unroll 4
          for (int j = 0; j < kLoads; ++j) {
            sums[i][j] = Units::multiply_add_units(units, key[j][v], sums[i][j]);
          }
        }
      }
    }
  }
}

// Passes over values: of kMany steps of their elements at once, then of kFew, then of one.
template <class Units, int kRows>
struct ValuePasses {
  static constexpr int kVectors = Units::kValueVectors, kRegisters = kLanes == 16 ? 16 : 8;
  static constexpr int kFew = 4 / kVectors;
  static constexpr int kMany = kRows * 8 <= kRegisters ? 8 / kVectors : kFew;

  static int64_t count(int64_t steps) {
    return steps / kMany + steps % kMany / kFew + steps % kMany % kFew;
  }
};

// Sums of a block of rows lie by steps: of each, those of all rows.
template <class Units>
inline constexpr int kSumsOfStep = kBlockRows * Units::kStep;

// How often add_values may fetch in a pass over a block of values. Of fp8, whose rows are short, once.
template <class Units>
inline constexpr int kMomentsOfBlock = Units::kBytes == 1 ? 1 : kBlockKeys / Units::kPair;

// sums[row] += weight[row][n] * value[n] over blocks [begin, end), for kSteps steps of elements.
template <class Units, int kRows, int kSteps>
[[gnu::noinline]] void add_values(
    const uint32_t* weights,
    const TileRows& values,
    int64_t first_step,
    int begin,
    int end,
    float* sums,
    RowsAhead& rows_ahead) {
  RowsAhead ahead = rows_ahead;
  constexpr int kVectors = Units::kValueVectors, kPair = Units::kPair;
  constexpr int kBytes = Units::kStep * Units::kBytes;
  const auto place = [sums](int row, int vector) {
    return sums + vector / kVectors * kSumsOfStep<Units> + row * Units::kStep + vector % kVectors * kLanes;
  };
  Float sum[kRows][kSteps * kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kSteps * kVectors; ++v) sum[i][v] = load(place(i, v));
  }
  for (int block = begin; block < end; ++block) {
    const uint32_t* const weight = weights + block * (kLanes / kPair);
    const char* const* const rows = values.rows + block * kBlockKeys;
#pragma GCC unroll 4
    for (int n = 0; n < kBlockKeys; n += kPair) {
      if (n == 0 || kMomentsOfBlock<Units> > 1) ahead.moment();
#pragma GCC unroll 4
      for (int s = 0; s < kSteps; ++s) {
        Bits value[kVectors];
        Units::load_values(rows + n, (first_step + s) * kBytes, value);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
          const Bits factor = broadcast_bits(weight[i * (kBlockKeys / kPair) + n / kPair]);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            Float& target = sum[i][s * kVectors + v];
            target = Units::multiply_add_units(factor, value[v], target);
          }
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kSteps * kVectors; ++v) store(place(i, v), sum[i][v]);
  }
  rows_ahead = ahead;
}
