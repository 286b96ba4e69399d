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

// Loads of `bytes` by all lanes from half tile b + half(lane), `stride` bytes further each time: `at` agrees with
// `offset`, without conflicts. `start` is how the kernel computes a lane's first place.
template <int kRowBytes, class Slot, class Half, class Byte, class Start>
constexpr bool has_sound_loads(int num_halves, int step, int bytes, int stride, Slot slot, Half half, Byte byte,
                               Start start) {
  using Layout = RowLayout<kRowBytes>;
  for (int b = 0; b < num_halves; b += step) {
    for (int further = 0; further < kRowBytes; further += stride) {
      const auto place = [&](int lane) { return Layout::offset(slot(lane), b + half(lane), byte(lane) + further); };
      for (int lane = 0; lane < kLanes; ++lane) {
        if (static_cast<int>(Layout::at(start(lane), b, further)) != place(lane)) return false;
      }
      if (!has_no_conflict(bytes, place)) return false;
    }
  }
  return true;
}

// Loads of a lane's words of keys.
template <int kRowBytes>
constexpr bool has_sound_key_loads(int num_halves) {
  using Words = KeyWords<kRowBytes>;
  const auto slot = [](int lane) { return slot_of_row(lane / 4); };
  const auto byte = [](int lane) { return Words::load_byte(lane % 4, 0); };
  return has_sound_loads<kRowBytes>(
      num_halves, 1, Words::kLoadBytes, Words::load_byte(0, 1), slot, [](int) { return 0; }, byte,
      [&](int lane) { return RowLayout<kRowBytes>::offset(slot(lane), 0, byte(lane)); });
}

// Loads of matrices: two chunks of all rows of every tile.
template <int kRowBytes>
constexpr bool has_sound_matrix_loads(int num_halves) {
  return has_sound_loads<kRowBytes>(
      num_halves, 2, 16, 32, [](int lane) { return slot_of_row(lane % 8); }, [](int lane) { return lane / 8 % 2; },
      [](int lane) { return lane / 16 * 16; }, matrix_row<kRowBytes>);
}

// Loads of matrices of 16-bit numbers, keys and values.
template <int kRowBytes>
constexpr bool has_sound_plain_loads() {
  const auto slot = [](int lane) { return lane % 8; };
  const auto second = [](int lane) { return lane / 8 % 2; };
  const auto third = [](int lane) { return lane / 16; };
  return has_sound_loads<kRowBytes>(
             2, 2, 16, 32, slot, second, [&](int lane) { return third(lane) * 16; },
             [&](int lane) { return plain_matrix_row<kRowBytes>(lane, second(lane), third(lane)); }) &&
         has_sound_loads<kRowBytes>(
             2, 2, 16, 32, slot, third, [&](int lane) { return second(lane) * 16; },
             [&](int lane) { return plain_matrix_row<kRowBytes>(lane, third(lane), second(lane)); });
}

// Steps of one and of two tiles, as shape.cuh has them.
static_assert(has_sound_rows<32, 4>() && has_sound_rows<64, 4>() && has_sound_rows<128, 4>());
static_assert(has_sound_rows<64, 2>() && has_sound_rows<128, 2>());
static_assert(has_sound_rows<256, 2>() && has_sound_rows<512, 2>());
static_assert(has_sound_key_loads<32>(4) && has_sound_key_loads<64>(4));
static_assert(has_sound_key_loads<128>(4) && has_sound_key_loads<256>(2));
static_assert(has_sound_matrix_loads<32>(4) && has_sound_matrix_loads<64>(4) && has_sound_matrix_loads<128>(4));
static_assert(has_sound_matrix_loads<128>(2) && has_sound_matrix_loads<256>(2));
static_assert(has_sound_plain_loads<128>() && has_sound_plain_loads<256>() && has_sound_plain_loads<512>());

}  // namespace
}  // namespace hf_kvquant::cuda
