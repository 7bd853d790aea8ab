// Vectors of 128 bits without intrinsics: what every x86-64 and every aarch64 has.
//
// A body, not a header: a file of kernels includes it inside of its own namespace.

#define TORCH_PAGEDKV_PORTABLE
#ifdef __SSE2__
#define TORCH_PAGEDKV_STREAMS
#endif

inline constexpr int kLanes = 4;
#ifdef __aarch64__
inline constexpr int kTileRows = 6, kTileVectors = 4;  // registers of a product's tile
#else
inline constexpr int kTileRows = 4, kTileVectors = 2;
#endif
inline constexpr int kBlocksOfHead = 2;  // that are taken of a head before the next one

typedef float Float __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));
typedef int32_t Int __attribute__((vector_size(16)));

inline Float multiply_add(Float a, Float b, Float c) {
#ifdef __aarch64__
  return (Float)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The second where either is a NaN.
inline Float larger(Float a, Float b) { return a > b ? a : b; }
inline Float smaller(Float a, Float b) { return a < b ? a : b; }

// Each block of four lanes filled with its largest.
inline Float largest_of_four(Float x) {
  x = larger(x, __builtin_shuffle(x, Int{2, 3, 0, 1}));
  return larger(x, __builtin_shuffle(x, Int{1, 0, 3, 2}));
}

inline float largest_lane(Float x) { return largest_of_four(x)[0]; }
inline float sum_lanes(Float x) { return (x[0] + x[2]) + (x[1] + x[3]); }

// Lane j is the sum of the lanes of sums[0][j].
[[gnu::always_inline]] inline Float sum_each(const Float (&sums)[1][4]) {
  const Int low = {0, 4, 1, 5}, high = {2, 6, 3, 7};
  const Float even = __builtin_shuffle(sums[0][0], sums[0][2], low) +
                     __builtin_shuffle(sums[0][0], sums[0][2], high);
  const Float odd = __builtin_shuffle(sums[0][1], sums[0][3], low) +
                    __builtin_shuffle(sums[0][1], sums[0][3], high);
  return __builtin_shuffle(even, odd, low) + __builtin_shuffle(even, odd, high);
}

inline Bits load_halves(const char* source) {
  uint16_t stored[4];
  std::memcpy(stored, source, sizeof stored);
  return Bits{stored[0], stored[1], stored[2], stored[3]};
}

inline Float load_bfloat16(const char* source) { return (Float)(load_halves(source) << 16); }

// half_to_float of four.
inline Float load_half(const char* source) {
  const Int half = (Int)load_halves(source), shifted = (half & 0x7FFF) << 13;
  const Int rebias = Int{} + (112 << 23), smallest_normal = Int{} + 0x38800000;
  const Int normal = shifted + rebias + (rebias & (shifted >= 0x0F800000));  // with infinities and NaN
  const Int subnormal = (Int)((Float)(shifted + smallest_normal) - (Float)smallest_normal);
  const Int magnitude = shifted < 0x00800000 ? subnormal : normal;
  return (Float)(magnitude | (half & 0x8000) << 16);
}

template <class Format>
inline Float load_fp8(const char* source) {
  Float result;
  for (int i = 0; i < 4; ++i) result[i] = fp8_to_float<Format>(static_cast<uint8_t>(source[i]));
  return result;
}

inline void store_low_halves(char* target, Bits x) {
  uint16_t stored[4];
  for (int i = 0; i < 4; ++i) stored[i] = static_cast<uint16_t>(x[i]);
  std::memcpy(target, stored, sizeof stored);
}

inline void store_half(char* target, Float x) {
  uint16_t stored[4];
  for (int i = 0; i < 4; ++i) stored[i] = float_to_half(x[i]);
  std::memcpy(target, stored, sizeof stored);
}

inline void store_low_bytes(char* target, Bits x) {
  for (int i = 0; i < 4; ++i) target[i] = static_cast<char>(x[i]);
}

#ifdef __SSE2__
inline void stream_bits(char* target, Bits x) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(target), (__m128i)x);
}
#endif
