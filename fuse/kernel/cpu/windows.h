// Convolutions without an im2col matrix: the taps read a padded copy of the image. A place is an output pixel.
//
//     for images, some output rows, or parts of a long one (shared out to threads):
//         planes = the part of the image that they read; a plane for each phase of the stride, zeros for padding
//         for blocks of places, tiles of outputs:        sums = weights[outputs] @ {planes from each tap on}
//             leave out the padding between rows;        epilogue(outputs, places, sums)
//
// A spot is a position in the padded rows. Blocks are of spots, so that a block is a few whole vectors wherever rows
// end, and a tap is at the same distance from all of them. The image is copied once; an im2col matrix would copy it
// once for each tap.
#pragma once
#include <string.h>

// The shape of a convolution: `images` counts those of all groups, `outputs` and `channels` those of one group.
// `group_stride` and `output_stride` are strides of the weights. `places` is the output size. `rows_at_once` output
// rows are computed together, or `columns_at_once` places of one row; `pitch` is the row stride of the planes.
struct fuse_window {
    int64_t images, groups, outputs, channels, height, width;
    int64_t group_stride, output_stride, image_stride, channel_stride, row_stride, column_stride;
    int64_t taps[2], stride[2], padding[2], dilation[2], places[2];
    int64_t rows_at_once, columns_at_once, pitch;
};

// The layout of the part of an image that some output rows read: `plane` elements for each phase of the stride,
// `channel` elements for all phases. With whole rows and stride 1, the padding after a row is also the padding before
// the next.
struct fuse_planes {
    int64_t pitch, rows, plane, channel;

    explicit fuse_planes(const fuse_window &w) {
        pitch = w.pitch;
        rows = w.rows_at_once + (w.taps[0] - 1) * w.dilation[0] / w.stride[0];
        plane = pitch * rows;
        channel = plane * w.stride[0] * w.stride[1];
    }

    // Writes the distance of each tap of each channel from the first tap.
    void distances(const fuse_window &w, int32_t *to) const {
        for (int64_t first = 0; first < w.channels * channel; first += channel) {
            for (int64_t v = 0; v < w.taps[0]; ++v) {
                for (int64_t u = 0; u < w.taps[1]; ++u) {
                    const int64_t y = v * w.dilation[0], x = u * w.dilation[1];
                    const int64_t phase = y % w.stride[0] * w.stride[1] + x % w.stride[1];
                    *to++ = (int32_t)(first + phase * plane + y / w.stride[0] * pitch + x / w.stride[1]);
                }
            }
        }
    }
};

// The number of parts to split the outputs into, chosen in the call where sizes vary: a power of two, at most `most`,
// for which the busiest thread multiplies and copies least, by the same estimate as Convolution.cycles.
struct fuse_splits {
    int64_t most;
};
static inline int64_t fuse_best(fuse_splits splits_of, const fuse_window &w, int64_t threads) {
    const int64_t down = (w.places[0] + w.rows_at_once - 1) / w.rows_at_once;
    const int64_t across = (w.places[1] + w.columns_at_once - 1) / w.columns_at_once;
    const int64_t spots = (w.rows_at_once - 1) * w.pitch + w.columns_at_once, numbers = fuse_planes(w).channel;
    const int64_t multiplied = (spots + 31) / 32 * 2 * w.taps[0] * w.taps[1];
    int64_t best = 1, least = INT64_MAX;
    for (int64_t splits = 1; splits <= splits_of.most; splits *= 2) {
        const int64_t tasks = (w.images * down * across * splits + threads - 1) / threads;
        const int64_t cycles = tasks * multiplied * ((w.outputs + splits - 1) / splits) +
                               (tasks + splits - 1) / splits * numbers;
        if (cycles >= least) continue;
        best = splits;
        least = cycles;
    }
    return best;
}

// Whether windows are single pixels, so that a block of them can be read from the image itself.
static inline bool fuse_is_pixels(const fuse_window &w) {
    return w.taps[0] * w.taps[1] == 1 && w.stride[0] * w.stride[1] == 1 && !w.padding[0] && !w.padding[1] &&
           w.column_stride == 1 && w.row_stride == w.width && (w.pitch == w.width || w.rows_at_once == 1) &&
           w.channels * w.channel_stride < INT32_MAX;
}

// The right operand of a tile: the elements of the planes that its spots read, for each tap.
template <typename Real> struct fuse_seen {
    const Real *first;
    const int32_t *distances;

    fuse_vector<Real> at(int64_t k, int part) const {
        return *(const fuse_loose_vector<Real> *)(first + distances[k] + part * fuse_width<Real>);
    }
    fuse_seen from(int64_t k) const { return {first, distances + k}; }
    fuse_seen gate(int64_t number) const { return {first + number * 16, distances}; }
};

// The smallest number of steps, but at most `most`, that cover `distance`.
static inline int64_t fuse_steps(int64_t distance, int64_t step, int64_t most) {
    const int64_t steps = distance <= 0 ? 0 : (distance + step - 1) / step;
    return steps < most ? steps : most;
}

// Copies contiguous elements to another array.
template <typename Real> static inline void fuse_copy(Real *to, const Real *from, int64_t count) {
    using vector = fuse_loose_vector<Real>;
    constexpr int width = fuse_width<Real>;
    if (count < width) {
        for (int64_t i = 0; i < count; ++i) to[i] = from[i];
        return;
    }
    for (int64_t i = 0; i + width <= count; i += width) *(vector *)(to + i) = *(const vector *)(from + i);
    *(vector *)(to + count - width) = *(const vector *)(from + count - width);
}

// A vector of every other element from the first on; reads nothing after the last of them.
template <typename Real> static inline fuse_vector<Real> fuse_every_second(const Real *from) {
    constexpr int width = fuse_width<Real>;
    typename fuse_of<Real>::lanes lanes;
    for (int lane = 0; lane < width; ++lane) lanes[lane] = 2 * lane < width ? 2 * lane : 2 * lane + 1;
    return fuse_shuffle<Real>(*(const fuse_loose_vector<Real> *)from, *(const fuse_loose_vector<Real> *)(from + width - 1), lanes);
}

// Copies every `step`-th element; vectorised for steps known to the compiler.
template <typename Real> static inline void fuse_copy_apart(Real *to, const Real *from, int64_t step, int64_t count) {
    if (step == 1) {
        fuse_copy(to, from, count);
    } else if (step == 2 && count >= fuse_width<Real>) {
        constexpr int width = fuse_width<Real>;
        for (int64_t i = 0; i < count; i += width) {
            if (i > count - width) i = count - width;
            *(fuse_loose_vector<Real> *)(to + i) = fuse_every_second(from + 2 * i);
        }
    } else {
        for (int64_t i = 0; i < count; ++i) to[i] = from[i * step];
    }
}

// Moves elements within one array towards its start.
template <typename Real> static inline void fuse_move(Real *to, const Real *from, int64_t count) {
    constexpr int width = fuse_width<Real>;
    int64_t i = 0;
    for (; i + width <= count; i += width) {
        *(fuse_loose_vector<Real> *)(to + i) = *(const fuse_loose_vector<Real> *)(from + i);
    }
    for (; i < count; ++i) to[i] = from[i];
}

template <typename Real> static inline void fuse_clear(Real *to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = 0;
}

// Fills `rows` rows of the planes of an image, for the output pixels from `first_row` and `first_column` on. The
// padding left and right of whole rows is zero already.
template <typename Real>
FUSE_APART static void fuse_fill_planes(Real *to, const Real *image, const fuse_window &w, const fuse_planes &planes,
                                        int64_t first_row, int64_t first_column, int64_t rows) {
    const bool parts = w.columns_at_once < w.places[1];
    for (int64_t v = 0; v < w.stride[0]; ++v) {
        for (int64_t u = 0; u < w.stride[1]; ++u) {
            const int64_t x = first_column * w.stride[1] + u - w.padding[1], step = w.stride[1] * w.column_stride;
            const int64_t first = fuse_steps(-x, w.stride[1], planes.pitch);
            const int64_t count = fuse_steps(w.width - x, w.stride[1], planes.pitch) - first;
            const bool whole = step == 1 && w.stride[0] == 1 && !w.padding[0] && count == planes.pitch &&
                               w.row_stride == count && first_row + rows <= w.height;
            for (int64_t channel = 0; channel < w.channels; ++channel) {
                Real *row = to + channel * planes.channel + (v * w.stride[1] + u) * planes.plane;
                const Real *const from =
                    image + channel * w.channel_stride + (x + first * w.stride[1]) * w.column_stride;
                if (whole) fuse_copy(row, from + first_row * count, rows * count);
                for (int64_t i = 0; i < (whole ? 0 : rows); ++i, row += planes.pitch) {
                    const int64_t y = (first_row + i) * w.stride[0] + v - w.padding[0];
                    const bool seen = y >= 0 && y < w.height;
                    if (parts) {
                        fuse_clear(row, seen ? first : planes.pitch);
                        fuse_clear(row + first + count, seen ? planes.pitch - first - count : 0);
                    } else if (!seen) {
                        fuse_clear(row + first, count);
                    }
                    if (seen) fuse_copy_apart(row + first, from + y * w.row_stride, step, count);
                }
            }
        }
    }
}

// The spots [spot, end) of a tile, in output rows of an image; `before` places of the image come before the first row.
template <typename Real> struct fuse_spots {
    const fuse_epilogue<Real> &epilogue;
    int64_t image, before, pitch, in_row, spot, end;
};

// Places of a row from which an epilogue is called for each row; places of shorter rows are made contiguous first.
enum : int64_t { FUSE_LONG_ROW = 64 };

// Leaves out the spots between rows, and calls the epilogue for contiguous places.
template <typename Real>
FUSE_APART static void fuse_tell(const fuse_spots<Real> &of, Real *tile, int64_t first, int64_t last, int64_t stride) {
    const int64_t pitch = of.pitch, in_row = of.in_row;
    const auto tell = [&](int64_t place, int64_t count, int64_t lane) {
        place += of.before;
        if (count) of.epilogue(of.image, first, last, place, place + count, tile + lane, stride);
    };
    if (pitch == in_row) return tell(of.spot, of.end - of.spot, 0);
    int64_t column = of.spot % pitch, lane = 0;
    const int64_t first_place = of.spot / pitch * in_row + (column < in_row ? column : in_row);
    for (int64_t at = of.spot; at < of.end; at += pitch - column, column = 0) {
        const int64_t left = column < in_row ? in_row - column : 0, count = left < of.end - at ? left : of.end - at;
        if (in_row >= FUSE_LONG_ROW) {
            tell(first_place + lane, count, at - of.spot);
        } else if (lane != at - of.spot) {
            for (Real *row = tile; row < tile + (last - first) * stride; row += stride) {
                fuse_move(row + lane, row + at - of.spot, count);
            }
        }
        lane += count;
    }
    if (in_row < FUSE_LONG_ROW) tell(first_place, lane, 0);
}

// Calls `block<n>()` for the smallest n of `Gates`, `Gates` / 2, ... `Least` that has room for `spots`.
template <int Least, int Gates, typename Block> static inline void fuse_with_gates(int64_t spots, const Block &block) {
    if constexpr (Least < Gates) {
        if (spots > 16 * Least) return fuse_with_gates<2 * Least, Gates>(spots, block);
    }
    block.template operator()<Least>();
}

// A convolution of `images` with weights [groups, outputs, channels * taps], by at most `threads` threads. The outputs
// are split into `shares`. The workspace has `distances_bytes` (twice as many for windows of one pixel) and, for each thread, `share_bytes` for its planes.
// Blocks have `Gates` times 16 spots; the last one has fewer if these are enough, but `Least` times 16.
// `epilogue(image, first output, last, first place, last, tile, stride)` is called for every tile, whose outputs are
// `stride` elements apart.
template <int Gates, int Least, typename Real>
FUSE_APART static void fuse_walk_windows(const Real *weights, const Real *images, const fuse_window &w, int64_t shares,
                                         char *workspace, int64_t distances_bytes, int64_t threads,
                                         int64_t share_bytes, const fuse_epilogue<Real> &epilogue) {
    constexpr int most = fuse_most_rows<Gates, Real>;
    const int64_t depth = w.channels * w.taps[0] * w.taps[1];
    const int64_t outputs_at_once = ((w.outputs + shares - 1) / shares + most - 1) / most * most;
    const int64_t across = (w.places[1] + w.columns_at_once - 1) / w.columns_at_once;
    const int64_t chunks = (w.places[0] + w.rows_at_once - 1) / w.rows_at_once * across;
    const fuse_planes planes(w);
    int32_t *const distances = (int32_t *)fuse_aligned(workspace);
    planes.distances(w, distances);
    const bool pixels = fuse_is_pixels(w);  // the last block of an image is copied: vectors would read beyond it
    int32_t *const apart = distances + w.channels;
    for (int64_t channel = 0; pixels && channel < w.channels; ++channel) {
        apart[channel] = channel * w.channel_stride;
        distances[channel] = channel * 16 * Gates;
    }
    threads = fuse_threads(threads);
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        Real *const padded = (Real *)((char *)distances + distances_bytes + fuse_thread() * share_bytes);
        int64_t held = -1;
        // What is read beyond the planes is left out of the result, but subnormal numbers there take as long as a
        // hundred others.
        const int64_t written = w.padding[1] || pixels ? 0 : w.channels * planes.channel * (int64_t)sizeof(Real);
        memset((char *)padded + written, 0, pixels ? w.channels * 16 * Gates * (int64_t)sizeof(Real) : share_bytes - written);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < w.images * chunks * shares; ++task) {
            const int64_t part = task / shares, image = part / chunks, output = task % shares * outputs_at_once;
            const int64_t last_output = output + outputs_at_once < w.outputs ? output + outputs_at_once : w.outputs;
            const int64_t row = part % chunks / across * w.rows_at_once, column = part % across * w.columns_at_once;
            const int64_t rows = row + w.rows_at_once < w.places[0] ? w.rows_at_once : w.places[0] - row;
            const int64_t left = w.places[1] - column, in_row = left < w.columns_at_once ? left : w.columns_at_once;
            const int64_t spots = (rows - 1) * w.pitch + in_row;
            const Real *const first_pixel = images + image * w.image_stride + row * w.width + column;
            const int64_t pixels_left = pixels ? (w.height - row) * w.width - column : 0;
            if (part != held && !pixels) {
                const int64_t seen_rows = planes.rows - w.rows_at_once + rows;
                fuse_fill_planes(padded, images + image * w.image_stride, w, planes, row, column, seen_rows);
            }
            held = part;
            const Real *const of_group = weights + image % w.groups * w.group_stride;
            for (int64_t spot = 0; spot < spots; spot += 16 * Gates) {
                const bool in_place = spot + 16 * Gates <= pixels_left;
                const fuse_seen<Real> seen = {in_place ? first_pixel + spot : padded + (pixels ? 0 : spot), in_place ? apart : distances};
                const int64_t end = spot + 16 * Gates < spots ? spot + 16 * Gates : spots;
                if (pixels && !in_place) {
                    for (int64_t channel = 0; channel < w.channels; ++channel) {
                        fuse_copy(padded + distances[channel], first_pixel + apart[channel] + spot, end - spot);
                    }
                }
                const fuse_spots<Real> of = {epilogue, image, row * w.places[1] + column, w.pitch, in_row, spot, end};
                fuse_with_gates<Least, Gates>(end - spot, [&]<int Enough>() {
                    fuse_tiles<Enough, fuse_most_rows<Enough, Real>>(
                        of_group, w.output_stride, seen, depth, output, last_output,
                        [&](int64_t first, int64_t last, Real *tile) { fuse_tell(of, tile, first, last, 16 * Enough); });
                });
            }
        }
    }
}

template <int Gates, int Least, typename Real, typename Epilogue>
static inline void fuse_windows(const Real *weights, const Real *images, const fuse_window &w, int64_t shares,
                                char *workspace, int64_t distances_bytes, int64_t threads, int64_t share_bytes,
                                const Epilogue &epilogue) {
    fuse_walk_windows<Gates, Least>(weights, images, w, shares, workspace, distances_bytes, threads, share_bytes,
                                    fuse_epilogue<Real>::of(epilogue));
}

template <int Gates, int Least, typename Real, typename Epilogue>
static inline void fuse_windows(const Real *weights, const Real *images, const fuse_window &w, fuse_splits shares,
                                char *workspace, int64_t distances_bytes, int64_t threads, int64_t share_bytes,
                                const Epilogue &epilogue) {
    fuse_windows<Gates, Least>(weights, images, w, fuse_best(shares, w, fuse_threads(threads)), workspace,
                               distances_bytes, threads, share_bytes, epilogue);
}
