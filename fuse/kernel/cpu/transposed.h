// Transposed convolutions with a stride: an ordinary convolution for each phase of the stride, interleaved.
//
//     pack the weights by phase                                       (shared out to threads)
//     for images, bands of positions (shared out to threads):
//         planes = the part of the image that they read               (windows.h)
//         for tiles of outputs:
//             for phases, blocks of spots:      sums[phase] = weights[phase, outputs] @ {planes from each tap on}
//             rows = the sums of all phases, interleaved;             epilogue(outputs, places, rows)
//
// A place is a pixel of the result, a position is a pixel of the image. The place (y, x) plus the padding is stride times
// position plus phase. A tap reads for all places of one phase, each from the position that is tap * dilation / stride
// before. A spot is a position in the padded rows.
#pragma once

// The shape of a transposed convolution. `window` is the ordinary convolution that reads the same positions for each
// phase: its `places` are positions. The strides of the weights are those of groups, outputs and channels; taps are
// contiguous.
template <typename Real> struct fuse_spread {
    fuse_window window;
    const Real *weights;
    int64_t group_stride, output_stride, channel_stride;
    int64_t taps[2], stride[2], padding[2], dilation[2], places[2];

    int64_t phases() const { return stride[0] * stride[1]; }
    int64_t all_taps() const { return taps[0] * taps[1]; }
    int64_t phase_of(int64_t tap) const {
        const int64_t v = tap / taps[1] * dilation[0], u = tap % taps[1] * dilation[1];
        return v % stride[0] * stride[1] + u % stride[1];
    }
    // The first place along a dimension of a position, in a phase: negative where it is cropped.
    int64_t place(int axis, int64_t position, int64_t phase) const {
        return position * stride[axis] + phase - padding[axis] % stride[axis];
    }
};

enum : int64_t { FUSE_MOST_PHASES = 64 };

// Taps of one phase: the number of taps in phases before it, and their own number.
struct fuse_phase {
    int64_t first, taps;
};

// Channels whose weights are packed together: those of one output channel fill cache lines.
enum : int64_t { FUSE_CHANNELS_TOGETHER = 16 };

// Writes the taps of a phase, and for each channel and tap the distance of what it reads from the first element of the
// planes.
template <typename Real>
static inline fuse_phase fuse_find_taps(const fuse_spread<Real> &s, const fuse_planes &planes, int64_t phase,
                                        int64_t first, int32_t *taps, int32_t *distances) {
    const fuse_window &w = s.window;
    int64_t count = 0;
    for (int64_t tap = 0; tap < s.all_taps(); ++tap) {
        if (s.phase_of(tap) != phase) continue;
        const int64_t v = tap / s.taps[1] * s.dilation[0] / s.stride[0], u = tap % s.taps[1] * s.dilation[1] / s.stride[1];
        taps[first + count] = (int32_t)tap;
        distances[count++] = (int32_t)((w.taps[0] - 1 - v) * planes.pitch + w.taps[1] - 1 - u);
    }
    for (int64_t channel = w.channels - 1; channel >= 0; --channel) {
        for (int64_t i = 0; i < count; ++i) {
            distances[channel * count + i] = distances[i] + (int32_t)(channel * planes.channel);
        }
    }
    return {first, count};
}

// Packs the weights of some channels of a group: [groups, phases, outputs, channels, taps of the phase].
template <typename Real>
static inline void fuse_pack_phases(Real *to, const fuse_spread<Real> &s, const fuse_phase *phases, const int32_t *taps,
                                    int64_t group, int64_t channel, int64_t end) {
    const fuse_window &w = s.window;
    to += group * w.outputs * w.channels * s.all_taps();
    for (int64_t output = 0; output < w.outputs; ++output) {
        const Real *const from = s.weights + group * s.group_stride + output * s.output_stride;
        for (int64_t phase = 0; phase < s.phases(); ++phase) {
            const fuse_phase of = phases[phase];
            Real *own = to + (of.first * w.outputs + output * of.taps) * w.channels + channel * of.taps;
            for (int64_t one = channel; one < end; ++one) {
                for (int64_t i = 0; i < of.taps; ++i) *own++ = from[one * s.channel_stride + taps[of.first + i]];
            }
        }
    }
}

// Interleaves rows `apart` elements apart: `to[i]` is element (i + skip) / step of row (i + skip) % step.
template <typename Real>
static inline void fuse_interleave(Real *to, const Real *rows, int64_t apart, int64_t step, int64_t skip, int64_t count) {
    if (step == 1) return fuse_copy(to, rows, count);
    if (step == 2) {
        constexpr int width = fuse_width<Real>;
        typename fuse_of<Real>::lanes low, high;
        for (int lane = 0; lane < width; ++lane) {
            low[lane] = lane / 2 + lane % 2 * width;
            high[lane] = low[lane] + width / 2;
        }
        const Real *const even = rows + skip * apart, *const odd = rows + (1 - skip) * apart + skip;
        int64_t i = 0;
        for (; 2 * (i + width) <= count; i += width) {
            const fuse_vector<Real> first = *(const fuse_loose_vector<Real> *)(even + i);
            const fuse_vector<Real> second = *(const fuse_loose_vector<Real> *)(odd + i);
            *(fuse_loose_vector<Real> *)(to + 2 * i) = fuse_shuffle<Real>(first, second, low);
            *(fuse_loose_vector<Real> *)(to + 2 * i + width) = fuse_shuffle<Real>(first, second, high);
        }
        for (; 2 * i < count; ++i) {
            to[2 * i] = even[i];
            if (2 * i + 1 < count) to[2 * i + 1] = odd[i];
        }
        return;
    }
    for (int64_t phase = 0; phase < step; ++phase) {
        const Real *from = rows + phase * apart + (phase < skip);
        for (int64_t i = phase < skip ? phase + step - skip : phase - skip; i < count; i += step) to[i] = *from++;
    }
}

// A transposed convolution of `images`, by at most `threads` threads. The outputs are split into `shares`. The workspace
// has `distances_bytes`, `packed_bytes` for the weights, and, for each thread, `planes_bytes`, and twice `sums_bytes`.
// Blocks have `Gates` times 16 spots. `epilogue(image, first output, last, first place, last, tile, stride)` is called
// for the tiles of a band, whose outputs are `stride` elements apart.
template <int Gates, typename Real>
FUSE_APART static void fuse_walk_spread(const Real *images, const fuse_spread<Real> &s, int64_t shares, char *workspace,
                                        int64_t distances_bytes, int64_t packed_bytes, int64_t threads,
                                        int64_t planes_bytes, int64_t sums_bytes, const fuse_epilogue<Real> &epilogue) {
    constexpr int half = Gates > 1 ? Gates / 2 : 1, most = fuse_most_rows<Gates, Real>;
    const fuse_window &w = s.window;
    const fuse_planes planes(w);
    const int64_t outputs_at_once = ((w.outputs + shares - 1) / shares + most - 1) / most * most;
    const int64_t across = (w.places[1] + w.columns_at_once - 1) / w.columns_at_once;
    const int64_t chunks = (w.places[0] + w.rows_at_once - 1) / w.rows_at_once * across;
    const int64_t sums_stride = ((w.rows_at_once - 1) * w.pitch + w.columns_at_once + 15) / 16 * 16 + 16 * Gates;
    const int64_t in_row = w.columns_at_once * s.stride[1], in_tile = w.rows_at_once * s.stride[0] * in_row;
    const int64_t together = (w.channels + FUSE_CHANNELS_TOGETHER - 1) / FUSE_CHANNELS_TOGETHER;
    const int64_t apart = most * sums_stride;  // between the sums of two phases
    int32_t *const distances = (int32_t *)fuse_aligned(workspace);
    Real *const packed = (Real *)((char *)distances + distances_bytes);
    int32_t *const taps = distances + w.channels * s.all_taps();
    fuse_phase phases[FUSE_MOST_PHASES];
    int64_t taps_before = 0;
    for (int64_t phase = 0; phase < s.phases(); ++phase) {
        phases[phase] = fuse_find_taps(s, planes, phase, taps_before, taps, distances + taps_before * w.channels);
        taps_before += phases[phase].taps;
    }
    threads = fuse_threads(threads);
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        char *const own = (char *)packed + packed_bytes + fuse_thread() * (planes_bytes + 2 * sums_bytes);
        Real *const padded = (Real *)own, *const sums = (Real *)(own + planes_bytes);
        Real *const tile = (Real *)(own + planes_bytes + sums_bytes);
        int64_t held = -1;
        memset(padded, 0, planes_bytes);
#pragma omp for schedule(static)
        for (int64_t number = 0; number < w.groups * together; ++number) {
            const int64_t first = number % together * FUSE_CHANNELS_TOGETHER, end = first + FUSE_CHANNELS_TOGETHER;
            fuse_pack_phases(packed, s, phases, taps, number / together, first, end < w.channels ? end : w.channels);
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < w.images * chunks * shares; ++task) {
            const int64_t part = task / shares, image = part / chunks, output = task % shares * outputs_at_once;
            const int64_t last_output = output + outputs_at_once < w.outputs ? output + outputs_at_once : w.outputs;
            const int64_t row = part % chunks / across * w.rows_at_once, column = part % across * w.columns_at_once;
            const int64_t rows_left = w.places[0] - row, rows = rows_left < w.rows_at_once ? rows_left : w.rows_at_once;
            const int64_t left = w.places[1] - column, columns = left < w.columns_at_once ? left : w.columns_at_once;
            if (part != held) {
                fuse_fill_planes(padded, images + image * w.image_stride, w, planes, row, column,
                                 planes.rows - w.rows_at_once + rows);
            }
            held = part;
            const int64_t first_x = s.place(1, column, 0), skip = first_x < 0 ? -first_x : 0, x = first_x + skip;
            const int64_t end_x = s.place(1, column + columns, 0), count = (end_x < s.places[1] ? end_x : s.places[1]) - x;
            const int64_t first_y = s.place(0, row, 0), y = first_y < 0 ? 0 : first_y;
            const int64_t end_y = s.place(0, row + rows, 0), last_y = end_y < s.places[0] ? end_y : s.places[0];
            const Real *const of_group = packed + image % w.groups * w.outputs * w.channels * s.all_taps();
            for (int64_t first = output; first < last_output; first += most) {
                const int64_t last = first + most < last_output ? first + most : last_output;
                for (int64_t phase = 0; phase < s.phases(); ++phase) {
                    const fuse_phase &of = phases[phase];
                    const int64_t depth = of.taps * w.channels, down = phase / s.stride[1];
                    const int64_t from = s.place(0, row, down) < 0, until = rows - (s.place(0, row + rows - 1, down) >= s.places[0]);
                    const int64_t end = (until - 1) * w.pitch + columns;
                    const Real *const weights = of_group + of.first * w.outputs * w.channels;
                    Real *const to = sums + phase * apart;
                    for (int64_t spot = from * w.pitch; spot < end; spot += 16 * Gates) {
                        const fuse_seen<Real> seen = {padded + spot, distances + of.first * w.channels};
                        if (end - spot <= 16 * half) {
                            fuse_tiles<half, most>(
                                weights, depth, seen, depth, first, last, [&](int64_t one, int64_t end, const Real *found) {
                                    for (int64_t i = 0; i < end - one; ++i) {
                                        fuse_copy(to + (one - first + i) * sums_stride + spot, found + i * 16 * half, 16 * half);
                                    }
                                });
                        } else {
                            fuse_tiles<Gates, most>(
                                weights, depth, seen, depth, first, last, [&](int64_t one, int64_t end, const Real *found) {
                                    for (int64_t i = 0; i < end - one; ++i) {
                                        fuse_copy(to + (one - first + i) * sums_stride + spot, found + i * 16 * Gates, 16 * Gates);
                                    }
                                });
                        }
                    }
                }
                for (int64_t one = 0; one < last - first; ++one) {
                    for (int64_t at = y; at < last_y; ++at) {
                        const int64_t down = at - first_y, phase = down % s.stride[0] * s.stride[1];
                        fuse_interleave(tile + one * in_tile + (at - y) * count,
                                        sums + phase * apart + one * sums_stride + down / s.stride[0] * w.pitch, apart,
                                        s.stride[1], skip, count);
                    }
                }
                if (across == 1) {
                    epilogue(image, first, last, y * count, last_y * count, tile, in_tile);
                } else {
                    for (int64_t at = y; at < last_y; ++at) {
                        const int64_t place = at * s.places[1] + x;
                        epilogue(image, first, last, place, place + count, tile + (at - y) * count, in_tile);
                    }
                }
            }
        }
    }
}

template <int Gates, typename Real, typename Epilogue>
static inline void fuse_spread_windows(const Real *images, const fuse_spread<Real> &s, int64_t shares, char *workspace,
                                       int64_t distances_bytes, int64_t packed_bytes, int64_t threads,
                                       int64_t planes_bytes, int64_t sums_bytes, const Epilogue &epilogue) {
    fuse_walk_spread<Gates>(images, s, shares, workspace, distances_bytes, packed_bytes, threads, planes_bytes,
                            sums_bytes, fuse_epilogue<Real>::of(epilogue));
}

template <int Gates, typename Real, typename Epilogue>
static inline void fuse_spread_windows(const Real *images, const fuse_spread<Real> &s, fuse_splits shares,
                                       char *workspace, int64_t distances_bytes, int64_t packed_bytes, int64_t threads,
                                       int64_t planes_bytes, int64_t sums_bytes, const Epilogue &epilogue) {
    fuse_spread_windows<Gates>(images, s, fuse_best(shares, s.window, fuse_threads(threads)), workspace,
                               distances_bytes, packed_bytes, threads, planes_bytes, sums_bytes, epilogue);
}
