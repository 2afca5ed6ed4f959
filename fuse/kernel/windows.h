// Convolutions that move one place at a time, on a band of the image: no patch is ever copied.
//
//     for blocks of panels, chunks of rows (shared out to threads):       a panel: 16 places of one row of the result
//         band = the part of the image that the block sees, zeros around it
//         for tiles of a few rows:  sums = left[rows] @ {band from each tap of each channel on};  epilogue(...)
#pragma once

struct fuse_window {
    int64_t images, rows, channels, height, width;                       // rows of `left`, of one image the others
    int64_t image_stride, channel_stride, row_stride, column_stride;
    int64_t taps[2], padding[2], dilation[2], places[2];
};

// The distance of the rows of a band: what the panels of one row see, in whole vectors.
static inline int64_t fuse_band_width(const fuse_window &at) {
    const int64_t seen = (at.places[1] + 15) / 16 * 16 + (at.taps[1] - 1) * at.dilation[1];
    return (seen + 15) / 16 * 16;
}

// The right operand of a block: element `lane` of a panel and `k` of the depth lies `offsets[k] + lane` behind it.
template <typename Real> struct fuse_seen {
    const Real *panels[4];
    const int32_t *offsets;

    fuse_vector<Real> at(int64_t k, int part) const {
        constexpr int in_panel = fuse_vectors<Real>;
        const Real *from = panels[part / in_panel] + offsets[k] + part % in_panel * fuse_width<Real>;
        return *(const fuse_loose_vector<Real> *)from;
    }
    fuse_seen from(int64_t k) const { return {{panels[0], panels[1], panels[2], panels[3]}, offsets + k}; }
    fuse_seen gate(int64_t number) const {
        fuse_seen moved = *this;
        for (int64_t panel = 0; panel + number < 4; ++panel) moved.panels[panel] = panels[panel + number];
        return moved;
    }
};

// Rows [first, last) of an image, of all channels one behind the other; what lies beside it is zero in `band` already.
template <typename Real>
static inline void fuse_copy_band(Real *band, const fuse_window &at, const Real *image, int64_t first, int64_t last,
                                  int64_t band_width) {
    const int64_t room = band_width - at.padding[1], width = at.width < room ? at.width : room;
    for (int64_t channel = 0; channel < at.channels; ++channel) {
        for (int64_t y = first; y < last; ++y) {
            const Real *from = image + channel * at.channel_stride + y * at.row_stride;
            Real *to = band + (channel * (last - first) + y - first) * band_width + at.padding[1];
            if (y < 0 || y >= at.height) {
                for (int64_t x = 0; x < width; ++x) to[x] = 0;
            } else if (at.column_stride == 1) {
                for (int64_t x = 0; x < width; ++x) to[x] = from[x];
            } else {
                for (int64_t x = 0; x < width; ++x) to[x] = from[x * at.column_stride];
            }
        }
    }
}

// left[rows, channels * taps] @ what each place sees, for each of `images`. The workspace has the offsets of the depth
// first, then for each thread a band of `share_bytes`. `epilogue` as in `fuse_tiled_product`, once for each row of places.
template <int Gates, typename Real, typename Epilogue>
static inline void fuse_windowed_product(const Real *left, int64_t left_stride, const Real *images,
                                         const fuse_window &at, char *workspace, int64_t threads, int64_t share_bytes,
                                         const Epilogue &epilogue) {
    const int64_t depth = at.channels * at.taps[0] * at.taps[1], panels_in_row = (at.places[1] + 15) / 16;
    const int64_t panels = at.places[0] * panels_in_row, in_image = (panels + Gates - 1) / Gates;
    const int64_t band_width = fuse_band_width(at);
    const int64_t most_rows = (Gates + panels_in_row - 2) / panels_in_row + 1, below = (at.taps[0] - 1) * at.dilation[0];
    const int64_t of_channel = (most_rows + below) * band_width;
    int32_t *const offsets = (int32_t *)fuse_aligned(workspace);
    for (int64_t k = 0; k < depth; ++k) {
        const int64_t tap = k % (at.taps[0] * at.taps[1]), channel = k / (at.taps[0] * at.taps[1]);
        const int64_t down = tap / at.taps[1] * at.dilation[0], right = tap % at.taps[1] * at.dilation[1];
        offsets[k] = int32_t(channel * of_channel + down * band_width + right);
    }
    workspace = fuse_aligned((char *)(offsets + depth));
    threads = fuse_threads(threads);
    const int64_t blocks = at.images * in_image, at_once = fuse_rows_at_once(at.rows, blocks, threads);
    const int64_t chunks = (at.rows + at_once - 1) / at_once;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        int64_t held = -1;
        Real *const band = (Real *)(workspace + fuse_thread() * share_bytes);
        for (int64_t i = 0; i < at.channels * of_channel; ++i) band[i] = 0;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < blocks * chunks; ++task) {
            const int64_t block = task / chunks, image = block / in_image, first_panel = block % in_image * Gates;
            const int64_t last_panel = first_panel + Gates < panels ? first_panel + Gates : panels;
            const int64_t top = first_panel / panels_in_row;
            if (image * at.places[0] + top != held) {
                fuse_copy_band(band, at, images + image * at.image_stride, top - at.padding[0],
                               top - at.padding[0] + most_rows + below, band_width);
            }
            held = image * at.places[0] + top;
            fuse_seen<Real> seen = {{band, band, band, band}, offsets};
            for (int64_t panel = first_panel; panel < last_panel; ++panel) {
                const int64_t row = panel / panels_in_row - top, column = panel % panels_in_row * 16;
                seen.panels[panel - first_panel] = band + row * band_width + column;
            }
            const int64_t row = task % chunks * at_once, last_row = row + at_once < at.rows ? row + at_once : at.rows;
            fuse_tiles<Gates, fuse_most_rows<Gates, Real>>(
                left, left_stride, seen, depth, row, last_row, [&](int64_t from, int64_t to, const Real *tile) {
                    for (int64_t panel = first_panel; panel < last_panel;) {
                        const int64_t y = panel / panels_in_row, next = (y + 1) * panels_in_row;
                        const int64_t end = next < last_panel ? next : last_panel;
                        const int64_t column = y * at.places[1] + panel % panels_in_row * 16;
                        const int64_t last_column =
                            end == next ? (y + 1) * at.places[1] : column + (end - panel) * 16;
                        epilogue(image, from, to, column, last_column, tile + (panel - first_panel) * 16, 16 * Gates);
                        panel = end;
                    }
                });
        }
    }
}
