// Decode attention: up to 16 query rows of a sequence meet its keys, tile after tile.
//
// Every warp has tiles of its own, of one KV head, and folds them into its own softmax state, with copies
// of the next ones in flight, those of the next segment too. A second launch joins the parts of the items
// that more than one warp had a share of, in their order.

#pragma once

#include "decode_segment.cuh"
#include "grid_dependency.cuh"

namespace torch_pagedkv {

// Reads all segments of a warp. IS_MIXED: items of up to kFewRows apart from those of more.
template <class TILE, bool IS_MIXED>
class WarpReader {
 public:
  using Loader = WarpLoader<TILE>;

  // A warp's own.
  struct Shared {
    SharedRows rows;
    typename Loader::Shared loader;
  };

  __device__ WarpReader(
      const DecodeProblem& problem, const Walk<TILE::kKeys>& walk, Shared& shared, char* stages)
      : problem_(problem),
        shared_(shared),
        stages_(stages),
        step_(0),
        stage_(0),
        loader_(problem, walk, stages, shared.loader) {}

  // `query_length`: of the first segment's sequence.
  __device__ void read_all(int query_length) {
    int taken = 0;
    do {
      const Work& work = shared_.loader.works[taken % Loader::kWorks];
      if (taken > 0) query_length = work.sequence.query_length;
      // The compiler puts the latter first. The other one takes a few percent longer: its instructions lie
      // farther from the kernel's start.
      if (!IS_MIXED || query_length * problem_.heads_of_tile > kFewRows) {
        read<TILE>(work);
      } else {
        read<typename TILE::template WithRows<kFewRows>>(work);
      }
    } while (++taken < loader_.works());
  }

 private:
  // `work`: of a segment that may not be looked up yet.
  template <class TILE_OF_ROWS>
  __device__ void read(const Work& work) {
    SegmentReader<TILE_OF_ROWS> reader(problem_, work, shared_.rows, stages_);
    int left = 0, stage;
    do {
      // A tile is looked up kStages and issued kStages - 1 steps before it is read.
      do advance(); while (step_ <= TILE::kStages);
      if (left == 0) {
        left = work.segment.count;
        reader.begin();
      }
      wait_copies<TILE::kStages - 1>();
      __syncwarp();  // the copies of all lanes are here
      stage = stage_;
      reader.fold(stage, shared_.loader.loaded[stage], loader_.is_whole());
      stage_ = stage == TILE::kStages - 1 ? 0 : stage + 1;
    } while (--left > 0);
    reader.finish(stage);
  }

  __device__ void advance() {
    __syncwarp();  // all have read the stage that is issued now
    loader_.advance();
    ++step_;
  }

  const DecodeProblem& problem_;
  Shared& shared_;
  char* stages_;
  int step_;
  int stage_;  // that is read next
  Loader loader_;
};

// Rows past the last prefix sum see no key.
__device__ inline void write_padding(const DecodeProblem& problem) {
  if (problem.starts.data == nullptr) return;
  const int64_t tokens = problem.num_tokens;
  const int64_t first =
      min(max(problem.starts[problem.num_sequences], int64_t{0}), tokens) * problem.num_heads;
  const int64_t stop = tokens * problem.num_heads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t row = first + thread; row < stop; row += step) {
    const int head = static_cast<int>(row % problem.num_heads);
    const int64_t token = row / problem.num_heads;
    for (int column = 0; column < problem.value_dim; column += 4) {
      *reinterpret_cast<uint2*>(problem.out + (row * problem.value_dim + column) * 2) = uint2{0, 0};
    }
    problem.lse[head * tokens + token] = problem.sinks.at(head, -INFINITY);
  }
}

// Lets the launches behind start. Prefill attention counts its items before this launch ends: no CTA of it starts
// before all of these allow it, so the counter is 0 by then; both use it by relaxed operations of the GPU alone.
// The last CTA has the least to read.
__device__ inline void begin_launches_behind(const DecodeProblem& problem) {
  const bool sets_counter = problem.prefill_counter != nullptr && blockIdx.x == gridDim.x - 1;
  if (sets_counter) {
    if (threadIdx.x != 0) return;
    // Not by an exchange: what was there before is nothing to read.
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(problem.prefill_counter), "l"(0ull) : "memory");
    __threadfence();
  }
  allow_dependents();
}

// The CTA's place in the order of tiles. Those with neighbouring numbers run on multiprocessors that share their
// way to memory: where some have nothing to read, it is one of such two.
__device__ inline int64_t place_of_cta(bool leaves) {
  if (!leaves) return blockIdx.x;
  return blockIdx.x % 2 * ((gridDim.x + 1) / 2) + blockIdx.x / 2;
}

// Where a warp goes, nowhere perhaps. Called by the whole CTA.
template <int TILE, int THREADS, bool LEAVES>
__device__ inline Walk<TILE> way_of_warp(const DecodeProblem& problem) {
  __shared__ TeamPlaces<THREADS> shared;
  const int64_t cta = place_of_cta(LEAVES && problem.beside.tokens_of_tile > 0);
  const int64_t warps = blockDim.x / 32, first_warp = cta * warps;
  const int64_t number = first_warp + threadIdx.x / 32;
  if (problem.parts > 0) {  // a warp for each part; those of the items of a sequence are neighbours
    const int64_t items = problem.items_of_sequence(), before = quotient(number, items);
    const int index = static_cast<int>(quotient(before, problem.parts));
    if (index >= problem.num_sequences) return Walk<TILE>{};
    const int item = static_cast<int>(number - before * items);
    const int part = static_cast<int>(before - static_cast<int64_t>(index) * problem.parts);
    return Walk<TILE>::through_part(problem, index, sequence_of<TILE>(problem, index), item, part);
  }
  const int64_t first_team = problem.team_of_warp(first_warp), team = problem.team_of_warp(number);
  const TeamPlace found = place_of_team<TILE, LEAVES>(
      problem, shared, first_team, problem.team_of_warp(first_warp + warps - 1), team);
  const Shares& shares = found.shares;
  const Place& place = found.place;
  const int64_t tile = team * shares.of_team;
  const int64_t places = min(shares.of_team, found.places * problem.groups - tile);
  if (team >= problem.teams) return Walk<TILE>{};
  const int member = static_cast<int>(number - team * problem.team);
  if (problem.team_starts != nullptr && member == 0 && threadIdx.x % 32 == 0) {
    problem.team_starts[team] = {
        place.before, shares.of_team, place.sequence, places > 0 ? found.sequence.tiles : 0, shares.span};
  }
  if (places <= 0) return Walk<TILE>{};
  return Walk<TILE>::through_share(problem, team, member, place, found.sequence, shares, tile, places);
}

template <class TILE, bool IS_MIXED>
__global__ void __launch_bounds__(TILE::kThreads, TILE::kCtas)
    decode_attention(const __grid_constant__ DecodeProblem problem) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ typename WarpReader<TILE, IS_MIXED>::Shared shared[TILE::kWarps];
  begin_launches_behind(problem);
  if (problem.num_sequences > 0) {
    const int warp = threadIdx.x / 32;
    const auto walk = way_of_warp<TILE::kKeys, TILE::kThreads, TILE::kLeaves>(problem);
    if (!walk.is_done()) {
      WarpReader<TILE, IS_MIXED>(problem, walk, shared[warp], memory + warp * TILE::kWarpBytes)
          .read_all(walk.sequence.query_length);
    }
  }
  write_padding(problem);
}

}  // namespace torch_pagedkv
