// Vectors of 256 bits: AVX2, FMA and F16C.
//
// A body, not a header: a file of kernels includes it inside of its own namespace.

#define TORCH_PAGEDKV_STREAMS

inline constexpr int kLanes = 8;
inline constexpr int kTileRows = 6, kTileVectors = 2;  // registers of a product's tile
inline constexpr int kBlocksOfHead = 2;  // that are taken of a head before the next one

typedef float Float __attribute__((vector_size(32)));
typedef uint32_t Bits __attribute__((vector_size(32)));
typedef int32_t Int __attribute__((vector_size(32)));

inline Float multiply_add(Float a, Float b, Float c) {
  return (Float)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

// The second where either is a NaN.
inline Float larger(Float a, Float b) { return (Float)_mm256_max_ps((__m256)a, (__m256)b); }
inline Float smaller(Float a, Float b) { return (Float)_mm256_min_ps((__m256)a, (__m256)b); }

// Each block of four lanes filled with its largest.
inline Float largest_of_four(Float x) {
  x = larger(x, (Float)_mm256_permute_ps((__m256)x, 0x4E));
  return larger(x, (Float)_mm256_permute_ps((__m256)x, 0xB1));
}

inline float largest_lane(Float x) {
  const Float four = largest_of_four(x);
  return four[0] > four[4] ? four[0] : four[4];
}

inline float sum_lanes(Float x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// Lane 4 * i + j is the sum of the lanes of sums[i][j].
[[gnu::always_inline]] inline Float sum_each(const Float (&sums)[2][4]) {
  __m256 rows[2];
  for (int i = 0; i < 2; ++i) {
    rows[i] = _mm256_hadd_ps(
        _mm256_hadd_ps((__m256)sums[i][0], (__m256)sums[i][1]),
        _mm256_hadd_ps((__m256)sums[i][2], (__m256)sums[i][3]));
  }
  return (Float)_mm256_add_ps(
      _mm256_permute2f128_ps(rows[0], rows[1], 0x20),
      _mm256_permute2f128_ps(rows[0], rows[1], 0x31));
}

inline __m128i load_128(const char* source) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
}

inline Float load_bfloat16(const char* source) {
  return (Float)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(source)), 16);
}

inline Float load_half(const char* source) { return (Float)_mm256_cvtph_ps(load_128(source)); }

// Either format is a float16 but for its bias and the NaN of e4m3, which knows no infinity.
template <class Format>
inline Float load_fp8(const char* source) {
  const __m128i bytes =
      _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source)));
  if constexpr (Format::kHasInfinity) {
    return (Float)_mm256_cvtph_ps(_mm_slli_epi16(bytes, 8));
  } else {
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(bytes, _mm_set1_epi16(0x80)), 8);
    const __m128i magnitude = _mm_and_si128(bytes, _mm_set1_epi16(0x7F));
    const __m128i is_nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7F));
    const __m128i half = _mm_or_si128(
        _mm_or_si128(_mm_slli_epi16(magnitude, 7), sign),
        _mm_and_si128(is_nan, _mm_set1_epi16(0x7E00)));
    return (Float)_mm256_cvtph_ps(half) * 256.0f;
  }
}

inline void store_128(char* target, __m128i x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), x);
}

// The low 16 bits of each lane.
inline __m128i low_halves(Bits x) {
  const __m256i packed = _mm256_packus_epi32((__m256i)x, _mm256_setzero_si256());
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

inline void store_low_halves(char* target, Bits x) { store_128(target, low_halves(x)); }

inline void store_half(char* target, Float x) {
  store_128(target, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}

inline void store_low_bytes(char* target, Bits x) {
  const __m128i bytes = _mm_packus_epi16(low_halves(x), _mm_setzero_si128());
  _mm_storel_epi64(reinterpret_cast<__m128i*>(target), bytes);
}

inline void stream_bits(char* target, Bits x) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(target), (__m256i)x);
}
