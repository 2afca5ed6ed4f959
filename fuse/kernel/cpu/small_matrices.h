// Small matrices, in row-major order: factors, solutions, inverses. The algorithms are LAPACK's, without blocks.
//
// A function returns false where eager may raise: a pivot that may be nothing but rounding errors of its column, or a
// number that is not finite. Which of such matrices a library calls singular depends on how it rounds.
#pragma once

// What rounding may leave of a pivot that would be zero, in a column whose largest element is `largest`; libraries may
// take subnormal numbers for zeros.
template <int64_t rows, typename T> inline T fuse_doubt(T largest) {
    const T relative = 4 * rows * (sizeof(T) == 4 ? (T)0x1p-23 : (T)0x1p-52) * largest;
    const T smallest = sizeof(T) == 4 ? (T)0x1p-103 : (T)0x1p-970;
    return relative > smallest ? relative : smallest;
}

template <int64_t rows, int64_t columns, typename T> inline void fuse_copied(T *to, const T *from) {
    for (int64_t i = 0; i < rows * columns; ++i) to[i] = from[i];
}

template <int64_t rows, int64_t columns, typename T> inline bool fuse_is_finite(const T *x) {
    T zero = 0;
    for (int64_t i = 0; i < rows * columns; ++i) zero += x[i] - x[i];
    return zero == 0;
}

// P @ L @ U = A in place, by partial pivoting: L has ones on its diagonal, and row k was swapped with row
// pivots[k] - 1.
template <int64_t rows, typename T> inline bool fuse_factor(T *a, int32_t *pivots) {
    bool good = true;
    T largest[rows];
    for (int64_t j = 0; j < rows; ++j) {
        largest[j] = 0;
        for (int64_t i = 0; i < rows; ++i) {
            const T x = fuse_abs(a[i * rows + j]);
            largest[j] = x > largest[j] || x != x ? x : largest[j];
        }
    }
    for (int64_t k = 0; k < rows; ++k) {
        int64_t best = k;
        for (int64_t i = k + 1; i < rows; ++i) {
            if (fuse_abs(a[i * rows + k]) > fuse_abs(a[best * rows + k])) best = i;
        }
        pivots[k] = (int32_t)(best + 1);
        for (int64_t j = 0; j < rows; ++j) {
            const T x = a[k * rows + j];
            a[k * rows + j] = a[best * rows + j];
            a[best * rows + j] = x;
        }
        const T pivot = a[k * rows + k], size = fuse_abs(pivot);
        good = good && size > fuse_doubt<rows>(largest[k]) && size - size == 0;
        for (int64_t i = k + 1; i < rows; ++i) {
            const T factor = a[i * rows + k] /= pivot;
            for (int64_t j = k + 1; j < rows; ++j) a[i * rows + j] -= factor * a[k * rows + j];
        }
    }
    return good;
}

// x = A^-1 @ x in place, for a triangular matrix A, or for the transpose of the stored one.
template <int64_t rows, int64_t columns, bool lower, bool unit, bool transposed, typename T>
inline void fuse_substitute(T *x, const T *a) {
    for (int64_t step = 0; step < rows; ++step) {
        const int64_t i = lower ? step : rows - 1 - step, end = lower ? i : rows;
        for (int64_t k = lower ? 0 : i + 1; k < end; ++k) {
            const T factor = transposed ? a[k * rows + i] : a[i * rows + k];
            for (int64_t j = 0; j < columns; ++j) x[i * columns + j] -= factor * x[k * columns + j];
        }
        for (int64_t j = 0; !unit && j < columns; ++j) x[i * columns + j] /= a[i * rows + i];
    }
}

template <int64_t columns, typename T> inline void fuse_swap_rows(T *x, int64_t a, int64_t b) {
    for (int64_t j = 0; j < columns; ++j) {
        const T y = x[a * columns + j];
        x[a * columns + j] = x[b * columns + j];
        x[b * columns + j] = y;
    }
}

template <int64_t rows, bool transposed, int64_t columns, typename T>
inline bool fuse_solve_factored(T *x, const T *factors, const T *b, const int32_t *pivots) {
    for (int64_t k = 0; k < rows; ++k) {
        if (pivots[k] < 1 || pivots[k] > rows) return false;
    }
    fuse_copied<rows, columns>(x, b);
    for (int64_t k = 0; !transposed && k < rows; ++k) fuse_swap_rows<columns>(x, k, pivots[k] - 1);
    fuse_substitute<rows, columns, true, !transposed, transposed>(x, factors);
    fuse_substitute<rows, columns, false, transposed, transposed>(x, factors);
    for (int64_t k = rows - 1; transposed && k >= 0; --k) fuse_swap_rows<columns>(x, k, pivots[k] - 1);
    return true;
}

template <int64_t rows, int64_t columns, typename T>
inline bool fuse_with_factors(T *x, const T *factors, const T *b, const int32_t *pivots) {
    return fuse_solve_factored<rows, false, columns>(x, factors, b, pivots);
}

template <int64_t rows, int64_t columns, typename T>
inline bool fuse_with_factors_transposed(T *x, const T *factors, const T *b, const int32_t *pivots) {
    return fuse_solve_factored<rows, true, columns>(x, factors, b, pivots);
}

template <int64_t rows, int64_t columns, typename T> inline bool fuse_factors(T *factors, const T *a) {
    int32_t pivots[rows];
    fuse_copied<rows, rows>(factors, a);
    return fuse_factor<rows>(factors, pivots);
}

template <int64_t rows, int64_t columns, typename T> inline bool fuse_pivots(int32_t *pivots, const T *a) {
    T factors[rows * rows];
    fuse_copied<rows, rows>(factors, a);
    return fuse_factor<rows>(factors, pivots);
}

template <int64_t rows, int64_t columns, typename T> inline bool fuse_solution(T *x, const T *a, const T *b) {
    T factors[rows * rows];
    int32_t pivots[rows];
    fuse_copied<rows, rows>(factors, a);
    return fuse_factor<rows>(factors, pivots) && fuse_with_factors<rows, columns>(x, factors, b, pivots) &&
           fuse_is_finite<rows, columns>(x);
}

template <int64_t rows, int64_t columns, typename T> inline bool fuse_inverse(T *x, const T *a) {
    T one[rows * rows];
    for (int64_t i = 0; i < rows * rows; ++i) one[i] = i % (rows + 1) == 0;
    return fuse_solution<rows, rows>(x, a, one);
}

// L @ L^T = A; only the lower half of A is read.
template <int64_t rows, int64_t columns, typename T> inline bool fuse_cholesky(T *l, const T *a) {
    bool good = true;
    for (int64_t i = 0; i < rows * rows; ++i) l[i] = 0;
    for (int64_t j = 0; j < rows; ++j) {
        T pivot = a[j * rows + j];
        for (int64_t k = 0; k < j; ++k) pivot -= l[j * rows + k] * l[j * rows + k];
        good = good && pivot > fuse_doubt<rows>(a[j * rows + j]) && pivot - pivot == 0;
        l[j * rows + j] = fuse_sqrt(pivot);
        for (int64_t i = j + 1; i < rows; ++i) {
            T sum = a[i * rows + j];
            for (int64_t k = 0; k < j; ++k) sum -= l[i * rows + k] * l[j * rows + k];
            l[i * rows + j] = sum / l[j * rows + j];
        }
    }
    return good;
}

template <int64_t rows, int64_t columns, typename T> inline bool fuse_lower(T *x, const T *a, const T *b) {
    fuse_copied<rows, columns>(x, b);
    fuse_substitute<rows, columns, true, false, false>(x, a);
    return true;
}

template <int64_t rows, int64_t columns, typename T> inline bool fuse_unit_lower(T *x, const T *a, const T *b) {
    fuse_copied<rows, columns>(x, b);
    fuse_substitute<rows, columns, true, true, false>(x, a);
    return true;
}

template <int64_t rows, int64_t columns, typename T> inline bool fuse_upper(T *x, const T *a, const T *b) {
    fuse_copied<rows, columns>(x, b);
    fuse_substitute<rows, columns, false, false, false>(x, a);
    return true;
}

template <int64_t rows, int64_t columns, typename T> inline bool fuse_unit_upper(T *x, const T *a, const T *b) {
    fuse_copied<rows, columns>(x, b);
    fuse_substitute<rows, columns, false, true, false>(x, a);
    return true;
}
