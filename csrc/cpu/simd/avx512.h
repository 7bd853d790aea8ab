// Vectors of 512 bits: AVX-512 F, BW, VL and DQ, and where the file says so BF16 and VBMI.
//
// A body, not a header: a file of kernels includes it inside of its own namespace.

#define TORCH_PAGEDKV_STREAMS

inline constexpr int kLanes = 16;
inline constexpr int kTileRows = 6, kTileVectors = 4;  // registers of a product's tile
// Blocks of keys or values that are taken of a head before the next one. Of more of them sums are loaded and stored
// less often; from the memory of AMD's CPUs, on which bfloat16 is multiplied, few of them come sooner.
#ifdef TORCH_PAGEDKV_AVX512_BF16
inline constexpr int kBlocksOfHead = 2;
#else
inline constexpr int kBlocksOfHead = 8;
#endif

typedef float Float __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef int32_t Int __attribute__((vector_size(64)));

inline Float multiply_add(Float a, Float b, Float c) {
  return (Float)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

// The second where either is a NaN.
inline Float larger(Float a, Float b) { return (Float)_mm512_max_ps((__m512)a, (__m512)b); }
inline Float smaller(Float a, Float b) { return (Float)_mm512_min_ps((__m512)a, (__m512)b); }

// Each block of four lanes filled with its largest.
inline Float largest_of_four(Float x) {
  x = larger(x, (Float)_mm512_permute_ps((__m512)x, 0x4E));
  return larger(x, (Float)_mm512_permute_ps((__m512)x, 0xB1));
}

inline float largest_lane(Float x) {
  x = larger(x, (Float)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4E));
  x = larger(x, (Float)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0xB1));
  return largest_of_four(x)[0];
}

inline float sum_lanes(Float x) { return _mm512_reduce_add_ps((__m512)x); }

// Four partial sums of each of four vectors, one vector's after the other's.
inline __m512 quarter_sums(const Float (&x)[4]) {
  const __m512 a = (__m512)x[0], b = (__m512)x[1], c = (__m512)x[2], d = (__m512)x[3];
  const __m512 ab =
      _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  const __m512 cd =
      _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
  return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
}

inline __m512 add_pairs(__m512 a, __m512 b) {
  const __m512d even = _mm512_castps_pd(a), odd = _mm512_castps_pd(b);
  return _mm512_add_ps(
      _mm512_castpd_ps(_mm512_unpacklo_pd(even, odd)),
      _mm512_castpd_ps(_mm512_unpackhi_pd(even, odd)));
}

// Adds what is left, two parts of each of four rows' sums in every quarter, and puts rows after rows.
inline Float sum_quarters(__m512 low, __m512 high) {
  const __m512 of_keys =
      _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xDD));
  const __m512i by_rows = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return (Float)_mm512_permutexvar_ps(by_rows, of_keys);
}

// Lane 4 * i + j is the sum of the lanes of sums[i][j]. (Written without a loop, and inlined: the
// compiler would put the sums into memory.)
[[gnu::always_inline]] inline Float sum_each(const Float (&sums)[4][4]) {
  const __m512 low = add_pairs(quarter_sums(sums[0]), quarter_sums(sums[1]));
  const __m512 high = add_pairs(quarter_sums(sums[2]), quarter_sums(sums[3]));
  return sum_quarters(low, high);
}

inline __m512i load_512(const char* source) { return _mm512_loadu_si512(source); }
inline __m256i load_256(const char* source) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
}

inline Float load_bfloat16(const char* source) {
  return (Float)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(source)), 16);
}

inline Float load_half(const char* source) { return (Float)_mm512_cvtph_ps(load_256(source)); }

// Either format is a float16 but for its bias and the NaN of e4m3, which knows no infinity.
template <class Format>
inline Float load_fp8(const char* source) {
  const __m256i bytes =
      _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
  if constexpr (Format::kHasInfinity) {
    return (Float)_mm512_cvtph_ps(_mm256_slli_epi16(bytes, 8));
  } else {
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(0x80)), 8);
    const __m256i magnitude = _mm256_and_si256(bytes, _mm256_set1_epi16(0x7F));
    const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7F));
    const __m256i finite = _mm256_slli_epi16(magnitude, 7);
    const __m256i half =
        _mm256_or_si256(_mm256_mask_mov_epi16(finite, is_nan, _mm256_set1_epi16(0x7E00)), sign);
    return (Float)_mm512_cvtph_ps(half) * 256.0f;
  }
}

inline void store_low_halves(char* target, Bits x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi32_epi16((__m512i)x));
}

inline void store_half(char* target, Float x) {
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(target),
      _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline void store_low_bytes(char* target, Bits x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm512_cvtepi32_epi8((__m512i)x));
}

inline void stream_bits(char* target, Bits x) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(target), (__m512i)x);
}

#ifdef TORCH_PAGEDKV_AVX512_BF16

// Four partial sums of each half of two vectors, one half's after the other's.
inline __m512 quarter_sums(const Float (&x)[2]) {
  const __m512 a = (__m512)x[0], b = (__m512)x[1];
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

// The same where the first half of sums[i][j] is summed for 2 * j and the other one for 2 * j + 1.
[[gnu::always_inline]] inline Float sum_each(const Float (&sums)[4][2]) {
  const __m512 low = add_pairs(quarter_sums(sums[0]), quarter_sums(sums[1]));
  const __m512 high = add_pairs(quarter_sums(sums[2]), quarter_sums(sums[3]));
  return sum_quarters(low, high);
}

// c + the products of two pairs of bfloat16 in each lane; subnormal factors count as 0.
inline Float dot_bfloat16(Bits a, Bits b, Float c) {
  return (Float)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}

// Adjacent lanes as pairs of bfloat16, in half as many lanes.
inline void store_bfloat16_pairs(uint32_t* target, Float x) {
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(target), (__m256i)_mm512_cvtneps_pbh((__m512)x));
}

#endif

#ifdef TORCH_PAGEDKV_AVX512_VBMI

// Each byte of a bfloat16 for each of the 128 magnitudes of an fp8 format.
template <class Format>
struct BfloatTable {
  alignas(64) uint8_t low[128] = {}, high[128] = {};

  constexpr BfloatTable() {
    for (int i = 0; i < 128; ++i) {
      low[i] = static_cast<uint8_t>(fp8_table<Format>()[i] >> 16);
      high[i] = static_cast<uint8_t>(fp8_table<Format>()[i] >> 24);
    }
  }
};

template <class Format>
inline constexpr BfloatTable<Format> kBfloatTable;

// 64 fp8 elements as bfloat16. Of the 16 bytes at 16 * i, the first eight become lanes 4 * i to
// 4 * i + 3 of `first`, the others those of `second`.
template <class Format>
inline void fp8_to_bfloat16(__m512i bytes, Bits& first, Bits& second) {
  const auto& table = kBfloatTable<Format>;
  const __m512i low = _mm512_permutex2var_epi8(
      _mm512_load_si512(table.low), bytes, _mm512_load_si512(table.low + 64));
  const __m512i high = _mm512_permutex2var_epi8(
      _mm512_load_si512(table.high), bytes, _mm512_load_si512(table.high + 64));
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  const __m512i signed_high = _mm512_ternarylogic_epi32(high, bytes, sign, 0xF8);  // a | (b & c)
  first = (Bits)_mm512_unpacklo_epi8(low, signed_high);
  second = (Bits)_mm512_unpackhi_epi8(low, signed_high);
}

#endif
