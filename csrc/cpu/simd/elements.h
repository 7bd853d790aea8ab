// How stored elements become the operands of products.
//
// A body, not a header: a file of kernels includes it inside of its own namespace.
//
// An operand is a vector of 32-bit units: a float32 each (Float32Units), or a pair of bfloat16 where
// the machine multiplies such pairs (Bfloat16Units). Pairs are neighbours along the sum: two elements
// of a key, or the same element of two adjacent values. A step of elements may come out in another
// order, which key_order and value_order tell; both keep runs of kRun elements together.
//
// Few rows may take two keys together, half a step of each in a vector: half as many sums to add up
// in the end.

// Products of float32.
struct Float32Products {
  static constexpr int kPair = 1;          // factors in a unit
  static constexpr int kKeysTogether = 1;  // of a vector of keys, where rows are few

  static Float multiply_add_units(Bits a, Bits b, Float c) {
    return multiply_add((Float)a, (Float)b, c);
  }
};

template <class Element>
struct Float32Units : Float32Products {
  static constexpr int kBytes = Element::kBytes;
  static constexpr int kStep = kLanes;   // elements loaded at once
  static constexpr int kKeyVectors = 1;  // vectors that they become
  static constexpr int kValueVectors = 1;
  static constexpr int kRun = 4;

  static constexpr int key_order(int i) { return i; }
  static constexpr int value_order(int i) { return i; }
  static void load_keys(const char* source, Bits (&units)[1]) {
    units[0] = (Bits)Element::load_lanes(source);
  }
  static void load_values(const char* const* rows, int64_t offset, Bits (&units)[1]) {
    units[0] = (Bits)Element::load_lanes(rows[0] + offset);
  }
};

// Pairs of bfloat16 as float32: the even ones, then the odd ones. Nothing has to cross lanes.
inline void split_pairs(Bits pairs, Bits& even, Bits& odd) {
  even = pairs << 16;
  odd = pairs & 0xFFFF0000u;
}

template <>
struct Float32Units<Bfloat16> : Float32Products {
  static constexpr int kBytes = 2;
  static constexpr int kStep = 2 * kLanes;
  static constexpr int kKeyVectors = 2;
  static constexpr int kValueVectors = 2;
  static constexpr int kRun = 1;

  static constexpr int key_order(int i) { return i % kLanes * 2 + i / kLanes; }
  static constexpr int value_order(int i) { return key_order(i); }
  static void load_keys(const char* source, Bits (&units)[2]) {
    split_pairs(load_bits(source), units[0], units[1]);
  }
  static void load_values(const char* const* rows, int64_t offset, Bits (&units)[2]) {
    load_keys(rows[0] + offset, units);
  }
};

#ifdef TORCH_PAGEDKV_AVX512_VBMI

// Where the element stands that fp8_to_bfloat16 and then split_pairs put into lane i of 64.
constexpr int order_of_split(int i) {
  return i % 16 / 4 * 16 + i / 32 * 8 + i % 4 * 2 + i / 16 % 2;
}

template <class Format>
struct Float32Units<Fp8<Format>> : Float32Products {
  static constexpr int kBytes = 1;
  static constexpr int kStep = 64;
  static constexpr int kKeyVectors = 4;
  static constexpr int kValueVectors = 4;
  static constexpr int kRun = 1;

  static constexpr int key_order(int i) { return order_of_split(i); }
  static constexpr int value_order(int i) { return order_of_split(i); }
  static void load_keys(const char* source, Bits (&units)[4]) {
    Bits first, second;
    fp8_to_bfloat16<Format>(load_512(source), first, second);
    split_pairs(first, units[0], units[1]);
    split_pairs(second, units[2], units[3]);
  }
  static void load_values(const char* const* rows, int64_t offset, Bits (&units)[4]) {
    load_keys(rows[0] + offset, units);
  }
};

#endif

#ifdef TORCH_PAGEDKV_PORTABLE

// Elements that are converted one by one are taken from rows of float32, made once for all query rows.
template <>
struct Float32Units<Float16> : Float32Units<Float32> {};
template <class Format>
struct Float32Units<Fp8<Format>> : Float32Units<Float32> {};

#endif

#ifdef TORCH_PAGEDKV_AVX512_BF16

inline Bits low_pairs(__m512i a, __m512i b) { return (Bits)_mm512_unpacklo_epi16(a, b); }
inline Bits high_pairs(__m512i a, __m512i b) { return (Bits)_mm512_unpackhi_epi16(a, b); }

// Where the element stands that fp8_to_bfloat16 and then unpacking put into lane i of 64.
constexpr int order_of_unpacked(int i) {
  return i % 16 / 4 * 16 + i / 32 * 8 + i / 16 % 2 * 4 + i % 4;
}

template <class Element>
struct Bfloat16Units;

template <>
struct Bfloat16Units<Bfloat16> {
  static constexpr int kBytes = 2;
  static constexpr int kStep = 32;
  static constexpr int kKeyVectors = 1;
  static constexpr int kValueVectors = 2;
  static constexpr int kPair = 2;
  static constexpr int kKeysTogether = 1;
  static constexpr int kRun = 4;

  static constexpr int key_order(int i) { return i; }
  static constexpr int value_order(int i) { return i % 16 / 4 * 8 + i / 16 * 4 + i % 4; }
  static void load_keys(const char* source, Bits (&units)[1]) { units[0] = (Bits)load_512(source); }
  static void load_values(const char* const* rows, int64_t offset, Bits (&units)[2]) {
    const __m512i even = load_512(rows[0] + offset), odd = load_512(rows[1] + offset);
    units[0] = low_pairs(even, odd);
    units[1] = high_pairs(even, odd);
  }
  static Float multiply_add_units(Bits a, Bits b, Float c) { return dot_bfloat16(a, b, c); }
};

template <class Format>
struct Bfloat16Units<Fp8<Format>> {
  static constexpr int kBytes = 1;
  static constexpr int kStep = 64;
  static constexpr int kKeyVectors = 2;
  static constexpr int kValueVectors = 4;
  static constexpr int kPair = 2;
  static constexpr int kKeysTogether = 2;
  static constexpr int kRun = 4;

  static constexpr int key_order(int i) { return i % 32 / 8 * 16 + i / 32 * 8 + i % 8; }
  static constexpr int value_order(int i) { return order_of_unpacked(i); }
  static void load_keys(const char* source, Bits (&units)[2]) {
    fp8_to_bfloat16<Format>(load_512(source), units[0], units[1]);
  }
  // What load_keys makes of two rows, a half of each in every vector: first halves before second ones.
  static void load_two_keys(const char* const* rows, int64_t offset, Bits (&units)[4]) {
    for (int half = 0; half < 2; ++half) {
      const __m512i both = _mm512_inserti64x4(
          _mm512_castsi256_si512(load_256(rows[0] + offset + half * 32)),
          load_256(rows[1] + offset + half * 32),
          1);
      fp8_to_bfloat16<Format>(both, units[half], units[2 + half]);
    }
  }
  static void load_values(const char* const* rows, int64_t offset, Bits (&units)[4]) {
    // Paired before they are widened, which takes fewer shuffles.
    const __m512i even = load_512(rows[0] + offset), odd = load_512(rows[1] + offset);
    fp8_to_bfloat16<Format>(_mm512_unpacklo_epi8(even, odd), units[0], units[1]);
    fp8_to_bfloat16<Format>(_mm512_unpackhi_epi8(even, odd), units[2], units[3]);
  }
  static Float multiply_add_units(Bits a, Bits b, Float c) { return dot_bfloat16(a, b, c); }
};

#endif

template <class Units>
inline int64_t steps_of(int64_t dim) {
  return (dim + Units::kStep - 1) / Units::kStep;
}

// key_order and value_order of a step's runs.
template <class Units>
struct StepOrder {
  uint8_t of_keys[Units::kStep / Units::kRun] = {}, of_values[Units::kStep / Units::kRun] = {};

  constexpr StepOrder() {
    for (int i = 0; i < Units::kStep; i += Units::kRun) {
      of_keys[i / Units::kRun] = static_cast<uint8_t>(Units::key_order(i));
      of_values[i / Units::kRun] = static_cast<uint8_t>(Units::value_order(i));
    }
  }
};

template <class Units>
inline constexpr StepOrder<Units> kStepOrder;

// A query row as units that match those of keys: vectors `stride` bytes apart, each of kCopies times the
// same elements. `row` has room for padded(dim) floats.
template <class Units, int kCopies>
inline void load_query(
    const Attention& attention,
    int64_t token,
    int64_t head,
    float* row,
    uint32_t* units,
    int64_t stride) {
  const int64_t dim = attention.query.dim, steps = steps_of<Units>(dim);
  // Where pairs are used, the query is bfloat16 as they are.
  constexpr int kBytes = Units::kPair == 1 ? 4 : 2;
  const char* const source = attention.query.at(token, head);
  const char* natural = reinterpret_cast<char*>(row);
  if (kBytes == 4) {
    load_run(attention.query.dtype, source, dim, row);
  } else {
    std::memcpy(row, source, static_cast<size_t>(dim * kBytes));
  }
  std::memset(
      reinterpret_cast<char*>(row) + dim * kBytes, 0, static_cast<size_t>((steps * Units::kStep - dim) * kBytes));
  constexpr int kElements = static_cast<int>(sizeof(Bits)) / kBytes / kCopies;  // of a vector
  constexpr int kRuns = kElements / Units::kRun;                                // of a vector
  char* target = reinterpret_cast<char*>(units);
  for (int64_t step = 0; step < steps; ++step, natural += Units::kStep * kBytes) {
    const uint8_t* order = kStepOrder<Units>.of_keys;
    for (int vector = 0; vector < Units::kStep / kElements; ++vector, target += stride, order += kRuns) {
      for (int i = 0; i < kRuns; ++i) {
        for (int copy = 0; copy < kCopies; ++copy) {
          std::memcpy(
              target + (copy * kRuns + i) * Units::kRun * kBytes, natural + order[i] * kBytes, Units::kRun * kBytes);
        }
      }
    }
  }
}

// A row's sums in the order of the elements. `stride`: from a step's sums to those of the next.
template <class Units>
inline void order_sums(const float* sums, int64_t stride, int64_t dim, float* row) {
  for (int64_t first = 0; first < dim; first += Units::kStep, sums += stride) {
    for (int i = 0; i < Units::kStep / Units::kRun; ++i) {
      float* const run = row + first + kStepOrder<Units>.of_values[i];
      std::memcpy(run, sums + i * Units::kRun, Units::kRun * sizeof(float));
    }
  }
}

// How a dot product becomes a score.
struct ScoreRule {
  float scale;
  float softcap;  // 0: none
  bool is_plain;  // neither capped nor biased
};

inline Float clamp_to_finite(Float x) {
  return larger(broadcast(-FLT_MAX), smaller(broadcast(FLT_MAX), x));
}

// `biases`: slope * (key position - query position). An overflowed score is still a score: where it is
// the only one its value must come out exactly.
inline Float score_of(Float dot, const ScoreRule& rule, Float slopes, Float distances) {
  Float score = clamp_to_finite(dot * rule.scale);
  if (rule.softcap != 0.0f) score = rule.softcap * tanh_of(score / rule.softcap);
  return clamp_to_finite(multiply_add(slopes, distances, score));
}
