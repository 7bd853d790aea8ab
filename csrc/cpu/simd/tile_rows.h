// Where the keys and values of a tile are, for any number of query rows.
//
// A body, not a header: a file of kernels includes it inside of its own namespace.

inline constexpr int kBlockKeys = 4;

// Tokens of blocks [begin, end) of a tile.
struct TokenRun {
  const char* const* rows;
  int begin, end;
};

// Where the positions of a tile are in the pools, and which of them are used: [first, last).
struct TileTokens {
  const char** keys;
  const char** values;
  int first, last;

  // Blocks of keys that have used positions.
  int begin_block() const { return first / kBlockKeys; }
  int end_block() const { return (last + kBlockKeys - 1) / kBlockKeys; }
  // The used positions of blocks from or up to one.
  int first_of(int begin) const { return begin * kBlockKeys > first ? begin * kBlockKeys : first; }
  int last_of(int end) const { return end * kBlockKeys < last ? end * kBlockKeys : last; }
  // All that is used, of `keys` or `values`.
  TokenRun run_of(const char* const* rows) const { return {rows, begin_block(), end_block()}; }

  // Has the pages of all tokens looked up side by side. Rows that are fetched one by one would wait for one
  // page after another.
  void look_up_pages() const {
    for (int n = 0; n < kTile; ++n) __builtin_prefetch(keys[n], 0, 2);
    for (int n = 0; n < kTile; ++n) __builtin_prefetch(values[n], 0, 2);
  }
};

// Looks up the positions of a tile that are in `used`. Positions beside them in a block of keys get
// an address too, which is safe to read.
inline void look_up(
    const Attention& attention,
    const AttentionItem& item,
    int64_t tile,
    const KeyRange& used,
    TileTokens& tokens) {
  const IndexVector blocks = attention.table.row(item.sequence);
  const int64_t kv_head = item.first_kv_head;
  tokens.first = static_cast<int>(used.low > tile ? used.low - tile : 0);
  tokens.last = static_cast<int>(used.high - tile < kTile ? used.high - tile : kTile);
  const int64_t block_size = attention.key_pool.block_size;
  int64_t column = (tile + tokens.first) / block_size;
  int64_t offset = (tile + tokens.first) % block_size;
  int64_t block = blocks[column];
  for (int n = tokens.first; n < tokens.last; ++n, ++offset) {
    if (offset == block_size) {
      offset = 0;
      block = blocks[++column];
    }
    tokens.keys[n] = attention.key_pool.at(block, offset, kv_head);
    tokens.values[n] = attention.value_pool.at(block, offset, kv_head);
  }
  for (int n = 0; n < kTile; ++n) {
    const int like = n < tokens.first ? tokens.first : n < tokens.last ? n : tokens.last - 1;
    tokens.keys[n] = tokens.keys[like];
    tokens.values[n] = tokens.values[like];
  }
}

// Rows of later keys or values, fetched one by one between the products of those before. A memory that
// is asked for many rows at once keeps the loads of those products waiting, or drops what it is asked for.
class RowsAhead {
 public:
  RowsAhead() = default;
  RowsAhead(const TokenRun& run, int64_t head_offset, int64_t row_bytes)
      : next_(run.rows + run.begin * kBlockKeys),
        left_(run.begin < run.end ? (run.end - run.begin) * kBlockKeys : 0),
        head_offset_(head_offset),
        row_bytes_(row_bytes) {}

  // Begins the first of so many passes, of so many moments each, that share the rows that are left.
  void begin_pass(int passes, int64_t moments) {
    of_pass_ = passes == 1 ? left_ : (left_ + passes - 1) / passes;
    moments_ = moments;
    due_ = 0;
  }
  [[gnu::always_inline]] void moment() {
    for (due_ += of_pass_; due_ >= moments_; due_ -= moments_) {
      if (left_ > 0) fetch();
    }
  }
  [[gnu::always_inline]] void fetch_all() {
    while (left_ > 0) fetch();
  }

 private:
  // All lines of a row at once, since memory likes them in their order, and not into the first cache,
  // which they would flood. (Inlined: the compiler takes a call that only fetches for one that does
  // nothing.)
  [[gnu::always_inline]] void fetch() {
    const char* const row = *next_++ + head_offset_;
    --left_;
    for (int64_t line = 0; line < row_bytes_; line += 128) {
      __builtin_prefetch(row + line, 0, 2);
      __builtin_prefetch(row + line + 64, 0, 2);
    }
  }

  const char* const* next_ = nullptr;
  int left_ = 0, of_pass_ = 0;
  int64_t moments_ = 1, due_ = 0;  // `due_`: rows times moments
  int64_t head_offset_ = 0, row_bytes_ = 0;
};

// Rows of one KV head of a tile as Units load them: where they are, or copies that are padded with zeros to whole
// steps, and widened to float32 where Units take that of narrower elements.
class TileRows {
 public:
  template <class Units>
  TileRows(const Pool& pool, const Units&, Carver& carver)
      : pool_(pool),
        row_bytes_(steps_of<Units>(pool.dim) * Units::kStep * Units::kBytes),
        is_widened_(pool.dim * Units::kBytes != pool.row_bytes()),
        is_copied_(row_bytes_ != pool.row_bytes()) {
    rows = carver.take<const char*>(kTile);
    zeros_ = carver.take<char>(row_bytes_);
    std::memset(zeros_, 0, static_cast<size_t>(row_bytes_));
    if (!is_copied_) return;
    copies_ = carver.take<char>(kTile * row_bytes_);
    std::memset(copies_, 0, static_cast<size_t>(kTile * row_bytes_));
  }

  // Takes [first, last) of the tokens. Other rows of whole blocks of keys are zeros or, where
  // `zeros` is not asked for, whatever the tokens say.
  void take(const char* const* tokens, int64_t head_offset, int first, int last, bool zeros) {
    const int begin = first / kBlockKeys * kBlockKeys;
    const int end = (last + kBlockKeys - 1) / kBlockKeys * kBlockKeys;
    if (!is_copied_ && first == 0 && last == kTile) {
      // Quickly: while addresses are made, nothing is asked of the memory.
      for (int n = 0; n < kTile; ++n) rows[n] = tokens[n] + head_offset;
      return;
    }
    if (!is_copied_ && (!zeros || (first == begin && last == end))) {
      for (int n = begin; n < end; ++n) rows[n] = tokens[n] + head_offset;
      return;
    }
    for (int n = begin; n < end; ++n) {
      const bool is_used = first <= n && n < last;
      if (zeros && !is_used) {
        rows[n] = zeros_;
      } else if (is_copied_) {
        char* const copy = copies_ + n * row_bytes_;
        copy_row(tokens[n] + head_offset, copy);
        rows[n] = copy;
      } else {
        rows[n] = tokens[n] + head_offset;
      }
    }
  }

  const char* zeros() const { return zeros_; }

  const char** rows;

 private:
  void copy_row(const char* source, char* copy) const {
    if (is_widened_) {
      load_run(pool_.dtype, source, pool_.dim, reinterpret_cast<float*>(copy));
    } else {
      std::memcpy(copy, source, static_cast<size_t>(pool_.row_bytes()));
    }
  }

  const Pool& pool_;
  int64_t row_bytes_;
  bool is_widened_, is_copied_;
  char* zeros_;
  char* copies_ = nullptr;
};
