// Reductions that OpenMP does not know: maxima and minima in which NaN wins, as in ATen.
#pragma once

#pragma omp declare reduction(fuse_max : float, double : omp_out = fuse_maximum(omp_out, omp_in)) \
    initializer(omp_priv = -__builtin_inff())
#pragma omp declare reduction(fuse_min : float, double : omp_out = fuse_minimum(omp_out, omp_in)) \
    initializer(omp_priv = __builtin_inff())
