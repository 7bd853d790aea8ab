// Elements of any dtype to float32 and back, and copies.
//
// A body, not a header: a file of kernels includes it inside of its own namespace.

// A dtype: elements to lanes of float32 and back, and one element alone.

struct Float32 {
  static constexpr int kBytes = 4;
  typedef float Stored;
  static float load_one(float stored) { return stored; }
  static float store_one(float value) { return value; }
  static Float load_lanes(const char* source) {
    Float vector;
    std::memcpy(&vector, source, sizeof vector);
    return vector;
  }
};

struct Float16 {
  static constexpr int kBytes = 2;
  typedef uint16_t Stored;
  static float load_one(uint16_t stored) { return half_to_float(stored); }
  static uint16_t store_one(float value) { return float_to_half(value); }
  static Float load_lanes(const char* source) { return load_half(source); }
  static void store_lanes(char* target, Float x) { store_half(target, x); }
};

struct Bfloat16 {
  static constexpr int kBytes = 2;
  typedef uint16_t Stored;
  static float load_one(uint16_t stored) { return bfloat16_to_float(stored); }
  static uint16_t store_one(float value) { return float_to_bfloat16(value); }
  static Float load_lanes(const char* source) { return load_bfloat16(source); }
  static void store_lanes(char* target, Float x) { store_low_halves(target, bfloat16_bits(x)); }
};

template <class Format>
struct Fp8 {
  static constexpr int kBytes = 1;
  typedef uint8_t Stored;
  static float load_one(uint8_t stored) { return fp8_to_float<Format>(stored); }
  static Float load_lanes(const char* source) { return load_fp8<Format>(source); }
};

template <class Element>
inline void load_elements(const char* source, int64_t count, float* target) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store(target + i, Element::load_lanes(source + i * Element::kBytes));
  }
  for (; i < count; ++i) {
    typename Element::Stored stored;
    std::memcpy(&stored, source + i * Element::kBytes, sizeof stored);
    target[i] = Element::load_one(stored);
  }
}

template <class Element>
inline void store_elements(const float* source, int64_t count, char* target) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Element::store_lanes(target + i * Element::kBytes, load(source + i));
  }
  for (; i < count; ++i) {
    const typename Element::Stored stored = Element::store_one(source[i]);
    std::memcpy(target + i * Element::kBytes, &stored, sizeof stored);
  }
}

// Rounds elements of another dtype into fp8 ones; without kDivides, `factor` is exactly 1 / `scale`.
template <class Element, class Format, bool kDivides>
inline void quantise_elements(
    const char* source, int64_t count, float factor, float scale, char* target) {
  const Float factors = broadcast(factor), scales = broadcast(scale);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Float value = Element::load_lanes(source + i * Element::kBytes);
    const Float scaled = kDivides ? value / scales : value * factors;
    store_low_bytes(target + i, fp8_bits<Format>(value, scaled));
  }
  for (; i < count; ++i) {
    typename Element::Stored stored;
    std::memcpy(&stored, source + i * Element::kBytes, sizeof stored);
    target[i] = static_cast<char>(float_to_fp8<Format>(Element::load_one(stored), scale));
  }
}

// Dividing by a power of two is multiplying by another, to the last bit, and takes less time.
template <class Element, class Format>
inline void quantise_by(const char* source, int64_t count, float scale, char* target) {
  constexpr uint32_t kMantissa = 0x007FFFFF, kLeast = 0x01000000, kMost = 0x7E000000;
  const uint32_t bits = float_bits(scale);
  if ((bits & kMantissa) == 0 && kLeast <= bits && bits <= kMost) {
    quantise_elements<Element, Format, false>(source, count, 1.0f / scale, scale, target);
  } else {
    quantise_elements<Element, Format, true>(source, count, 0.0f, scale, target);
  }
}

template <class Format>
inline void quantise_into(
    ScalarType from, const char* source, int64_t count, float scale, char* target) {
  switch (from) {
    case ScalarType::BFloat16:
      return quantise_by<Bfloat16, Format>(source, count, scale, target);
    case ScalarType::Half:
      return quantise_by<Float16, Format>(source, count, scale, target);
    default:
      quantise_by<Float32, Format>(source, count, scale, target);
  }
}

void quantise_run(
    ScalarType from, ScalarType to, const char* source, int64_t count, float scale, char* target) {
  if (to == ScalarType::Float8_e4m3fn) {
    return quantise_into<Float8E4M3FN>(from, source, count, scale, target);
  }
  quantise_into<Float8E5M2>(from, source, count, scale, target);
}

void load_run(ScalarType dtype, const char* source, int64_t count, float* target) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return load_elements<Bfloat16>(source, count, target);
    case ScalarType::Half:
      return load_elements<Float16>(source, count, target);
    case ScalarType::Float8_e4m3fn:
      return load_elements<Fp8<Float8E4M3FN>>(source, count, target);
    case ScalarType::Float8_e5m2:
      return load_elements<Fp8<Float8E5M2>>(source, count, target);
    default:
      std::memcpy(target, source, static_cast<size_t>(count) * sizeof(float));
  }
}

void store_run(ScalarType dtype, const float* source, int64_t count, float scale, char* target) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return store_elements<Bfloat16>(source, count, target);
    case ScalarType::Half:
      return store_elements<Float16>(source, count, target);
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2:
      return quantise_run(
          ScalarType::Float, dtype, reinterpret_cast<const char*>(source), count, scale, target);
    default:
      std::memcpy(target, source, static_cast<size_t>(count) * sizeof(float));
  }
}

// Copies whole lines past the caches, so that they are not read before they are written, and asks for
// those at `ahead`.
void stream_run(char* target, const char* source, const char* ahead, int64_t bytes) {
#ifdef TORCH_PAGEDKV_STREAMS
  if (reinterpret_cast<uintptr_t>(target) % 64 == 0 && bytes % 64 == 0) {
    for (int64_t line = 0; line < bytes; line += 64) {
      __builtin_prefetch(ahead + line);
      for (int64_t i = line; i < line + 64; i += kLanes * 4) {
        stream_bits(target + i, load_bits(source + i));
      }
    }
    return;
  }
#endif
  (void)ahead;
  std::memcpy(target, source, static_cast<size_t>(bytes));
}

// Makes what was streamed visible to other threads as ordinary stores are.
void finish_streams() {
#ifdef TORCH_PAGEDKV_STREAMS
  _mm_sfence();
#endif
}
