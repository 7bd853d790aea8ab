// Runs of elements of any dtype to float32 and back.
//
// A body, not a header: a file of kernels includes it inside of its own namespace.

// Whole vectors by `many(index)`, then what is left over by `one(index)`.
template <class Many, class One>
inline void in_vectors(int64_t count, Many many, One one) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) many(i);
  for (; i < count; ++i) one(i);
}

template <class Stored, class Convert, class ConvertOne>
inline void load_elements(
    const char* source, int64_t count, float* target, Convert convert, ConvertOne convert_one) {
  constexpr int64_t kBytes = sizeof(Stored);
  in_vectors(
      count,
      [&](int64_t i) { store(target + i, convert(source + i * kBytes)); },
      [&](int64_t i) {
        Stored stored;
        std::memcpy(&stored, source + i * kBytes, sizeof stored);
        target[i] = convert_one(stored);
      });
}

template <class Stored, class Convert, class ConvertOne>
inline void store_elements(
    const float* source, int64_t count, char* target, Convert convert, ConvertOne convert_one) {
  constexpr int64_t kBytes = sizeof(Stored);
  in_vectors(
      count,
      [&](int64_t i) { convert(target + i * kBytes, load(source + i)); },
      [&](int64_t i) {
        const Stored stored = convert_one(source[i]);
        std::memcpy(target + i * kBytes, &stored, sizeof stored);
      });
}

template <class Format>
inline void store_fp8(const float* source, int64_t count, float scale, char* target) {
  const Float scales = broadcast(scale);
  store_elements<uint8_t>(
      source,
      count,
      target,
      [&](char* to, Float x) { store_low_bytes(to, fp8_bits<Format>(x, scales)); },
      [&](float x) { return float_to_fp8<Format>(x, scale); });
}

void load_run(ScalarType dtype, const char* source, int64_t count, float* target) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return load_elements<uint16_t>(source, count, target, load_bfloat16, bfloat16_to_float);
    case ScalarType::Half:
      return load_elements<uint16_t>(source, count, target, load_half, half_to_float);
    case ScalarType::Float8_e4m3fn:
      return load_elements<uint8_t>(
          source, count, target, load_fp8<Float8E4M3FN>, fp8_to_float<Float8E4M3FN>);
    case ScalarType::Float8_e5m2:
      return load_elements<uint8_t>(
          source, count, target, load_fp8<Float8E5M2>, fp8_to_float<Float8E5M2>);
    default:
      std::memcpy(target, source, static_cast<size_t>(count) * sizeof(float));
  }
}

void store_run(ScalarType dtype, const float* source, int64_t count, float scale, char* target) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return store_elements<uint16_t>(source, count, target, store_bfloat16, float_to_bfloat16);
    case ScalarType::Half:
      return store_elements<uint16_t>(source, count, target, store_half, float_to_half);
    case ScalarType::Float8_e4m3fn:
      return store_fp8<Float8E4M3FN>(source, count, scale, target);
    case ScalarType::Float8_e5m2:
      return store_fp8<Float8E5M2>(source, count, scale, target);
    default:
      std::memcpy(target, source, static_cast<size_t>(count) * sizeof(float));
  }
}

// Through a piece that stays in the fastest cache.
void quantise_run(
    ScalarType from, ScalarType to, const char* source, int64_t count, float scale, char* target) {
  float piece[kPiece];
  const int64_t element_size = from == ScalarType::Float ? 4 : 2;
  for (int64_t i = 0; i < count; i += kPiece) {
    const int64_t length = count - i < kPiece ? count - i : kPiece;
    load_run(from, source + i * element_size, length, piece);
    store_run(to, piece, length, scale, target + i);
  }
}
