// Convolutions of channels-last images. A place is an output pixel.
//
//     for images, some output rows, parts of the output channels (shared out to threads):
//         field = the part of the image that the places read, with zeros for padding
//         for blocks of output channels, tiles of a few places:
//             sums = sum over taps: {field from the tap on}[places] @ block[tap];      epilogue(places, outputs, sums)
//
// The taps of one row are one contiguous stretch of the sum, with all of their channels. Without padding, the field is
// the image itself. Windows next to each other are read in place in other layouts, too: a stretch is one row of taps.
#pragma once
#include <string.h>

// The shape of a convolution. `places` is its output size; `rows_at_once` output rows are computed together.
// `by_channel`: an image whose rows are contiguous, not its channels, read in place; `right` is [channels * taps, outputs].
struct fuse_channel_window {
    int64_t images, channels, outputs, height, width;
    int64_t image_stride, channel_stride, row_stride, column_stride;
    int64_t taps[2], stride[2], padding[2], dilation[2], places[2];
    int64_t rows_at_once, by_channel;

    // Rows of the padded image that `rows` output rows read, and columns that a whole output row reads.
    int64_t rows_seen(int64_t rows) const { return (rows - 1) * stride[0] + (taps[0] - 1) * dilation[0] + 1; }
    int64_t columns_seen() const { return (places[1] - 1) * stride[1] + (taps[1] - 1) * dilation[1] + 1; }

    // Whether the image can be read in place.
    bool is_seen_whole() const {
        return by_channel || (channel_stride == 1 && column_stride == channels && !padding[0] && !padding[1]);
    }
};

// The part of an image that some output rows read; `pitch` is its row stride. The sum for one place runs over `rows`
// rows of `stretches` contiguous stretches of `length` elements, with strides `row_apart` and `apart`.
template <typename Real> struct fuse_field {
    const Real *first;
    int64_t pitch, place, row, across;
    int64_t rows, stretches, length, row_apart, apart;

    fuse_field(const Real *first, int64_t pitch, const fuse_channel_window &w) : first(first), pitch(pitch) {
        const bool joined = w.dilation[1] == 1;
        place = w.stride[1] * w.channels, row = w.stride[0] * pitch, across = w.places[1];
        rows = w.taps[0], row_apart = w.dilation[0] * pitch;
        stretches = joined ? 1 : w.taps[1], length = joined ? w.taps[1] * w.channels : w.channels;
        apart = w.dilation[1] * w.channels;
        if (!w.by_channel) return;
        place = w.stride[1], row = w.stride[0] * w.row_stride;
        rows = w.channels, row_apart = w.channel_stride;
        stretches = w.taps[0], length = w.taps[1], apart = w.row_stride;
    }
    const Real *at(int64_t number) const { return first + number / across * row + number % across * place; }
};

// Rows x Gates sums over `count` stretches from stretch `first` on.
template <int Rows, int Gates, typename Real, typename Weights>
FUSE_CONTRACTED static __attribute__((noinline)) void fuse_places_block(Real *__restrict out, int64_t row_stride,
                                                                        const Real *const *places, Weights right,
                                                                        const fuse_field<Real> &field, int64_t first,
                                                                        int64_t count) {
    constexpr int vectors = Gates * fuse_vectors<Real>;
    fuse_sums<Rows, vectors, Real> sums = {};
    for (int64_t stretch = first; stretch < first + count; ++stretch, right = right.from(field.length)) {
        const int64_t from = stretch / field.stretches * field.row_apart + stretch % field.stretches * field.apart;
        const Real *left[Rows];
#pragma GCC unroll 24
        for (int row = 0; row < Rows; ++row) left[row] = places[row] + from;
        const int64_t next = (stretch + 1) / field.stretches * field.row_apart + (stretch + 1) % field.stretches * field.apart;
#pragma GCC unroll 24
        for (int row = 0; row < Rows; ++row) __builtin_prefetch(places[row] + next);
        fuse_add_products<Rows, vectors>(sums, left, right, field.length);
    }
    fuse_store_sums<Rows, vectors>(out, row_stride, 16, sums);
}

// The sums of one tile, in parts of FUSE_DEPTH_AT_ONCE terms, or of one stretch, which are added up.
template <int Gates, int Rows, typename Real, typename Weights>
static inline void fuse_places_tile(Real *sums, const Real *const *places, const Weights &right,
                                    const fuse_field<Real> &field) {
    constexpr int width = 16 * Gates, at_once = fuse_gates_at_once<Gates>;
    const int64_t all = field.rows * field.stretches;
    const int64_t most = field.length < FUSE_DEPTH_AT_ONCE ? FUSE_DEPTH_AT_ONCE / field.length : 1;
    for (int64_t stretch = 0; stretch < all; stretch += most) {
        const int64_t count = all - stretch < most ? all - stretch : most;
        const auto weights = right.from(stretch * field.length);
        alignas(64) Real more[Rows * width];
        Real *const to = stretch ? more : sums;
        for (int gate = 0; gate < Gates; gate += at_once) {
            fuse_places_block<Rows, at_once>(to + 16 * gate, width, places, weights.gate(gate), field, stretch, count);
        }
        for (int i = 0; stretch && i < Rows * width; ++i) sums[i] += more[i];
    }
}

// Tiles of `Rows` places from `place` on, then tiles of four, two and one place for the rest.
template <int Gates, int Rows, typename Real, typename Weights, typename Epilogue>
static inline void fuse_places_tiles(const fuse_field<Real> &field, const Weights &right, int64_t place, int64_t last,
                                     const Epilogue &epilogue) {
    alignas(64) Real sums[Rows * 16 * Gates];
    for (; place + Rows <= last; place += Rows) {
        const Real *places[Rows];
        for (int row = 0; row < Rows; ++row) places[row] = field.at(place + row);
        fuse_places_tile<Gates, Rows>(sums, places, right, field);
        epilogue(place, place + Rows, sums);
    }
    if constexpr (Rows > 1) {
        constexpr int fewer = Rows > 4 ? 4 : Rows / 2;
        if (place < last) fuse_places_tiles<Gates, fewer>(field, right, place, last, epilogue);
    }
}

// Copies `count` pixels of an image whose channels are not contiguous; transposes squares in registers if pixels are.
template <typename Real>
static inline void fuse_turn(Real *to, const Real *from, int64_t pixel_stride, int64_t channel_stride, int64_t count,
                             int64_t channels) {
    constexpr int width = fuse_width<Real>;
    int64_t x = 0;
    for (; pixel_stride == 1 && x + width <= count; x += width) {
        int64_t channel = 0;
        for (; channel + width <= channels; channel += width) {
            fuse_vector<Real> square[width];
            const Real *const first = from + channel * channel_stride + x;
            for (int i = 0; i < width; ++i) square[i] = *(const fuse_loose_vector<Real> *)(first + i * channel_stride);
            fuse_transpose<Real>(square);
            for (int i = 0; i < width; ++i) {
                *(fuse_loose_vector<Real> *)(to + (x + i) * channels + channel) = square[i];
            }
        }
        for (; channel < channels; ++channel) {
            for (int i = 0; i < width; ++i) to[(x + i) * channels + channel] = from[channel * channel_stride + x + i];
        }
    }
    for (; x < count; ++x) {
        for (int64_t channel = 0; channel < channels; ++channel) {
            to[x * channels + channel] = from[x * pixel_stride + channel * channel_stride];
        }
    }
}

// Copies the part of an image that some output rows from `first_row` on read, with zeros for padding.
template <typename Real>
FUSE_APART static void fuse_fill_field(Real *to, const Real *image, const fuse_channel_window &w, int64_t first_row,
                                       int64_t rows) {
    const int64_t seen = w.columns_seen(), channels = w.channels, top = first_row * w.stride[0] - w.padding[0];
    const int64_t before = w.padding[1] < seen ? w.padding[1] : seen;
    const int64_t left = seen - before, count = left < w.width ? left : w.width;
    for (int64_t i = 0; i < w.rows_seen(rows); ++i, to += seen * channels) {
        const int64_t y = top + i;
        if (y < 0 || y >= w.height) {
            memset(to, 0, seen * channels * sizeof(Real));
            continue;
        }
        memset(to, 0, before * channels * sizeof(Real));
        memset(to + (before + count) * channels, 0, (left - count) * channels * sizeof(Real));
        const Real *const row = image + y * w.row_stride;
        Real *const inside = to + before * channels;
        if (w.channel_stride == 1 && w.column_stride == channels) {
            memcpy(inside, row, count * channels * sizeof(Real));
            continue;
        }
        fuse_turn(inside, row, w.column_stride, w.channel_stride, count, channels);
    }
}

// A convolution of `images` with `right` [taps * channels, outputs]. The outputs are split into `shares`. Each of at
// most `threads` threads has `field_bytes` of the workspace for its field, and `block_bytes` for a block that `right`
// packs. `epilogue(image, first place, last, first output, last, tile, stride)` is called for every tile, whose places
// are `stride` elements apart.
template <int Gates, typename Real, typename Right>
FUSE_APART static void fuse_walk_places(fuse_panels<Gates>, const Real *images, const fuse_channel_window &w,
                                        const Right &right, int64_t shares, char *workspace, int64_t threads,
                                        int64_t field_bytes, int64_t block_bytes,
                                        const fuse_epilogue<Real> &epilogue) {
    constexpr int64_t width = 16 * Gates;
    const int64_t blocks = (w.outputs + width - 1) / width, blocks_at_once = (blocks + shares - 1) / shares;
    const int64_t chunks = (w.places[0] + w.rows_at_once - 1) / w.rows_at_once, in_row = w.places[1];
    const int64_t parts = w.images * chunks;
    workspace = fuse_aligned(workspace);
    threads = fuse_threads(threads);
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        Real *const copied = (Real *)(workspace + fuse_thread() * (field_bytes + block_bytes));
        Real *const packed = (Real *)((char *)copied + field_bytes);
        int64_t held = -1, packed_block = -1;
        decltype(right.template block<Gates>(packed, 0)) weights = {};
#pragma omp for schedule(static)
        for (int64_t task = 0; task < parts * shares; ++task) {
            const int64_t share = w.is_seen_whole() ? task / parts : task % shares;  // packs each block once
            const int64_t part = w.is_seen_whole() ? task % parts : task / shares;
            const int64_t image = part / chunks, row = part % chunks * w.rows_at_once;
            const int64_t rows = row + w.rows_at_once < w.places[0] ? w.rows_at_once : w.places[0] - row;
            const int64_t first_block = share * blocks_at_once, end = first_block + blocks_at_once;
            const Real *first = images + image * w.image_stride;
            if (!w.is_seen_whole()) {
                if (part != held) fuse_fill_field(copied, first, w, row, rows);
                first = copied;
            } else {
                first += row * w.stride[0] * w.row_stride;
            }
            held = part;
            const int64_t pitch = w.is_seen_whole() ? w.row_stride : w.columns_seen() * w.channels;
            const fuse_field<Real> field(first, pitch, w);
            for (int64_t block = first_block; block < end && block < blocks; ++block) {
                const int64_t column = block * width, before = row * in_row;
                const int64_t last_column = column + width < w.outputs ? column + width : w.outputs;
                if (block != packed_block) weights = right.template block<Gates>(packed, column);
                packed_block = block;
                fuse_places_tiles<Gates, fuse_most_rows<Gates, Real>>(
                    field, weights, 0, rows * in_row, [&](int64_t place, int64_t last, const Real *tile) {
                        epilogue(image, before + place, before + last, column, last_column, tile, width);
                    });
            }
        }
    }
}

template <int Gates, typename Real, typename Right, typename Epilogue>
static inline void fuse_places(fuse_panels<Gates> panels, const Real *images, const fuse_channel_window &w,
                               const Right &right, int64_t shares, char *workspace, int64_t threads, int64_t field_bytes,
                               int64_t block_bytes, const Epilogue &epilogue) {
    fuse_walk_places(panels, images, w, right, shares, workspace, threads, field_bytes, block_bytes,
                     fuse_epilogue<Real>::of(epilogue));
}
