// Positions of the largest or smallest elements of a row. The order of equal elements is ATen's, because the algorithms
// of the standard library and the comparison are the same.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

template <bool largest, typename T> inline bool fuse_comes_before(T a, T b) {
    return largest ? (a != a && b == b) || a > b : (a == a && b != b) || a < b;
}

enum class Order { topk, any, sort, stable };

template <bool largest, Order order, typename T>
__attribute__((noinline)) void fuse_rank(const T *row, int64_t length, int64_t count, int64_t *best) {
    typedef std::pair<T, int64_t> Element;
    const auto before = [](const Element &a, const Element &b) {
        return fuse_comes_before<largest>(a.first, b.first);
    };
    std::vector<Element> queue(length);
    for (int64_t i = 0; i < length; ++i) queue[i] = Element(row[i], i);
    if (order == Order::stable) {
        std::stable_sort(queue.begin(), queue.end(), before);
    } else if (order == Order::sort) {
        std::sort(queue.begin(), queue.end(), before);
    } else if (count * 64 <= length) {
        std::partial_sort(queue.begin(), queue.begin() + count, queue.end(), before);
    } else {
        std::nth_element(queue.begin(), queue.begin() + count - 1, queue.end(), before);
        if (order == Order::topk) std::sort(queue.begin(), queue.begin() + count - 1, before);
    }
    for (int64_t i = 0; i < count; ++i) best[i] = queue[i].second;
}
