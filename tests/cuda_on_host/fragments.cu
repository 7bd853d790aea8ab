// The lanes of decode attention's matrix products, played through on the host by what the PTX manual
// says of ldmatrix and mma.m16n8k16: from where rows are put in shared memory to which element of the
// output a lane holds. Values are small integers. Prints how many results are wrong.

#include <cstdio>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "cuda/decode_products.cuh"

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
  static constexpr int kDim = TILE::kDim, kKeys = TILE::kKeys, kRights = TILE::kRights;
  int query[16][kDim], keys[kKeys][kDim], values[kKeys][kDim], weights[16][kKeys];
  std::vector<uint8_t> key_memory, value_memory;
  long wrong = 0;

  explicit Trial(std::mt19937& random)
      : key_memory(kKeys * TILE::kRowBytes), value_memory(kKeys * TILE::kRowBytes) {
    const auto draw = [&](int& number) { number = static_cast<int>(random() % 15) - 7; };
    for (auto& row : query) for (int& number : row) draw(number);
    for (auto& row : keys) for (int& number : row) draw(number);
    for (auto& row : values) for (int& number : row) draw(number);
    for (auto& row : weights) for (int& number : row) draw(number);
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
          const LanePlace<TILE> lane(matrix * 8 + row);
          banks.insert((lane_of ? lane.value : lane.key) % 128 / 16);
        }
        wrong += banks.size() != 8;
      }
    }
  }

  // A load of four matrices as tiles of a left matrix, as the kernel takes it apart.
  static void key_tile(const uint32_t (&loaded)[32][4], int i, uint32_t (&tile)[32][4]) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int j = 0; j < 4; ++j) {
        const uint32_t byte_pair = bytes_of(loaded[lane][2 * i + j % 2], j / 2 * 2, j / 2 * 2 + 1);
        tile[lane][j] = Pool::kIsFp8 ? byte_pair : loaded[lane][TILE::place_in_load(j)];
      }
    }
  }

  static void value_tile(const uint32_t (&loaded)[32][4], int i, uint32_t (&tile)[32][4]) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int j = 0; j < 4; ++j) {
        const uint32_t byte_pair = bytes_of(loaded[lane][i + j / 2 * 2], j % 2, 2 + j % 2);
        tile[lane][j] = Pool::kIsFp8 ? byte_pair : loaded[lane][TILE::place_in_load(j)];
      }
    }
  }

  // The 16 keys or columns of a tile by rows, which are the left matrix or the right one.
  static void multiply_tile_of_warp(
      float (&sums)[kRights][32][4], const uint32_t (&tile)[32][4],
      const uint32_t (&rows)[32][2 * kRights]) {
    for (int right = 0; right < kRights; ++right) {
      uint32_t left_matrix[32][4], right_matrix[32][2];
      for (int lane = 0; lane < 32; ++lane) {
        for (int j = 0; j < 4; ++j) left_matrix[lane][j] = TILE::kRowsAreLeft ? rows[lane][j] : tile[lane][j];
        for (int j = 0; j < 2; ++j) {
          right_matrix[lane][j] = TILE::kRowsAreLeft ? tile[lane][right + 2 * j] : rows[lane][j];
        }
      }
      multiply_of_warp(sums[right], left_matrix, right_matrix);
    }
  }

  void check_scores() {
    constexpr int kOfLoad = Pool::kTilesOfLoad;
    static float scores[kKeys / 16][kRights][32][4];
    std::memset(scores, 0, sizeof scores);
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t place[32], loaded[32][4], rows[32][2 * kRights];
      for (int lane = 0; lane < 32; ++lane) {
        for (int column = 0; column < kRights; ++column) {
          for (int half = 0; half < 2; ++half) {
            const int element = step * 16 + Pool::query_element(lane % 4, half);
            const int* const row = query[column * 8 + lane / 4];
            rows[lane][half * kRights + column] = pair_of(row[element], row[element + 1]);
          }
        }
      }
      for (int tile = 0; tile < kKeys / 16; ++tile) {
        for (int lane = 0; lane < 32; ++lane) {
          place[lane] = moved<TILE::kRowBytes>(LanePlace<TILE>(lane).key, tile * 16, step / kOfLoad * 32);
        }
        uint32_t of_keys[32][4];
        load_matrices_of_warp(key_memory, place, false, loaded);
        key_tile(loaded, step % kOfLoad, of_keys);
        multiply_tile_of_warp(scores[tile], of_keys, rows);
      }
    }
    for (int tile = 0; tile < kKeys / 16; ++tile) {
      for (int right = 0; right < kRights; ++right) {
        for (int lane = 0; lane < 32; ++lane) {
          for (int i = 0; i < 4; ++i) {
            const int key = tile * 16 + TILE::key_of_element(lane, right, i);
            const int row = TILE::row_of_lane(lane, TILE::row_of_element(i));
            int sum = 0;
            for (int element = 0; element < kDim; ++element) sum += query[row][element] * keys[key][element];
            wrong += scores[tile][right][lane][i] != static_cast<float>(sum);
          }
        }
      }
    }
  }

  // The weights start where the products of keys leave them.
  void check_values() {
    constexpr int kOfLoad = Pool::kTilesOfLoad;
    static float sums[kDim / 16][kRights][32][4];
    std::memset(sums, 0, sizeof sums);
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t rows[32][2 * kRights], place[32], loaded[32][4];
      for (int lane = 0; lane < 32; ++lane) {
        const auto weight = [&](int right, int i) {
          const int row = TILE::row_of_lane(lane, TILE::row_of_element(i));
          return weights[row][step * 16 + TILE::key_of_element(lane, right, i)];
        };
        for (int j = 0; j < 2 * kRights; ++j) {
          if (TILE::kRowsAreLeft) {
            rows[lane][j] = pair_of(weight(j / 2, j % 2 * 2), weight(j / 2, j % 2 * 2 + 1));
          } else {  // transposed by movmatrix: keys along the lanes become keys within a lane
            const int key = step * 16 + j * 8 + 2 * (lane % 4);
            rows[lane][j] = pair_of(weights[lane / 4][key], weights[lane / 4][key + 1]);
          }
        }
      }
      for (int tile = 0; tile < kDim / 16; ++tile) {
        for (int lane = 0; lane < 32; ++lane) {
          place[lane] = moved<TILE::kRowBytes>(LanePlace<TILE>(lane).value, step * 16, tile / kOfLoad * 32);
        }
        uint32_t of_values[32][4];
        load_matrices_of_warp(value_memory, place, true, loaded);
        value_tile(loaded, tile % kOfLoad, of_values);
        multiply_tile_of_warp(sums[tile], of_values, rows);
      }
    }
    for (int tile = 0; tile < kDim / 16; ++tile) {
      for (int right = 0; right < kRights; ++right) {
        for (int lane = 0; lane < 32; ++lane) {
          for (int i = 0; i < 4; ++i) {
            const int row = TILE::row_of_lane(lane, TILE::row_of_element(i));
            const int of = TILE::column_of_element(lane, tile, right, i);
            int sum = 0;
            for (int key = 0; key < kKeys; ++key) sum += weights[row][key] * values[key][of];
            wrong += sums[tile][right][lane][i] != static_cast<float>(sum);
          }
        }
      }
    }
  }

  // No two elements fall into one place. Of 8 rows of a 16-bit pool all lanes write into banks of their own.
  void check_results() {
    std::set<int> places;
    for (int row = 0; row < 8; ++row) {
      for (int column = 0; column < kDim; ++column) places.insert(TILE::result_place(row, column));
    }
    wrong += static_cast<long>(places.size()) != 8 * kDim || *places.rbegin() >= 8 * kDim;
    std::set<int> banks;
    const bool has_own_banks = !Pool::kIsFp8 && !TILE::kRowsAreLeft;
    for (int lane = 0; lane < 32; ++lane) {
      const int row = TILE::row_of_lane(lane, 0), column = TILE::column_of_element(lane, 0, 0, 0);
      banks.insert(TILE::result_place(row, column) % 32);
    }
    wrong += has_own_banks && banks.size() != 32;
  }
};

template <class TILE>
long check(std::mt19937& random) {
  static Trial<TILE> trial(random);
  trial.check_banks();
  trial.check_scores();
  trial.check_values();
  trial.check_results();
  return trial.wrong;
}

template <int ROWS>
long check_all(std::mt19937& random) {
  return check<DecodeTile<BFloat16Pool, 64, ROWS, 16, 3, 8, 2>>(random) +
         check<DecodeTile<BFloat16Pool, 128, ROWS, 16, 3, 8, 1>>(random) +
         check<DecodeTile<BFloat16Pool, 256, ROWS, 16, 3, 4, 1>>(random) +
         check<DecodeTile<E4M3Pool, 64, ROWS, 32, 3, 8, 2>>(random) +
         check<DecodeTile<E4M3Pool, 128, ROWS, 16, 3, 8, 2>>(random) +
         check<DecodeTile<E4M3Pool, 256, ROWS, 16, 3, 8, 1>>(random);
}

int main() {
  std::mt19937 random(0);
  std::printf("%ld\n", check_all<8>(random) + check_all<16>(random));
}
