// Proves at compile time what fragments.cuh says about rows in shared memory: every byte has a place of its own, the
// short ways to compute an address agree with the long one, and neither copies nor loads have bank conflicts. Nothing
// in this file is ever called.
#include "fragments.cuh"

namespace hf_kvquant::cuda {
namespace {

constexpr int kBanks = 32;  // of four bytes

// How many lanes a memory instruction of `bytes` per lane serves at a time.
constexpr int lanes_at_a_time(int bytes) { return bytes == 16 ? 8 : bytes == 8 ? 16 : 32; }

// Whether lanes that are served together have no bank conflict, where lane l accesses `bytes` at place(l): a bank
// serves one word at a time, to any number of lanes.
template <class Place>
constexpr bool has_no_conflict(int bytes, Place place) {
  for (int first = 0; first < kLanes; first += lanes_at_a_time(bytes)) {
    int word_of_bank[kBanks] = {};
    for (int bank = 0; bank < kBanks; ++bank) word_of_bank[bank] = -1;
    for (int lane = first; lane < first + lanes_at_a_time(bytes); ++lane) {
      for (int byte = 0; byte < bytes; byte += 4) {
        const int word = (place(lane) + byte) / 4;
        if (word_of_bank[word % kBanks] >= 0 && word_of_bank[word % kBanks] != word) return false;
        word_of_bank[word % kBanks] = word;
      }
    }
  }
  return true;
}

// Rows of a step of kHalves half tiles: places are distinct, and copies go where `offset` says, without conflicts.
template <int kRowBytes, int kHalves>
constexpr bool has_sound_rows() {
  using Layout = RowLayout<kRowBytes>;
  constexpr int kChunks = Layout::kChunks, kStepChunks = 8 * kHalves * kChunks;
  bool is_taken[kStepChunks] = {};
  for (int chunk = 0; chunk < kStepChunks; ++chunk) {
    const int token = chunk / kChunks;
    const int place = Layout::offset(token / kHalves, token % kHalves, chunk % kChunks * 16);
    if (place % 16 != 0 || place < 0 || place >= kStepChunks * 16 || is_taken[place / 16]) return false;
    is_taken[place / 16] = true;
    const int lane = chunk % kLanes, lane_token = lane / kChunks;
    const int lane_place = Layout::offset(lane_token / kHalves, lane_token % kHalves, lane % kChunks * 16);
    if (static_cast<int>(Layout::template copied_at<kHalves>(lane_place, chunk / kLanes)) != place) return false;
  }
  for (int i = 0; i < kStepChunks / kLanes; ++i) {
    const auto place = [i](int lane) {
      const int chunk = i * kLanes + lane, token = chunk / kChunks;
      return Layout::offset(token / kHalves, token % kHalves, chunk % kChunks * 16);
    };
    if (!has_no_conflict(16, place)) return false;
  }
  return true;
}

// Loads of a lane's words, at slot(lane) and byte(lane, load): `at` agrees with `offset`, without conflicts.
template <int kRowBytes, class Words, class Slot, class Byte>
constexpr bool has_sound_loads(int num_halves, Slot slot, Byte byte) {
  using Layout = RowLayout<kRowBytes>;
  for (int b = 0; b < num_halves; ++b) {
    for (int load = 0; load < Words::kLoads; ++load) {
      const auto place = [&](int lane) { return Layout::offset(slot(lane), b, byte(lane, load)); };
      for (int lane = 0; lane < kLanes; ++lane) {
        const int further = byte(lane, load) - byte(lane, 0), start = Layout::offset(slot(lane), 0, byte(lane, 0));
        if (static_cast<int>(Layout::at(start, b, further)) != place(lane)) return false;
      }
      if (!has_no_conflict(Words::kLoadBytes, place)) return false;
    }
  }
  return true;
}

template <int kRowBytes>
constexpr bool has_sound_key_loads(int num_halves) {
  using Words = KeyWords<kRowBytes>;
  return has_sound_loads<kRowBytes, Words>(
      num_halves, [](int lane) { return slot_of_row(lane / 4); },
      [](int lane, int load) { return Words::load_byte(lane % 4, load); });
}

// Loads of matrices: two chunks of all rows of every tile.
template <int kRowBytes>
constexpr bool has_sound_matrix_loads(int num_halves) {
  using Layout = RowLayout<kRowBytes>;
  for (int b = 0; b < num_halves; b += 2) {
    for (int further = 0; further < kRowBytes; further += 32) {
      const auto place = [&](int lane) {
        return Layout::offset(slot_of_row(lane % 8), b + lane / 8 % 2, further + lane / 16 * 16);
      };
      for (int lane = 0; lane < kLanes; ++lane) {
        if (static_cast<int>(Layout::at(matrix_row<kRowBytes>(lane), b, further)) != place(lane)) return false;
      }
      if (!has_no_conflict(16, place)) return false;
    }
  }
  return true;
}

// Steps of one and of two tiles, as shape.cuh has them.
static_assert(has_sound_rows<32, 4>() && has_sound_rows<64, 4>() && has_sound_rows<128, 4>());
static_assert(has_sound_rows<64, 2>() && has_sound_rows<128, 2>() && has_sound_rows<256, 2>());
static_assert(has_sound_key_loads<32>(4) && has_sound_key_loads<64>(4));
static_assert(has_sound_key_loads<128>(4) && has_sound_key_loads<256>(2));
static_assert(has_sound_matrix_loads<32>(4) && has_sound_matrix_loads<64>(4) && has_sound_matrix_loads<128>(4));
static_assert(has_sound_matrix_loads<128>(2) && has_sound_matrix_loads<256>(2));

}  // namespace
}  // namespace hf_kvquant::cuda
