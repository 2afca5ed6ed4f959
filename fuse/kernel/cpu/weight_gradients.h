// The gradient of a convolution's weight: sums over all images and output pixels, without an im2col matrix. A place is
// an output pixel.
//
//     of_weight[output, tap] = sum over images and places of gradient[output, place] * image[pixel that the tap reads]
//
//     for groups, parts of the output channels (shared out to threads):
//         for bands of images (some output rows), as many at once as the cache holds:
//             planes = the part of the image that they read (windows.h);  rows = the gradient, zeros between its rows
//             for tiles of outputs and taps:      sums += rows * {planes from each tap on}, a vector of places at a time
//         add the lanes of each sum
//
// The zeros between rows are multiplied by elements of the image. If these are infinite or NaN, the sum is NaN; so sums
// that are not finite are computed again, place by place.
#pragma once

// A gradient in memory, places contiguous: `output` and `image` are the strides of outputs, and of the images of a
// group.
template <typename Real> struct fuse_gradient {
    const Real *first;
    int64_t image, output;
};

// Outputs and taps of a tile, whose sums fit into registers.
#ifdef __AVX512F__
enum : int64_t { FUSE_TILE_OUTPUTS = 4, FUSE_TILE_TAPS = 6 };
#else
enum : int64_t { FUSE_TILE_OUTPUTS = 2, FUSE_TILE_TAPS = 6 };
#endif

// The number of bands held at once, and the strides between their planes and between their rows.
struct fuse_held {
    int64_t images, planes, rows;
};

template <int Outputs, int Taps, typename Real>
FUSE_CONTRACTED static inline void fuse_correlate(fuse_vector<Real> *sums, int64_t depth, const Real *rows,
                                                  const Real *planes, const int32_t *distances, int64_t spots,
                                                  const fuse_held &held) {
    FUSE_CONTRACT
    constexpr int width = fuse_width<Real>;
    fuse_vector<Real> own[Outputs][Taps];
    const Real *seen[Taps];
#pragma GCC unroll 24
    for (int tap = 0; tap < Taps; ++tap) {
        seen[tap] = planes + distances[tap];
#pragma GCC unroll 24
        for (int output = 0; output < Outputs; ++output) own[output][tap] = sums[output * depth + tap];
    }
    for (int64_t image = 0; image < held.images; ++image, rows += held.rows) {
        for (int64_t spot = 0; spot < spots; spot += width) {
            fuse_vector<Real> of[Outputs];
#pragma GCC unroll 24
            for (int output = 0; output < Outputs; ++output) {
                of[output] = *(const fuse_vector<Real> *)(rows + output * spots + spot);
                FUSE_IN_REGISTER(of[output]);
            }
#pragma GCC unroll 24
            for (int tap = 0; tap < Taps; ++tap) {
                fuse_vector<Real> at = *(const fuse_loose_vector<Real> *)(seen[tap] + spot);
                FUSE_IN_REGISTER(at);
#pragma GCC unroll 24
                for (int output = 0; output < Outputs; ++output) own[output][tap] += of[output] * at;
            }
        }
#pragma GCC unroll 24
        for (int tap = 0; tap < Taps; ++tap) seen[tap] += held.planes;
    }
#pragma GCC unroll 24
    for (int output = 0; output < Outputs; ++output) {
#pragma GCC unroll 24
        for (int tap = 0; tap < Taps; ++tap) sums[output * depth + tap] = own[output][tap];
    }
}

// All taps of some outputs.
template <int Outputs, typename Real>
FUSE_APART static void fuse_correlate_taps(fuse_vector<Real> *sums, int64_t depth, const Real *rows, const Real *planes,
                                           const int32_t *distances, int64_t spots, const fuse_held &held) {
    int64_t tap = 0;
    for (; tap + FUSE_TILE_TAPS <= depth; tap += FUSE_TILE_TAPS) {
        fuse_correlate<Outputs, FUSE_TILE_TAPS>(sums + tap, depth, rows, planes, distances + tap, spots, held);
    }
    for (; tap + 3 <= depth; tap += 3) {
        fuse_correlate<Outputs, 3>(sums + tap, depth, rows, planes, distances + tap, spots, held);
    }
    for (; tap < depth; ++tap) {
        fuse_correlate<Outputs, 1>(sums + tap, depth, rows, planes, distances + tap, spots, held);
    }
}

// One sum, place by place, without taps that read padding.
template <typename Real>
FUSE_APART static Real fuse_sum_of_places(const fuse_gradient<Real> &gradient, const Real *images, const fuse_window &w,
                                          int64_t group, int64_t output, int64_t tap) {
    const int64_t u = tap % w.taps[1], v = tap / w.taps[1] % w.taps[0], channel = tap / w.taps[1] / w.taps[0];
    Real sum = 0;
    for (int64_t image = group; image < w.images; image += w.groups) {
        const Real *const of = gradient.first + image * gradient.image + output * gradient.output;
        const Real *const seen = images + image * w.image_stride + channel * w.channel_stride;
        for (int64_t row = 0; row < w.places[0]; ++row) {
            const int64_t y = row * w.stride[0] + v * w.dilation[0] - w.padding[0];
            if (y < 0 || y >= w.height) continue;
            for (int64_t column = 0; column < w.places[1]; ++column) {
                const int64_t x = column * w.stride[1] + u * w.dilation[1] - w.padding[1];
                if (x < 0 || x >= w.width) continue;
                sum += of[row * w.places[1] + column] * seen[y * w.row_stride + x * w.column_stride];
            }
        }
    }
    return sum;
}

// Computes the gradient `to` [groups, outputs, taps of all channels], by at most `threads` threads. Each of them holds
// several bands of images at once. The workspace has `distances_bytes`; for each thread and band `planes_bytes` and
// `rows_bytes`; and for each thread `sums_bytes`.
template <typename Real>
FUSE_APART static void fuse_gradient_of_weight(Real *to, const fuse_gradient<Real> &gradient, const Real *images,
                                               const fuse_window &w, int64_t at_once, char *workspace,
                                               int64_t distances_bytes, int64_t threads, int64_t planes_bytes,
                                               int64_t rows_bytes, int64_t sums_bytes) {
    constexpr int width = fuse_width<Real>;
    const int64_t depth = w.channels * w.taps[0] * w.taps[1], share_bytes = (planes_bytes + rows_bytes) * at_once;
    const int64_t spots = ((w.rows_at_once - 1) * w.pitch + w.places[1] + width - 1) / width * width;
    const int64_t bands = (w.places[0] + w.rows_at_once - 1) / w.rows_at_once, pieces = w.images / w.groups * bands;
    const fuse_planes planes(w);
    int32_t *const distances = (int32_t *)fuse_aligned(workspace);
    planes.distances(w, distances);
    threads = fuse_threads(threads);
    const int64_t wanted = (threads + w.groups - 1) / w.groups, most = (w.outputs + FUSE_TILE_OUTPUTS - 1) / FUSE_TILE_OUTPUTS;
    const int64_t parts = wanted < most ? wanted : most;
    const int64_t outputs_at_once = (most + parts - 1) / parts * FUSE_TILE_OUTPUTS;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        char *const own = (char *)distances + distances_bytes + fuse_thread() * (share_bytes + sums_bytes);
        Real *const padded = (Real *)own, *const rows = (Real *)(own + planes_bytes * at_once);
        fuse_vector<Real> *const sums = (fuse_vector<Real> *)(own + share_bytes);
        memset(own, 0, share_bytes);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < w.groups * parts; ++task) {
            const int64_t group = task / parts, first = task % parts * outputs_at_once;
            if (first >= w.outputs) continue;
            const int64_t last = first + outputs_at_once < w.outputs ? first + outputs_at_once : w.outputs;
            memset(sums, 0, (last - first) * depth * sizeof(*sums));
            for (int64_t piece = 0; piece < pieces;) {
                fuse_held held = {0, planes_bytes / (int64_t)sizeof(Real), rows_bytes / (int64_t)sizeof(Real)};
                for (; held.images < at_once && piece < pieces; ++held.images, ++piece) {
                    const int64_t image = piece / bands * w.groups + group, row = piece % bands * w.rows_at_once;
                    const int64_t left = w.places[0] - row, count = left < w.rows_at_once ? left : w.rows_at_once;
                    Real *const seen = padded + held.images * held.planes;
                    fuse_fill_planes(seen, images + image * w.image_stride, w, planes, row, 0,
                                     planes.rows - w.rows_at_once + count);
                    const Real *from = gradient.first + image * gradient.image + first * gradient.output + row * w.places[1];
                    Real *of = rows + held.images * held.rows;
                    for (int64_t output = first; output < last; ++output, from += gradient.output, of += spots) {
                        if (w.pitch == w.places[1]) {
                            fuse_copy(of, from, count * w.pitch);
                        } else {
                            for (int64_t i = 0; i < count; ++i) fuse_copy(of + i * w.pitch, from + i * w.places[1], w.places[1]);
                        }
                        if (count < w.rows_at_once) fuse_clear(of + count * w.pitch, spots - count * w.pitch);
                    }
                }
                int64_t output = first;
                const Real *of = rows;
                for (; output + FUSE_TILE_OUTPUTS <= last; output += FUSE_TILE_OUTPUTS, of += FUSE_TILE_OUTPUTS * spots) {
                    fuse_correlate_taps<FUSE_TILE_OUTPUTS>(sums + (output - first) * depth, depth, of, padded, distances,
                                                           spots, held);
                }
                for (; output < last; ++output, of += spots) {
                    fuse_correlate_taps<1>(sums + (output - first) * depth, depth, of, padded, distances, spots, held);
                }
            }
            for (int64_t output = first; output < last; ++output) {
                for (int64_t tap = 0; tap < depth; ++tap) {
                    const Real *const lanes = (const Real *)(sums + (output - first) * depth + tap);
                    Real sum = 0;
                    for (int lane = 0; lane < width; ++lane) sum += lanes[lane];
                    if (sum - sum != 0) sum = fuse_sum_of_places(gradient, images, w, group, output, tap);
                    to[(group * w.outputs + output) * depth + tap] = sum;
                }
            }
        }
    }
}
