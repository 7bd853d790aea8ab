// The lanes of decode attention's matrix products, played through on the host by what the PTX manual
// says of ldmatrix and mma.m16n8k16: from where rows are put in shared memory to which element of the
// output a lane holds. Values are small integers. Prints how many results are wrong.

#include <cstdio>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "cuda/decode_fragments.cuh"

using namespace torch_pagedkv;

// Four 8 x 8 matrices of 16-bit elements; lanes 8i to 8i + 7 point at the rows of matrix i.
void load_matrices_of_warp(
    const std::vector<uint8_t>& memory, const uint32_t (&place)[32], bool transposed,
    uint32_t (&tiles)[32][4]) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint32_t pair = 0;
      for (int i = 0; i < 2; ++i) {
        const int row = transposed ? 2 * (lane % 4) + i : lane / 4;
        const int column = transposed ? lane / 4 : 2 * (lane % 4) + i;
        uint16_t element;
        std::memcpy(&element, &memory[place[matrix * 8 + row] + 2 * column], 2);
        pair |= static_cast<uint32_t>(element) << (16 * i);
      }
      tiles[lane][matrix] = pair;
    }
  }
}

// Elements are their own bits here: a float16 or fp8 of the tests is the integer that it stores.
int half_of(uint32_t pair, int i) { return static_cast<int16_t>(pair >> (16 * i)); }

void multiply_of_warp(
    float (&sums)[32][4], const uint32_t (&a)[32][4], const uint32_t (&b)[32][2]) {
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) {
        const int lane_of_a = row % 8 * 4 + k % 8 / 2, register_of_a = row / 8 + k / 8 * 2;
        const int lane_of_b = column * 4 + k % 8 / 2;
        sum += half_of(a[lane_of_a][register_of_a], k % 2) * half_of(b[lane_of_b][k / 8], k % 2);
      }
      sums[row % 8 * 4 + column / 2][row / 8 * 2 + column % 2] += sum;
    }
  }
}

uint32_t pair_of(int low, int high) {
  return static_cast<uint16_t>(low) | static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16;
}

// Bytes as the fp8 pools take them apart, as integers.
uint32_t bytes_of(uint32_t word, int first, int second) {
  return pair_of(static_cast<int8_t>(word >> (8 * first)), static_cast<int8_t>(word >> (8 * second)));
}

template <class TILE>
struct Trial {
  using Pool = typename TILE::Pool;
  static constexpr int kDim = TILE::kDim, kKeys = TILE::kKeys;
  int query[16][kDim], keys[kKeys][kDim], values[kKeys][kDim], weights[16][kKeys];
  std::vector<uint8_t> query_memory, key_memory, value_memory;
  long wrong = 0;

  explicit Trial(std::mt19937& random)
      : query_memory(16 * kDim * 2), key_memory(kKeys * TILE::kRowBytes), value_memory(kKeys * TILE::kRowBytes) {
    const auto draw = [&](int& number) { number = static_cast<int>(random() % 15) - 7; };
    for (auto& row : query) for (int& number : row) draw(number);
    for (auto& row : keys) for (int& number : row) draw(number);
    for (auto& row : values) for (int& number : row) draw(number);
    for (auto& row : weights) for (int& number : row) draw(number);
    for (int row = 0; row < 16; ++row) {
      for (int element = 0; element < kDim; ++element) {
        const int place = element / 16 * 16 + Pool::query_place(element % 16);
        const int16_t bits = static_cast<int16_t>(query[row][element]);
        std::memcpy(&query_memory[swizzled<kDim * 2>(row, place * 2)], &bits, 2);
      }
    }
    for (int key = 0; key < kKeys; ++key) {
      for (int element = 0; element < kDim; ++element) {
        put(key_memory, key, element, keys[key][element]);
        put(value_memory, key, element, values[key][element]);
      }
    }
  }

  void put(std::vector<uint8_t>& memory, int row, int element, int number) {
    const int byte = element * Pool::kElementBytes;
    const uint32_t place = swizzled<TILE::kRowBytes>(row, byte / 16 * 16) + byte % 16;
    const int16_t bits = static_cast<int16_t>(number);
    std::memcpy(&memory[place], &bits, Pool::kElementBytes);
  }

  void check_banks() {
    for (int lane_of = 0; lane_of < 2; ++lane_of) {  // of keys and of values
      for (int matrix = 0; matrix < 4; ++matrix) {
        std::set<uint32_t> banks;
        for (int row = 0; row < 8; ++row) {
          const LanePlace lane(matrix * 8 + row);
          const uint32_t place = lane_of ? swizzled<TILE::kRowBytes>(lane.value_row, lane.value_byte)
                                         : swizzled<TILE::kRowBytes>(lane.key_row, lane.key_byte);
          banks.insert(place % 128 / 16);
        }
        wrong += banks.size() != 8;
      }
    }
  }

  void check_scores() {
    constexpr int kOfLoad = Pool::kStepsOfLoad;
    float scores[kKeys / 8][32][4] = {};
    for (int step = 0; step < kDim / 16; step += kOfLoad) {
      uint32_t a[kOfLoad][32][4], place[32], loaded[32][4];
      for (int i = 0; i < kOfLoad; ++i) {
        for (int lane = 0; lane < 32; ++lane) {
          const LanePlace at(lane);
          place[lane] = swizzled<kDim * 2>(at.value_row, (step + i) * 32 + at.value_byte);
        }
        load_matrices_of_warp(query_memory, place, false, a[i]);
      }
      for (int pair = 0; pair < kKeys / 16; ++pair) {
        for (int lane = 0; lane < 32; ++lane) {
          const LanePlace at(lane);
          place[lane] = swizzled<TILE::kRowBytes>(pair * 16 + at.key_row, step / kOfLoad * 32 + at.key_byte);
        }
        load_matrices_of_warp(key_memory, place, false, loaded);
        for (int i = 0; i < kOfLoad; ++i) {
          uint32_t first[32][2], second[32][2];
          for (int lane = 0; lane < 32; ++lane) {
            if (Pool::kIsFp8) {
              first[lane][0] = bytes_of(loaded[lane][i], 0, 1);
              first[lane][1] = bytes_of(loaded[lane][i], 2, 3);
              second[lane][0] = bytes_of(loaded[lane][2 + i], 0, 1);
              second[lane][1] = bytes_of(loaded[lane][2 + i], 2, 3);
            } else {
              first[lane][0] = loaded[lane][0], first[lane][1] = loaded[lane][1];
              second[lane][0] = loaded[lane][2], second[lane][1] = loaded[lane][3];
            }
          }
          multiply_of_warp(scores[2 * pair], a[i], first);
          multiply_of_warp(scores[2 * pair + 1], a[i], second);
        }
      }
    }
    for (int tile = 0; tile < kKeys / 8; ++tile) {
      for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) {
          const int row = lane / 4 + i / 2 * 8, key = tile * 8 + 2 * (lane % 4) + i % 2;
          int sum = 0;
          for (int element = 0; element < kDim; ++element) sum += query[row][element] * keys[key][element];
          wrong += scores[tile][lane][i] != static_cast<float>(sum);
        }
      }
    }
  }

  void check_values() {
    constexpr int kOfLoad = Pool::kTilesOfLoad;
    float acc[kDim / 8][32][4] = {};
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t a[32][4], place[32], loaded[32][4];
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, key = step * 16 + 2 * (lane % 4);
        a[lane][0] = pair_of(weights[g][key], weights[g][key + 1]);
        a[lane][1] = pair_of(weights[g + 8][key], weights[g + 8][key + 1]);
        a[lane][2] = pair_of(weights[g][key + 8], weights[g][key + 9]);
        a[lane][3] = pair_of(weights[g + 8][key + 8], weights[g + 8][key + 9]);
      }
      for (int tile = 0; tile < kDim / 8; tile += kOfLoad) {
        for (int lane = 0; lane < 32; ++lane) {
          const LanePlace at(lane);
          place[lane] = swizzled<TILE::kRowBytes>(step * 16 + at.value_row, tile / kOfLoad * 32 + at.value_byte);
        }
        load_matrices_of_warp(value_memory, place, true, loaded);
        for (int i = 0; i < kOfLoad; ++i) {
          uint32_t b[32][2];
          for (int lane = 0; lane < 32; ++lane) {
            for (int half = 0; half < 2; ++half) {
              const uint32_t word = loaded[lane][i / (kOfLoad / 2) * 2 + half];
              b[lane][half] = Pool::kIsFp8 ? bytes_of(word, i % 2, 2 + i % 2) : word;
            }
          }
          multiply_of_warp(acc[tile + i], a, b);
        }
      }
    }
    for (int tile = 0; tile < kDim / 8; ++tile) {
      for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) {
          const int row = lane / 4 + i / 2 * 8, column = Pool::column(tile, lane % 4, i % 2);
          int sum = 0;
          for (int key = 0; key < kKeys; ++key) sum += weights[row][key] * values[key][column];
          wrong += acc[tile][lane][i] != static_cast<float>(sum);
        }
      }
    }
  }
};

template <class TILE>
long check(std::mt19937& random) {
  static Trial<TILE> trial(random);
  trial.check_banks();
  trial.check_scores();
  trial.check_values();
  return trial.wrong;
}

int main() {
  std::mt19937 random(0);
  long wrong = check<DecodeTile<BFloat16Pool, 64, 32, 3, 2>>(random);
  wrong += check<DecodeTile<BFloat16Pool, 128, 16, 3, 2>>(random);
  wrong += check<DecodeTile<BFloat16Pool, 256, 16, 2, 1>>(random);
  wrong += check<DecodeTile<E4M3Pool, 64, 32, 6, 2>>(random);
  wrong += check<DecodeTile<E4M3Pool, 128, 32, 3, 2>>(random);
  wrong += check<DecodeTile<E4M3Pool, 256, 16, 3, 2>>(random);
  std::printf("%ld\n", wrong);
}
