// Attention of many query rows: bound by arithmetic, as two matrix products for each tile of keys.
//
// A body, not a header: a file of kernels includes it inside of its own namespace.
//
// A tile's keys are laid out transposed and its values one after the other, both as units, so that
// either product adds a broadcast factor times a vector: scores += query[k] * keys[k], and
// sums += weight[n] * values[n]. Each result is one chain of sums in the order of k or n, whatever
// rows it is computed with.

// results[kRows][kVectors] (+)= factors[kRows][low..high) x vectors[low..high)[kVectors].
template <class Units, bool kAdds, int kRows, int kVectors>
inline void multiply_tile(
    const uint32_t* factors,
    int64_t factors_stride,
    const uint32_t* vectors,
    int64_t vectors_stride,
    int64_t low,
    int64_t high,
    float* results,
    int64_t results_stride) {
  Float sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[i][v] = kAdds ? load(results + i * results_stride + v * kLanes) : Float{};
    }
  }
  for (int64_t k = low; k < high; ++k) {
    Bits vector[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) vector[v] = load_bits(vectors + k * vectors_stride + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Bits factor = broadcast_bits(factors[i * factors_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sums[i][v] = Units::multiply_add_units(factor, vector[v], sums[i][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(results + i * results_stride + v * kLanes, sums[i][v]);
  }
}

// The same for any number of vectors.
template <class Units, bool kAdds, int kRows>
inline void multiply(
    const uint32_t* factors,
    int64_t factors_stride,
    const uint32_t* vectors,
    int64_t vectors_stride,
    int64_t low,
    int64_t high,
    float* results,
    int64_t results_stride,
    int64_t first_vector,
    int64_t last_vector) {
  int64_t v = first_vector;
  for (; v + kTileVectors <= last_vector; v += kTileVectors) {
    multiply_tile<Units, kAdds, kRows, kTileVectors>(
        factors,
        factors_stride,
        vectors + v * kLanes,
        vectors_stride,
        low,
        high,
        results + v * kLanes,
        results_stride);
  }
  for (; v < last_vector; ++v) {
    multiply_tile<Units, kAdds, kRows, 1>(
        factors,
        factors_stride,
        vectors + v * kLanes,
        vectors_stride,
        low,
        high,
        results + v * kLanes,
        results_stride);
  }
}

// Lanes of kLanes vectors become vectors of kLanes lanes.
inline void transpose(Bits (&rows)[kLanes]) {
  // Interleaving the first half with the second as often as there are bits in a row's number.
  Int low, high;
  for (int lane = 0; lane < kLanes; ++lane) {
    low[lane] = lane / 2 + (lane % 2 ? kLanes : 0);
    high[lane] = low[lane] + kLanes / 2;
  }
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
    Bits mixed[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      mixed[2 * i] = __builtin_shuffle(rows[i], rows[i + kLanes / 2], low);
      mixed[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + kLanes / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = mixed[i];
  }
}

template <class Units>
class ManyRows {
 public:
  ManyRows(const Attention& attention, const AttentionItem& item, Carver carver)
      : attention_(attention),
        item_(item),
        first_position_(item.position(attention, item.first_token)),
        group_(attention.group()),
        rows_(item.tokens * group_),
        padded_rows_((rows_ + kTileRows - 1) / kTileRows * kTileRows),
        key_steps_(steps_of<Units>(attention.key_pool.dim)),
        value_steps_(steps_of<Units>(attention.value_pool.dim)),
        query_units_(key_steps_ * Units::kStep / Units::kPair),
        sum_units_(value_steps_ * Units::kStep),
        queries_(carver.take<uint32_t>(padded_rows_ * query_units_)),
        sums_(carver.take<float>(padded_rows_ * sum_units_)),
        scores_(carver.take<float>(padded_rows_ * kTile)),
        tile_keys_(carver.take<uint32_t>(query_units_ * kTile)),
        tile_values_(carver.take<uint32_t>(kTile / Units::kPair * sum_units_)),
        own_values_(carver.take<uint32_t>(kTile / Units::kPair * sum_units_)),
        ranges_(carver.take<KeyRange>(padded_rows_)),
        softmax_(carver.take<RowSoftmax>(padded_rows_)),
        row_(carver.take<float>(
            attention.key_pool.dim > attention.value_pool.dim ? padded(attention.key_pool.dim)
                                                              : padded(attention.value_pool.dim))),
        keys_(attention.key_pool, Units(), carver),
        values_(attention.value_pool, Units(), carver) {
    tokens_.keys = carver.take<const char*>(kTile);
    tokens_.values = carver.take<const char*>(kTile);
  }

  void run() {
    begin_rows();
    const KeyRange used = item_.visible(attention_);
    for (int64_t tile = used.low / kTile * kTile; tile < used.high; tile += kTile) {
      look_up(attention_, item_, tile, used, tokens_);
      keys_.take(tokens_.keys, 0, tokens_.first, tokens_.last, false);
      values_.take(tokens_.values, 0, tokens_.first, tokens_.last, true);
      lay_out_keys();
      for (int64_t row = 0; row < padded_rows_; row += kTileRows) score_rows(row, tile);
      lay_out_values(tile_values_);
      const bool all_finite = are_finite(tile_values_);
      for (int64_t row = 0; row < padded_rows_; row += kTileRows) add_rows(row, tile, all_finite);
    }
    for (int64_t row = 0; row < rows_; ++row) {
      order_sums<Units>(sums_ + row * sum_units_, Units::kStep, attention_.value_pool.dim, row_);
      const float denominator = sum_lanes(softmax_[row].denominator);
      item_.finish_row(
          attention_,
          item_.first_token + row / group_,
          query_head(row),
          ranges_[row].is_empty(),
          {softmax_[row].maximum, denominator},
          row_);
    }
  }

 private:
  struct RowSoftmax {
    Float denominator;  // its parts in each lane
    float maximum, slope;
  };

  struct Part {
    int first, last;
    bool is_empty() const { return first >= last; }
  };

  int64_t query_head(int64_t row) const { return item_.first_kv_head * group_ + row % group_; }

  void begin_rows() {
    std::memset(sums_, 0, static_cast<size_t>(padded_rows_ * sum_units_) * sizeof(float));
    std::memset(queries_, 0, static_cast<size_t>(padded_rows_ * query_units_) * sizeof(uint32_t));
    for (int64_t row = 0; row < padded_rows_; ++row) {
      ranges_[row] = {0, 0};
      softmax_[row] = RowSoftmax{};
      if (row >= rows_) continue;
      ranges_[row] = item_.visible_to(attention_, item_.first_token + row / group_);
      const SoftmaxState state = attention_.first_state(query_head(row));
      softmax_[row].maximum = item_.is_first_chunk ? state.maximum : -kInfinity;
      softmax_[row].denominator[0] = item_.is_first_chunk ? state.denominator : 0.0f;
      softmax_[row].slope = attention_.slopes[query_head(row)];
      load_query<Units, 1>(
          attention_,
          item_.first_token + row / group_,
          query_head(row),
          row_,
          queries_ + row * query_units_,
          sizeof(Bits));
    }
  }

  Part part_of_tile(int64_t row, int64_t tile) const {
    const auto within = [](int64_t part) {
      return static_cast<int>(part < 0 ? 0 : part > kTile ? kTile : part);
    };
    return {within(ranges_[row].low - tile), within(ranges_[row].high - tile)};
  }

  // What any of the rows sees of a tile, in whole vectors of keys.
  Part part_of_rows(int64_t first_row, int64_t tile) const {
    Part all{kTile, 0};
    for (int64_t row = first_row; row < first_row + kTileRows; ++row) {
      const Part part = part_of_tile(row, tile);
      if (part.is_empty()) continue;
      if (part.first < all.first) all.first = part.first;
      if (part.last > all.last) all.last = part.last;
    }
    return {all.first / kLanes * kLanes, (all.last + kLanes - 1) / kLanes * kLanes};
  }

  // tile_keys[unit][key]
  void lay_out_keys() {
    for (int first = 0; first < kTile; first += kLanes) {
      if (first + kLanes <= tokens_.first || first >= tokens_.last) continue;
      for (int64_t step = 0; step < key_steps_; ++step) {
        Bits units[Units::kKeyVectors][kLanes];
#pragma GCC unroll 16
        for (int n = 0; n < kLanes; ++n) {
          // Keys beside the used ones are copies of used ones: nobody looks at their scores.
          const int like = first + n < tokens_.first ? tokens_.first
                           : first + n < tokens_.last ? first + n
                                                      : tokens_.last - 1;
          Bits key[Units::kKeyVectors];
          Units::load_keys(keys_.rows[like] + step * Units::kStep * Units::kBytes, key);
          for (int v = 0; v < Units::kKeyVectors; ++v) units[v][n] = key[v];
        }
        for (int v = 0; v < Units::kKeyVectors; ++v) {
          transpose(units[v]);
          uint32_t* const target =
              tile_keys_ + (step * Units::kKeyVectors + v) * kLanes * kTile + first;
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) store_bits(target + i * kTile, units[v][i]);
        }
      }
    }
  }

  // tile_values[n / kPair][element], zeros where values_ has none.
  void lay_out_values(uint32_t* target) {
    for (int n = 0; n < kTile; n += Units::kPair) {
      uint32_t* const row = target + n / Units::kPair * sum_units_;
      const int begin = tokens_.first / kBlockKeys * kBlockKeys;
      const int end = (tokens_.last + kBlockKeys - 1) / kBlockKeys * kBlockKeys;
      if (n < begin || n >= end) {
        std::memset(row, 0, static_cast<size_t>(sum_units_) * sizeof(uint32_t));
        continue;
      }
      for (int64_t step = 0; step < value_steps_; ++step) {
        Bits units[Units::kValueVectors];
        Units::load_values(values_.rows + n, step * Units::kStep * Units::kBytes, units);
        for (int v = 0; v < Units::kValueVectors; ++v) {
          store_bits(row + (step * Units::kValueVectors + v) * kLanes, units[v]);
        }
      }
    }
  }

  // Whether no unit holds an infinity or a NaN, which not even a weight of 0 makes harmless.
  bool are_finite(const uint32_t* values) const {
    Bits found = {};
    for (int64_t i = 0; i < kTile / Units::kPair * sum_units_; i += kLanes) {
      const Bits units = load_bits(values + i);
      if constexpr (Units::kPair == 1) {
        found |= (Bits)((units & 0x7F800000u) == 0x7F800000u);
      } else {
        found |= (Bits)((units & 0x7F800000u) == 0x7F800000u);
        found |= (Bits)((units & 0x7F80u) == 0x7F80u);
      }
    }
    uint32_t any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= found[lane];
    return any == 0;
  }

  void score_rows(int64_t row, int64_t tile) {
    const Part part = part_of_rows(row, tile);
    if (part.is_empty()) return;
    multiply<Units, false, kTileRows>(
        queries_ + row * query_units_,
        query_units_,
        tile_keys_,
        kTile,
        0,
        query_units_,
        scores_ + row * kTile,
        kTile,
        part.first / kLanes,
        part.last / kLanes);
  }

  void add_rows(int64_t first_row, int64_t tile, bool all_finite) {
    const Part part = part_of_rows(first_row, tile);
    if (part.is_empty()) return;
    bool is_uniform = true;
    for (int64_t row = first_row; row < first_row + kTileRows; ++row) {
      const Part own = part_of_tile(row, tile);
      is_uniform = is_uniform && own.first <= tokens_.first && own.last >= tokens_.last;
      weigh(row, own, part, tile);
    }
    if (is_uniform || all_finite) {
      add_weighted<kTileRows>(first_row, part, tile_values_);
      return;
    }
    for (int64_t row = first_row; row < first_row + kTileRows; ++row) {
      const Part own = part_of_tile(row, tile);
      if (own.is_empty()) continue;
      values_.take(tokens_.values, 0, own.first, own.last, true);
      hide_values_outside(own);
      lay_out_values(own_values_);
      add_weighted<1>(row, part, own_values_);
    }
  }

  void hide_values_outside(const Part& part) {
    for (int n = 0; n < kTile; ++n) {
      if (n < part.first || n >= part.last) values_.rows[n] = values_.zeros();
    }
  }

  template <int kRows>
  void add_weighted(int64_t row, const Part& part, const uint32_t* values) {
    multiply<Units, true, kRows>(
        reinterpret_cast<const uint32_t*>(scores_ + row * kTile),
        kTile,
        values,
        sum_units_,
        part.first / Units::kPair,
        part.last / Units::kPair,
        sums_ + row * sum_units_,
        sum_units_,
        0,
        sum_units_ / kLanes);
  }

  // Turns a row's dots into weights of its own keys, and zeros for the rest of the rows' part.
  void weigh(int64_t row, const Part& own, const Part& part, int64_t tile) {
    float* const scores = scores_ + row * kTile;
    uint32_t* const weights = reinterpret_cast<uint32_t*>(scores);
    RowSoftmax& softmax = softmax_[row];
    const bool is_masked = own.first > part.first || own.last < part.last;
    const Float maximum = is_masked ? broadcast(score_row<true>(row, own, part, tile))
                                    : broadcast(score_row<false>(row, own, part, tile));
    Float total = {};
    for (int n = part.first; n < part.last; n += kLanes) {
      Float weight = exp_of_nonpositive(load(scores + n) - maximum);
      if (is_masked) {
        const Int keys = lane_numbers() + n;
        weight = select((keys >= own.first) & (keys < own.last), weight, Float{});
      }
      total += weight;
      if constexpr (Units::kPair == 1) {
        store_bits(weights + n, (Bits)weight);
      } else {
#ifdef TORCH_PAGEDKV_AVX512_BF16
        store_bfloat16_pairs(weights + n / 2, weight);
#endif
      }
    }
    if (own.is_empty()) return;
    if (maximum[0] > softmax.maximum) {
      const float decay =
          exp_of_nonpositive(broadcast(softmax.maximum) - maximum)[0];
      softmax.maximum = maximum[0];
      softmax.denominator *= decay;
      float* const sums = sums_ + row * sum_units_;
      for (int64_t d = 0; d < sum_units_; d += kLanes) store(sums + d, load(sums + d) * decay);
    }
    softmax.denominator += total;
  }

  // Turns a row's dots into scores and returns its new maximum.
  template <bool kMasked>
  float score_row(int64_t row, const Part& own, const Part& part, int64_t tile) {
    float* const scores = scores_ + row * kTile;
    const RowSoftmax& softmax = softmax_[row];
    const ScoreRule rule{
        attention_.score_scale(item_.first_kv_head),
        attention_.softcap,
        attention_.softcap == 0.0f && softmax.slope == 0.0f};
    const int32_t distance = static_cast<int32_t>(tile - (first_position_ + row / group_));
    Float largest = broadcast(-kInfinity);
    for (int n = part.first; n < part.last; n += kLanes) {
      Float score = load(scores + n);
      if (rule.is_plain) {
        score = clamp_to_finite(score * rule.scale);
      } else {
        const Float distances = __builtin_convertvector(lane_numbers() + (distance + n), Float);
        score = score_of(score, rule, broadcast(softmax.slope), distances);
      }
      if (kMasked) {
        const Int keys = lane_numbers() + n;
        score = select((keys >= own.first) & (keys < own.last), score, broadcast(-kInfinity));
      }
      largest = larger(score, largest);
      store(scores + n, score);
    }
    const float most = largest_lane(largest);
    return most > softmax.maximum ? most : softmax.maximum;
  }

  const Attention& attention_;
  const AttentionItem& item_;
  const int64_t first_position_, group_, rows_, padded_rows_;
  const int64_t key_steps_, value_steps_, query_units_, sum_units_;
  uint32_t* const queries_;
  float* const sums_;
  float* const scores_;
  uint32_t* const tile_keys_;
  uint32_t* const tile_values_;
  uint32_t* const own_values_;
  KeyRange* const ranges_;
  RowSoftmax* const softmax_;
  float* const row_;
  TileRows keys_, values_;
  TileTokens tokens_;
};
