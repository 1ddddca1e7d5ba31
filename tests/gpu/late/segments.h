// What CUDA's caching allocator would take from the device: its rules as numbers, beside memory that comes from the host's.
//
// Sizes are rounded to 512 bytes. What is asked for is cut from the smallest free piece of its stream that holds it; pieces of up to
// 1 MiB from segments of 2 MiB, of up to 10 MiB from segments of 20 MiB, larger ones from one of their own, in steps of 2 MiB.
// Neighbours that are free become one again. So `reserved` over the peak is what fragmentation costs.
// Source: c10/cuda/CUDACachingAllocator.cpp (round_size, get_allocation_size, should_split).
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>

namespace late {

class Segments {
 public:
  struct Piece {
    int64_t start, size;
    bool is_free = false;
    Piece *before = nullptr, *after = nullptr;
  };

  Piece* take(int stream, int64_t size) {
    auto& free = free_[{stream, size <= kSmall}];
    auto found = free.lower_bound({size, 0, nullptr});
    Piece* piece;
    if (found != free.end()) {
      piece = std::get<2>(*found);
      free.erase(found);
    } else {
      const int64_t segment = size <= kSmall ? 2 * kMiB : size < 10 * kMiB ? 20 * kMiB : (size + 2 * kMiB - 1) / (2 * kMiB) * 2 * kMiB;
      piece = new Piece{next_, segment};
      next_ += segment + kMiB;  // so that no two segments touch
      reserved_ += segment;
      most_ = std::max(most_, reserved_);
    }
    piece->is_free = false;
    const int64_t rest = piece->size - size;
    if (size <= kSmall ? rest >= 512 : rest > kMiB) {
      auto* left = new Piece{piece->start + size, rest, true, piece, piece->after};
      if (left->after) left->after->before = left;
      piece->after = left;
      piece->size = size;
      free.insert({left->size, left->start, left});
    }
    return piece;
  }

  void give_back(int stream, int64_t size, Piece* piece) {
    auto& free = free_[{stream, size <= kSmall}];
    piece->is_free = true;
    if (piece->before && piece->before->is_free) piece = merged(free, piece->before, piece, piece->before);
    if (piece->after && piece->after->is_free) piece = merged(free, piece, piece->after, piece->after);
    free.insert({piece->size, piece->start, piece});
  }

  int64_t reserved() const { return reserved_; }
  int64_t most() const { return most_; }
  void forget_most() { most_ = reserved_; }

 private:
  static constexpr int64_t kMiB = 1 << 20, kSmall = kMiB;
  using Free = std::set<std::tuple<int64_t, int64_t, Piece*>>;

  static Piece* merged(Free& free, Piece* first, Piece* second, Piece* listed) {
    free.erase({listed->size, listed->start, listed});
    first->size += second->size;
    first->after = second->after;
    if (first->after) first->after->before = first;
    delete second;
    return first;
  }

  std::map<std::pair<int, bool>, Free> free_;
  int64_t reserved_ = 0, most_ = 0, next_ = 0;
};

}  // namespace late
