// Attention of few query rows: bound by memory, so that each key and value is read once, where it is.
//
// A body, not a header: a file of kernels includes it inside of its own namespace.
//
// All query heads of a KV head go through a key or value while it is in the fastest cache, and
// meanwhile the rows of the next tile are fetched into the second one. KV heads are taken
// together, tile by tile, because they share pages of memory.
//
// Where a token's heads are neighbours and their rows wide, keys and then values of a tile are taken in
// the order of memory instead, all heads of kBlocksOfHead blocks after those of the blocks before, and rows are
// fetched as many tokens ahead. Of fp8 only the keys are.

// Blocks of values whose elements are taken in several passes before the next.
inline constexpr int kBlocksOfAPass = 8;

template <class Units, bool kByToken>
class FewRows {
 public:
  FewRows(const Attention& attention, const AttentionItem& item, Carver carver)
      : attention_(attention),
        item_(item),
        first_position_(item.position(attention, item.first_token)),
        group_(attention.group()),
        rows_(item.tokens * group_),
        row_blocks_((rows_ + kBlockRows - 1) / kBlockRows),
        key_bytes_(attention.key_pool.row_bytes()),
        value_bytes_(attention.value_pool.row_bytes()),
        key_steps_(steps_of<Units>(attention.key_pool.dim)),
        value_steps_(steps_of<Units>(attention.value_pool.dim)),
        query_units_(key_steps_ * Units::kStep / Units::kPair * Units::kKeysTogether),
        sum_units_(value_steps_ * Units::kStep),
        queries_(carver.take<uint32_t>(item.kv_heads * row_blocks_ * kBlockRows * query_units_)),
        sums_(carver.take<float>(item.kv_heads * row_blocks_ * kBlockRows * sum_units_)),
        blocks_of_rows_(carver.take<RowBlock>(item.kv_heads * row_blocks_)),
        ranges_(carver.take<KeyRange>(rows_)),
        scores_(carver.take<float>(item.kv_heads * row_blocks_ * kTile * kBlockRows)),
        row_(carver.take<float>(
            attention.key_pool.dim > attention.value_pool.dim ? padded(attention.key_pool.dim)
                                                              : padded(attention.value_pool.dim))),
        keys_(attention.key_pool, Units(), carver),
        values_(attention.value_pool, Units(), carver) {
    for (TileTokens& tokens : tiles_) {
      tokens.keys = carver.take<const char*>(kTile);
      tokens.values = carver.take<const char*>(kTile);
    }
  }

  void run(const AttentionItem* next) {
    begin_rows();
    const KeyRange used = item_.visible(attention_);
    TileTokens* now = &tiles_[0];
    TileTokens* after = &tiles_[1];
    int64_t tile = used.low / kTile * kTile;
    if (tile < used.high) look_up(attention_, item_, tile, used, *now);
    for (; tile < used.high; tile += kTile) {
      const bool is_fetched = tile + kTile < used.high
                                  ? (look_up(attention_, item_, tile + kTile, used, *after), true)
                                  : next != nullptr && look_up_first(*next, *after);
      take_tile(tile, *now, is_fetched ? *after : *now);
      TileTokens* const done = now;
      now = after;
      after = done;
    }
    for (int64_t head = 0; head < item_.kv_heads; ++head) {
      for (int64_t row = 0; row < rows_; ++row) finish_row(head, row);
    }
  }

 private:
  int64_t query_head(int64_t head, int64_t row) const {
    return (item_.first_kv_head + head) * group_ + row % group_;
  }
  RowBlock& block_of(int64_t head, int64_t block) {
    return blocks_of_rows_[head * row_blocks_ + block];
  }
  // Those of a block of rows, the first step of all before their second one: one address serves.
  float* sums_of(int64_t head, int64_t block) {
    return sums_ + (head * row_blocks_ + block) * kBlockRows * sum_units_;
  }
  // The same of queries, by vectors.
  uint32_t* queries_of(int64_t head, int64_t block) {
    return queries_ + (head * row_blocks_ + block) * kBlockRows * query_units_;
  }

  void begin_rows() {
    for (int64_t row = 0; row < rows_; ++row) {
      ranges_[row] = item_.visible_to(attention_, item_.first_token + row / group_);
    }
    for (int64_t head = 0; head < item_.kv_heads; ++head) {
      for (int64_t block = 0; block < row_blocks_; ++block) begin_block(head, block);
    }
  }

  // Looks up the first tile of another item, if its rows can be fetched as those of this one.
  bool look_up_first(const AttentionItem& item, TileTokens& tokens) const {
    if (!item.has_few_rows(attention_) || item.kv_heads > item_.kv_heads) return false;
    const KeyRange used = item.visible(attention_);
    if (used.is_empty()) return false;
    look_up(attention_, item, used.low / kTile * kTile, used, tokens);
    return true;
  }

  void begin_block(int64_t head, int64_t block) {
    RowBlock& rows = block_of(head, block);
    rows = RowBlock{};
    std::memset(
        sums_of(head, block), 0, static_cast<size_t>(kBlockRows * sum_units_) * sizeof(float));
    for (int i = 0; i < kBlockRows; ++i) {
      const int64_t row = block * kBlockRows + i;
      if (row >= rows_) continue;
      const int64_t query_head_of_row = query_head(head, row);
      load_query<Units, Units::kKeysTogether>(
          attention_,
          item_.first_token + row / group_,
          query_head_of_row,
          row_,
          queries_of(head, block) + i * kLanes,
          kBlockRows * static_cast<int64_t>(sizeof(Bits)));
      const SoftmaxState state = attention_.first_state(query_head_of_row);
      for (int lane = i * kBlockKeys; lane < (i + 1) * kBlockKeys; ++lane) {
        rows.maximum[lane] = item_.is_first_chunk ? state.maximum : -kInfinity;
        rows.slopes[lane] = attention_.slopes[query_head_of_row];
      }
      if (item_.is_first_chunk) rows.denominator[i * kBlockKeys] = state.denominator;
    }
  }

  // The part of a tile that a row sees.
  int part_of_tile(int64_t position, int64_t tile) const {
    const int64_t part = position - tile;
    return static_cast<int>(part < 0 ? 0 : part > kTile ? kTile : part);
  }

  // Tells the blocks of rows what they see of a tile; returns whether all rows see all of [first, last).
  bool place_tile(int64_t tile, int first, int last) {
    bool is_uniform = true;
    for (int64_t block = 0; block < row_blocks_; ++block) {
      RowBlock& rows = block_of(0, block);
      for (int lane = 0; lane < kLanes; ++lane) {
        const int64_t row = block * kBlockRows + lane / kBlockKeys;
        const int64_t like = row < rows_ ? row : rows_ - 1;
        rows.positions[lane] = static_cast<int32_t>(tile - (first_position_ + like / group_));
        rows.low[lane] = part_of_tile(ranges_[like].low, tile);
        rows.high[lane] = part_of_tile(ranges_[like].high, tile);
      }
      is_uniform = is_uniform && rows.is_visible_to_all(first, last);
      for (int64_t head = 1; head < item_.kv_heads; ++head) {
        RowBlock& others = block_of(head, block);
        others.positions = rows.positions;
        others.low = rows.low;
        others.high = rows.high;
      }
    }
    return is_uniform;
  }

  void take_tile(int64_t tile, const TileTokens& tokens, const TileTokens& next) {
    const bool is_uniform = place_tile(tile, tokens.first, tokens.last);
    const bool is_whole =
        is_uniform && tokens.first % kBlockKeys == 0 && tokens.last % kBlockKeys == 0;
    next.look_up_pages();
    if constexpr (kByToken) {
      take_by_token(tokens, next, is_uniform, is_whole);
    } else {
      take_by_head(tokens, next, is_uniform, is_whole);
    }
  }

  void take_by_head(
      const TileTokens& tokens, const TileTokens& next, bool is_uniform, bool is_whole) {
    const int begin = tokens.begin_block(), end = tokens.end_block();
    for (int64_t head = 0; head < item_.kv_heads; ++head) {
      RowsAhead keys = keys_ahead(head, next.run_of(next.keys));
      RowsAhead values = values_ahead(head, next.run_of(next.values));
      take_keys(head, tokens, begin, end);
      take_values(head, tokens, begin, end);
      for (int64_t block = 0; block < row_blocks_; ++block) {
        score(head, block, begin, end, keys);
        weigh_and_add(head, block, tokens, begin, end, is_uniform, is_whole, values);
      }
      keys.fetch_all();
      values.fetch_all();
    }
  }

  void weigh_and_add(
      int64_t head,
      int64_t block,
      const TileTokens& tokens,
      int begin,
      int end,
      bool is_uniform,
      bool is_whole,
      RowsAhead& ahead) {
    weigh(head, block, begin, end, is_whole, ahead);
    if (is_uniform) {
      add(head, block, begin, end, ahead);
    } else {
      add_row_by_row(head, block, tokens, begin, end);
      take_values(head, tokens, begin, end);
    }
  }

  void take_by_token(
      const TileTokens& tokens, const TileTokens& next, bool is_uniform, bool is_whole) {
    const int begin = tokens.begin_block(), end = tokens.end_block();
    for (int from = begin; from < end; from += kBlocksOfHead) {
      const int to = from + kBlocksOfHead < end ? from + kBlocksOfHead : end;
      const TokenRun run = run_ahead(tokens.keys, tokens, next.keys, next, from, to);
      for (int64_t head = 0; head < item_.kv_heads; ++head) {
        RowsAhead ahead = keys_ahead(head, run);
        take_keys(head, tokens, from, to);
        for (int64_t block = 0; block < row_blocks_; ++block) score(head, block, from, to, ahead);
        ahead.fetch_all();
      }
    }
    if constexpr (Units::kBytes == 1) {
      // A few tokens' values are too few bytes to load and store sums for.
      for (int64_t head = 0; head < item_.kv_heads; ++head) {
        RowsAhead ahead = values_ahead(head, next.run_of(next.values));
        take_values(head, tokens, begin, end);
        for (int64_t block = 0; block < row_blocks_; ++block) {
          weigh_and_add(head, block, tokens, begin, end, is_uniform, is_whole, ahead);
        }
        ahead.fetch_all();
      }
      return;
    }
    RowsAhead none;
    for (int64_t head = 0; head < item_.kv_heads; ++head) {
      for (int64_t block = 0; block < row_blocks_; ++block) {
        weigh(head, block, begin, end, is_whole, none);
      }
    }
    for (int from = begin; from < end; from += kBlocksOfHead) {
      const int to = from + kBlocksOfHead < end ? from + kBlocksOfHead : end;
      const TokenRun run = run_ahead(tokens.values, tokens, next.values, next, from, to);
      for (int64_t head = 0; head < item_.kv_heads; ++head) {
        RowsAhead ahead = values_ahead(head, run);
        if (is_uniform) take_values(head, tokens, from, to);
        for (int64_t block = 0; block < row_blocks_; ++block) {
          if (is_uniform) {
            add(head, block, from, to, ahead);
          } else {
            add_row_by_row(head, block, tokens, from, to);
          }
        }
        ahead.fetch_all();
      }
    }
  }

  // What to fetch while blocks [from, to) of a tile are computed.
  static TokenRun run_ahead(
      const char* const* rows,
      const TileTokens& tokens,
      const char* const* next_rows,
      const TileTokens& next,
      int from,
      int to) {
    int block = from + kBlocksOfHead, end = tokens.end_block();
    if (block >= end) {
      block += next.begin_block() - end;
      end = next.end_block();
      rows = next_rows;
    }
    return {rows, block, to - from < end - block ? block + to - from : end};
  }

  RowsAhead keys_ahead(int64_t head, const TokenRun& run) const {
    return {run, key_offset(head), key_bytes_};
  }
  RowsAhead values_ahead(int64_t head, const TokenRun& run) const {
    return {run, value_offset(head), value_bytes_};
  }

  int64_t key_offset(int64_t head) const { return head * attention_.key_pool.head_stride; }
  int64_t value_offset(int64_t head) const { return head * attention_.value_pool.head_stride; }

  // Takes the rows of blocks [from, to).
  void take_keys(int64_t head, const TileTokens& tokens, int from, int to) {
    keys_.take(tokens.keys, key_offset(head), tokens.first_of(from), tokens.last_of(to), false);
  }
  void take_values(int64_t head, const TileTokens& tokens, int from, int to) {
    values_.take(tokens.values, value_offset(head), tokens.first_of(from), tokens.last_of(to), true);
  }

  ScoreRule rule_of(int64_t head) const {
    return {
        attention_.score_scale(item_.first_kv_head + head),
        attention_.softcap,
        attention_.softcap == 0.0f && !attention_.slopes.is_given()};
  }

  int rows_in_block(int64_t block) const {
    const int64_t left = rows_ - block * kBlockRows;
    return static_cast<int>(left < kBlockRows ? left : kBlockRows);
  }

  // Calls body(std::integral_constant<int, rows>) with the number of rows that a block has.
  template <class Body>
  void with_rows(int64_t block, Body body) const {
    const int rows = rows_in_block(block);
    if constexpr (kBlockRows >= 4) {
      if (rows == 4) return body(std::integral_constant<int, 4>{});
      if (rows == 3) return body(std::integral_constant<int, 3>{});
    }
    if constexpr (kBlockRows >= 2) {
      if (rows == 2) return body(std::integral_constant<int, 2>{});
    }
    body(std::integral_constant<int, 1>{});
  }

  // The lanes of a block's sums are added while the next block is multiplied, if the registers hold
  // the sums of both.
  static constexpr int kBlocksAtOnce = Units::kKeysTogether;

  template <int kRows>
  [[gnu::noinline]] void score_rows(
      const uint32_t* queries, float* scores, int begin, int end, RowsAhead& rows_ahead) {
    RowsAhead ahead = rows_ahead;
    int block = begin;
    for (; block + kBlocksAtOnce <= end; block += kBlocksAtOnce) {
      score_blocks<kRows, kBlocksAtOnce>(queries, scores, block, ahead);
    }
    if constexpr (kBlocksAtOnce > 1) {
      if (block < end) score_blocks<kRows, 1>(queries, scores, block, ahead);
    }
    rows_ahead = ahead;
  }

  template <int kRows, int kBlocks>
  [[gnu::always_inline]] void score_blocks(
      const uint32_t* queries, float* scores, int first, RowsAhead& ahead) {
    DotSums<Units> sums[kBlocks];
#pragma GCC unroll 2
    for (int i = 0; i < kBlocks; ++i) {
      const int key = (first + i) * kBlockKeys;
      dot_block<Units, kRows>(queries, keys_.rows + key, key_steps_, sums[i], ahead);
    }
#pragma GCC unroll 2
    for (int i = 0; i < kBlocks; ++i) store(scores + (first + i) * kLanes, sum_each(sums[i]));
  }

  int passes_from(int64_t block) const { return static_cast<int>(row_blocks_ - block); }

  void score(int64_t head, int64_t block, int begin, int end, RowsAhead& ahead) {
    ahead.begin_pass(passes_from(block), (end - begin) * key_steps_);
    const uint32_t* const queries = queries_of(head, block);
    float* const scores = scores_of(head, block);
    with_rows(block, [&](auto rows) {
      score_rows<decltype(rows)::value>(queries, scores, begin, end, ahead);
    });
  }

  // Those of one head and block of rows at a time, or of all of them.
  float* scores_of(int64_t head, int64_t block) const {
    return scores_ + (kByToken ? head * row_blocks_ + block : 0) * (kTile * kBlockRows);
  }
  uint32_t* weights_of(int64_t head, int64_t block) const {
    return reinterpret_cast<uint32_t*>(scores_of(head, block));
  }

  void weigh(
      int64_t head,
      int64_t block,
      int begin,
      int end,
      bool is_whole,
      RowsAhead& ahead) {
    const ScoreRule rule = rule_of(head);
    ahead.begin_pass(2 * passes_from(block), 2 * (end - begin));
    RowBlock& rows = block_of(head, block);
    float* const scores = scores_of(head, block);
    uint32_t* const weights = weights_of(head, block);
    const Float decay =
        is_whole ? weigh_block<Units, false>(rows, rule, scores, weights, begin, end, ahead)
                 : weigh_block<Units, true>(rows, rule, scores, weights, begin, end, ahead);
    for (int i = 0; i < rows_in_block(block); ++i) {
      const float factor = decay[i * kBlockKeys];
      if (factor == 1.0f) continue;
      float* sums = sums_of(head, block) + i * Units::kStep;
      for (int64_t step = 0; step < value_steps_; ++step, sums += kSumsOfStep<Units>) {
        for (int d = 0; d < Units::kStep; d += kLanes) store(sums + d, load(sums + d) * factor);
      }
    }
  }

  template <int kRows>
  void add_to_rows(const uint32_t* weights, float* sums, int begin, int end, RowsAhead& ahead) {
    constexpr int kFew = ValuePasses<Units, kRows>::kFew, kMany = ValuePasses<Units, kRows>::kMany;
    for (int64_t step = 0; step < value_steps_;) {
      const int64_t left = value_steps_ - step;
      float* const sums_of_step = sums + step * kSumsOfStep<Units>;
      if (left >= kMany) {
        add_values<Units, kRows, kMany>(
            weights, values_, step, begin, end, sums_of_step, ahead);
        step += kMany;
      } else if (left >= kFew) {
        add_values<Units, kRows, kFew>(
            weights, values_, step, begin, end, sums_of_step, ahead);
        step += kFew;
      } else {
        add_values<Units, kRows, 1>(
            weights, values_, step, begin, end, sums_of_step, ahead);
        step += 1;
      }
    }
  }

  void add(int64_t head, int64_t block, int begin, int end, RowsAhead& ahead) {
    const uint32_t* const weights = weights_of(head, block);
    float* const sums = sums_of(head, block);
    with_rows(block, [&](auto rows) {
      constexpr int kRows = decltype(rows)::value;
      ahead.begin_pass(
          passes_from(block),
          ValuePasses<Units, kRows>::count(value_steps_) * (end - begin) * kMomentsOfBlock<Units>);
      for (int from = begin; from < end; from += kBlocksOfAPass) {
        const int to = from + kBlocksOfAPass < end ? from + kBlocksOfAPass : end;
        add_to_rows<kRows>(weights, sums, from, to, ahead);
      }
    });
  }

  // Rows that see different parts of blocks [from, to): each takes zeros for the values that it does not
  // see.
  void add_row_by_row(int64_t head, int64_t block, const TileTokens& tokens, int from, int to) {
    const RowBlock& rows = block_of(head, block);
    RowsAhead none;
    for (int i = 0; i < rows_in_block(block); ++i) {
      const TileTokens seen{
          tokens.keys, tokens.values, rows.low[i * kBlockKeys], rows.high[i * kBlockKeys]};
      const int first = seen.first_of(from), last = seen.last_of(to);
      if (first >= last) continue;
      values_.take(tokens.values, value_offset(head), first, last, true);
      add_to_rows<1>(
          weights_of(head, block) + i * (kBlockKeys / Units::kPair),
          sums_of(head, block) + i * Units::kStep,
          first / kBlockKeys,
          (last + kBlockKeys - 1) / kBlockKeys,
          none);
    }
  }

  void finish_row(int64_t head, int64_t row) {
    const RowBlock& rows = block_of(head, row / kBlockRows);
    const int lane = static_cast<int>(row % kBlockRows) * kBlockKeys;
    float denominator = 0.0f;
    for (int i = 0; i < kBlockKeys; ++i) denominator += rows.denominator[lane + i];
    order_sums<Units>(
        sums_of(head, row / kBlockRows) + row % kBlockRows * Units::kStep,
        kSumsOfStep<Units>,
        attention_.value_pool.dim,
        row_);
    item_.finish_row(
        attention_,
        item_.first_token + row / group_,
        query_head(head, row),
        ranges_[row].is_empty(),
        {rows.maximum[lane], denominator},
        row_);
  }

  const Attention& attention_;
  const AttentionItem& item_;
  const int64_t first_position_, group_, rows_, row_blocks_;
  const int64_t key_bytes_, value_bytes_;  // of a row
  const int64_t key_steps_, value_steps_, query_units_, sum_units_;
  uint32_t* const queries_;
  float* const sums_;
  RowBlock* const blocks_of_rows_;
  KeyRange* const ranges_;
  float* const scores_;
  float* const row_;
  TileRows keys_, values_;
  TileTokens tiles_[2];
};
