// What prefill attention does to scores between the two products: terms, masks, and the online softmax.
// A lane has rows g and g + 8 of a warp; elements 4i + 2h and 4i + 2h + 1 belong to row g + 8h.

#pragma once

#include "prefill_schedule.cuh"
#include "softmax_state.cuh"

namespace torch_pagedkv {

// Where a row of a tile lies in it: the same for all work.
struct PlaceInTile {
  int token, head;

  __device__ PlaceInTile(const DecodeProblem& problem, int row)
      : token(static_cast<uint32_t>(row) / static_cast<uint32_t>(problem.heads_of_tile)),
        head(row - token * problem.heads_of_tile) {}
};

// A row of a tile: which token and head of the call it is.
struct TileRow {
  bool exists;
  int of_sequence, token, head;  // of_sequence: the token's number there

  __device__ TileRow(const PrefillGrid& grid, const PrefillWork& work, const PlaceInTile& place)
      : of_sequence(work.first + place.token),
        token(work.start + of_sequence),
        head(work.first_head + place.head) {
    exists = place.token < grid.tokens_of_tile && of_sequence < work.query_length &&
             place.head < work.heads;
  }
};

template <int COUNT>
__device__ inline void drop_infinities(float (&scores)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) scores[i] = without_infinity(scores[i]);
}

// The scores of a lane's two rows. Plain ones are products times a scale of a usual size: products are
// compared as they are, and only their differences are scaled.
template <bool IS_PLAIN>
struct LaneTerms {
  KeyRange seen[2];
  float exponent_scale;

  __device__ LaneTerms(
      const DecodeProblem& problem, const PrefillGrid& grid, const PrefillWork& work,
      const PlaceInTile (&places)[2])
      : exponent_scale(IS_PLAIN ? problem.softmax_scale * kLog2E : kLog2E), problem_(problem) {
    const int offset = work.length - work.query_length;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const TileRow row(grid, work, places[half]);
      const int position = row.of_sequence + offset;
      seen[half] = row.exists ? keys_seen(problem, position, work.length) : KeyRange{0, 0};
      if constexpr (!IS_PLAIN) {
        slopes_[half] = row.exists ? problem.slopes.at(row.head, 0.0f) : 0.0f;
        positions_[half] = position;
      }
    }
  }

  // A product that overflowed is the largest score, whatever the scale.
  __device__ float as_score(float maximum) const {
    return IS_PLAIN && fabsf(maximum) < FLT_MAX ? maximum * problem_.softmax_scale : maximum;
  }

  // What the softmax compares, of all elements, whether seen or not. Plain scores are left as they
  // are, overflowed ones too.
  template <int COUNT>
  __device__ void score(float (&scores)[COUNT], int start) const {
    if constexpr (!IS_PLAIN) {
      const int first = start + 2 * (threadIdx.x % 4);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        scores[i] = score_of(scores[i], i / 2 % 2, first + i / 4 * 8 + i % 2);
      }
    }
  }

  // Of what `score` made: without infinities, and minus infinity where a row does not see a key.
  template <int COUNT>
  __device__ void mask(float (&scores)[COUNT], int start, const uint32_t* missing) const {
    if constexpr (IS_PLAIN) drop_infinities(scores);
    const int first = start + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // One comparison: what lies before the range becomes a large number.
      const uint32_t before = static_cast<uint32_t>(first - seen[half].lower);
      const uint32_t count = static_cast<uint32_t>(max(seen[half].upper - seen[half].lower, 0));
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        if (i / 2 % 2 != half) continue;
        const uint32_t key = i / 4 * 8 + i % 2;
        scores[i] = before + key < count ? scores[i] : -INFINITY;
      }
    }
    if (missing == nullptr) return;
#pragma unroll
    for (int word = 0; word < COUNT / 16; ++word) {
      const uint32_t hidden = missing[word] >> 2 * (threadIdx.x % 4);
#pragma unroll
      for (int i = 16 * word; i < 16 * word + 16; ++i) {
        if (hidden >> (i % 16 / 4 * 8 + i % 2) & 1) scores[i] = -INFINITY;
      }
    }
  }

  // Adds the NaN and infinite values of positions [from, to) to the rows that see them, from the pool
  // itself. Any weight leaves an infinity what it is, so it needs none.
  template <class SHAPE>
  __device__ void add_nonfinite(
      const PrefillWork& work, float (&acc)[SHAPE::kDim / 2], int from, int to) const {
    const DecodeProblem& problem = problem_;
    const char* const table = problem.table + work.sequence * problem.table_stride;
#pragma unroll 1
    for (int position = from; position < to; ++position) {
      const int column = static_cast<uint32_t>(position) / static_cast<uint32_t>(problem.block_size);
      const int64_t block = problem.table_is_wide
                                ? reinterpret_cast<const int64_t*>(table)[column]
                                : reinterpret_cast<const int32_t*>(table)[column];
      if (block < 0 || block >= problem.num_blocks) continue;
      const int64_t offset = position - column * problem.block_size;
      const uint16_t* const value = reinterpret_cast<const uint16_t*>(
          problem.values.data + block * problem.values.block_stride +
          offset * problem.values.offset_stride + work.kv_head * problem.values.head_stride);
#pragma unroll
      for (int i = 0; i < SHAPE::kDim / 2; ++i) {
        const KeyRange& range = seen[i / 2 % 2];
        if (position < range.lower || position >= range.upper) continue;
        const float element =
            SHAPE::Math::to_float(value[i / 4 * 8 + 2 * (threadIdx.x % 4) + i % 2]);
        if (!isfinite(element)) acc[i] += element;
      }
    }
  }

 private:
  __device__ float score_of(float product, int half, int position_of_key) const {
    float score = without_infinity(product * problem_.softmax_scale);
    if (problem_.softcap > 0.0f) score = problem_.softcap * safe_tanh(score * problem_.inverse_softcap);
    if (problem_.slopes.data == nullptr) return score;
    const int distance = position_of_key - positions_[half];
    return without_infinity(score + slopes_[half] * static_cast<float>(distance));
  }

  const DecodeProblem& problem_;
  float slopes_[IS_PLAIN ? 1 : 2];
  int positions_[IS_PLAIN ? 1 : 2];
};

// The online softmax of a lane's two rows.
//
// Weights are relative to a row's reference: its largest score, or an earlier one that is not much
// smaller. While no lane sees a score far above its reference, lanes need not know of each other's
// scores, and nothing that was summed up has to be rescaled (as in FlashAttention-4, Zadouri et al. 2026).
// A row's reference depends on its own scores alone.
//
// An exponent is one multiplication and addition: score * scale - reference * scale, the latter rounded
// once for all weights of a row, so that it cancels out. Where a reference is so large that this rounding
// would show, scores are taken relative to it first.
struct SoftmaxState {
  float reference[2] = {-INFINITY, -INFINITY};
  float total[2] = {0.0f, 0.0f};  // of this lane's keys, until summed up

  // Makes references ready for these scores. Returns whether those of the warp moved; then the factors
  // of all that was accumulated before.
  template <int COUNT>
  __device__ bool prepare(
      float (&scores)[COUNT], float scale, bool may_overflow, float (&decays)[2]) {
    float most[2];
    find_largest(scores, most);
    const bool moves = !(most[0] <= limit_[0]) || !(most[1] <= limit_[1]);
    if (!__any_sync(0xFFFFFFFF, moves)) return false;
    move_references(scores, most, scale, may_overflow, decays);
    return true;
  }

  // Turns scores into weights.
  template <int COUNT>
  __device__ void weigh(float (&scores)[COUNT], float scale) {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      scores[i] = power_of_two(fmaf(scores[i], scale, -offset_[i / 2 % 2]));
      sums[i % 4] += scores[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) total[half] += sums[2 * half] + sums[2 * half + 1];
  }

  __device__ float sum_up(int half) {
    total[half] += __shfl_xor_sync(0xFFFFFFFF, total[half], 1);
    total[half] += __shfl_xor_sync(0xFFFFFFFF, total[half], 2);
    return total[half];
  }

 private:
  // Weights are 2 to the power of this at most.
  static constexpr float kMostExponent = 8.0f;

  // A smaller one is rounded by 2**-13 at most: less than what tells 1 from its neighbours in 16 bits.
  __device__ static bool is_far(float exponent) { return !(fabsf(exponent) < 4096.0f); }

  // Every row with a score above its limit gets a new reference.
  template <int COUNT>
  __device__ void move_references(
      float (&scores)[COUNT], float (&most)[2], float scale, bool may_overflow, float (&decays)[2]) {
    const bool is_infinite = fabsf(most[0]) == INFINITY || fabsf(most[1]) == INFINITY;
    if (may_overflow && __any_sync(0xFFFFFFFF, is_infinite)) {
      drop_infinities(scores);
      find_largest(scores, most);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most[half] = fmaxf(most[half], __shfl_xor_sync(0xFFFFFFFF, most[half], 1));
      most[half] = fmaxf(most[half], __shfl_xor_sync(0xFFFFFFFF, most[half], 2));
      const float before = reference[half];
      const float after = most[half] <= limit_[half] ? before : fmaxf(before, most[half]);
      reference[half] = after;
      offset_[half] = after * scale;
      limit_[half] = after + __fdividef(kMostExponent, scale);
      decays[half] = after == before ? 1.0f : power_of_two((before - after) * scale);
      if (is_far(offset_[half])) {
        const float subtracted = reference_of(after);
        offset_[half] = 0.0f;
        limit_[half] = NAN;  // the scores of every tile have to be made relative
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          if (i / 2 % 2 == half) scores[i] -= subtracted;
        }
      }
      total[half] *= decays[half];
    }
  }

  // The largest scores of this lane. In two chains for each row, so that one does not wait for itself.
  template <int COUNT>
  __device__ static void find_largest(const float (&scores)[COUNT], float (&most)[2]) {
    float largest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) largest[i] = scores[i];
#pragma unroll
    for (int i = 4; i < COUNT; ++i) largest[i % 4] = fmaxf(largest[i % 4], scores[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most[half] = fmaxf(largest[2 * half], largest[2 * half + 1]);
    }
  }

  float offset_[2] = {0.0f, 0.0f};  // references times the scale of exponents
  float limit_[2] = {NAN, NAN};     // scores up to this leave a reference where it is
};

}  // namespace torch_pagedkv
