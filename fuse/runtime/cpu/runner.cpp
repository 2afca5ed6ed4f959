// Runs the steps of one captured graph: the native part of a fused program.
//
// The program is data. Python builds three tables of 64-bit integers once (steps, arguments, details), and passes the address of
// each buffer ("bases") at each call. A step names a function and the addresses of its arguments; no code here depends on a model.
//
// Launches are counted where they are made, and returned: generated kernels and copies in the low 32 bits, library products in
// the high 32 bits.

#include <cstdint>
#include <cstring>

namespace {

struct Argument {
    int64_t base;    // index into the bases of this call
    int64_t offset;  // bytes from the base
};

struct Step {
    int64_t kind;       // a StepKind
    int64_t function;   // address: a kernel, ?gemm_ or ?gemm_batch_
    int64_t arguments;  // index of the first of its arguments
    int64_t count;      // number of arguments
    int64_t detail;     // index of the first of its details
    Least least;        // the least time of a kernel on several threads
};

enum StepKind : int64_t { KERNEL = 0, COPY = 1, PRODUCT_F32 = 2, PRODUCT_F64 = 3, BATCH_F32 = 4, BATCH_F64 = 5 };

// Details of a kernel: its sizes.
//
// Details of a copy with arguments (to, from): rank, element size in bytes, and for each dimension its size and both strides in
// bytes.
struct CopyDimension {
    int64_t size, to, from;
};

struct CopyDetail {
    int64_t rank, item;
    CopyDimension dimensions[1];
};

// Details of a product C = alpha A B + beta C of row-major matrices. Column-major BLAS sees them transposed, so its first operand
// is B. Arguments are (C, A, B) and the bias, if any, which is copied into C first; `bias` is then the offset of the details of
// that copy.
struct ProductDetail {
    int64_t m, n, k, transpose_a, transpose_b, lda, ldb, ldc;
    double alpha, beta;
    int64_t batch, a_stride, b_stride, c_stride;  // strides between matrices of a batch, in bytes
    int64_t bias;                                 // 0: none
};

struct Program {
    Step *steps;
    const Argument *arguments;
    const int64_t *details;
    int64_t workspace;  // the base whose first bytes hold the pointers of the current step
};

using Kernel = int (*)(char *const *);

int run_kernel(Step &step, char *const *pointers) {
    const Kernel kernel = reinterpret_cast<Kernel>(step.function);
#ifdef _OPENMP
    const int64_t allowed = step.least.nanoseconds < 0 ? 1 : omp_get_max_threads();
    if (allowed > 1) {
        const int64_t start = nanoseconds();
        const Turn turn = crowd.begin(start, allowed);
        if (turn.members < allowed) omp_set_num_threads(turn.members);  // for kernels of this thread only
        const int failed = kernel(pointers);
        if (turn.members < allowed) omp_set_num_threads(allowed);
        const int64_t end = nanoseconds();
        crowd.end(end, end - start, turn, step.least);
        return failed;
    }
#endif
    return kernel(pointers);
}

template <typename Item>
void copy_row(char *to, const char *from, const CopyDimension &row) {
    for (int64_t i = 0; i < row.size; ++i) {
        Item item;
        memcpy(&item, from + i * row.from, sizeof(Item));
        memcpy(to + i * row.to, &item, sizeof(Item));
    }
}

void copy(char *to, const char *from, const CopyDimension *dimensions, int64_t rank, int64_t item) {
    if (rank == 0) {
        memcpy(to, from, item);
        return;
    }
    const CopyDimension &outer = dimensions[0];
    if (rank > 1) {
        for (int64_t i = 0; i < outer.size; ++i) {
            copy(to + i * outer.to, from + i * outer.from, dimensions + 1, rank - 1, item);
        }
    } else if (outer.to == item && outer.from == item) {
        if (outer.size) memcpy(to, from, outer.size * item);  // pointers to no elements may be null
    } else if (item == 4) {
        copy_row<uint32_t>(to, from, outer);
    } else if (item == 8) {
        copy_row<uint64_t>(to, from, outer);
    } else if (item == 2) {
        copy_row<uint16_t>(to, from, outer);
    } else if (item == 1) {
        copy_row<uint8_t>(to, from, outer);
    } else {
        for (int64_t i = 0; i < outer.size; ++i) memcpy(to + i * outer.to, from + i * outer.from, item);
    }
}

void copy(char *to, const char *from, const int64_t *detail) {
    const CopyDetail *how = reinterpret_cast<const CopyDetail *>(detail);
    copy(to, from, how->dimensions, how->rank, how->item);
}

template <typename Real>
using Gemm = void (*)(const char *, const char *, const int *, const int *, const int *, const Real *, const char *, const int *,
                      const char *, const int *, const Real *, char *, const int *);

template <typename Real>
using GemmBatch = void (*)(const char *, const char *, const int *, const int *, const int *, const Real *, char **, const int *,
                           char **, const int *, const Real *, char **, const int *, const int *, const int *);

template <typename Real>
void product(const Step &step, const int64_t *detail, char **pointers, bool grouped) {
    const ProductDetail &of = *reinterpret_cast<const ProductDetail *>(detail);
    const int m = of.m, n = of.n, k = of.k, lda = of.lda, ldb = of.ldb, ldc = of.ldc, batch = of.batch, one = 1;
    const char a_trans = of.transpose_a ? 'T' : 'N', b_trans = of.transpose_b ? 'T' : 'N';
    const Real alpha = of.alpha, beta = of.beta;
    char *c = pointers[0], *a = pointers[1], *b = pointers[2];
    if (of.bias) copy(c, pointers[3], detail + of.bias);
    if (grouped) {
        char **every_a = pointers + step.count, **every_b = every_a + batch, **every_c = every_b + batch;
        for (int64_t i = 0; i < batch; ++i) {
            every_a[i] = a + i * of.a_stride;
            every_b[i] = b + i * of.b_stride;
            every_c[i] = c + i * of.c_stride;
        }
        reinterpret_cast<GemmBatch<Real>>(step.function)(&b_trans, &a_trans, &n, &m, &k, &alpha, every_b, &ldb, every_a, &lda,
                                                         &beta, every_c, &ldc, &one, &batch);
        return;
    }
    for (int64_t i = 0; i < batch; ++i) {
        reinterpret_cast<Gemm<Real>>(step.function)(&b_trans, &a_trans, &n, &m, &k, &alpha, b + i * of.b_stride, &ldb,
                                                    a + i * of.a_stride, &lda, &beta, c + i * of.c_stride, &ldc);
    }
}

// Runs steps [first, last) on the buffers at `bases`. Returns the number of launches, kernels + (libraries << 32), or -1 if a
// kernel found an index out of range and stopped.
int64_t run(const Program *program, int64_t first, int64_t last, char *const *bases) {
    int64_t kernels = 0, libraries = 0;
    char **pointers = reinterpret_cast<char **>(bases[program->workspace]) + 1;
    for (Step *step = program->steps + first; step < program->steps + last; ++step) {
        const Argument *argument = program->arguments + step->arguments;
        const int64_t *detail = program->details + step->detail;
        for (int64_t i = 0; i < step->count; ++i) pointers[i] = bases[argument[i].base] + argument[i].offset;
        switch (step->kind) {
            case KERNEL:  // the pointers before and after those of its arguments are that of its sizes
                pointers[-1] = pointers[step->count] = reinterpret_cast<char *>(const_cast<int64_t *>(detail));
                if (run_kernel(*step, pointers)) return -1;
                ++kernels;
                break;
            case COPY:
                copy(pointers[0], pointers[1], detail);
                ++kernels;
                break;
            case PRODUCT_F32:
            case BATCH_F32:
                product<float>(*step, detail, pointers, step->kind == BATCH_F32);
                ++libraries;
                break;
            case PRODUCT_F64:
            case BATCH_F64:
                product<double>(*step, detail, pointers, step->kind == BATCH_F64);
                ++libraries;
                break;
        }
    }
    return kernels | (libraries << 32);
}

}  // namespace

// `run` as a built-in function of Python, which takes a tenth of the time of a call by ctypes. Its arguments are Python integers:
// address of the program, first step, end of the steps, address of the bases. The functions and types below belong to Python's
// stable ABI; they are declared here because Python's headers may not be installed.
struct PyObject;

extern "C" {

long long PyLong_AsLongLong(PyObject *);
PyObject *PyLong_FromLongLong(long long);
void *PyEval_SaveThread();
void PyEval_RestoreThread(void *);

static PyObject *fuse_run(PyObject *, PyObject *const *arguments, intptr_t) {
    const Program *program = reinterpret_cast<const Program *>(PyLong_AsLongLong(arguments[0]));
    const int64_t first = PyLong_AsLongLong(arguments[1]), last = PyLong_AsLongLong(arguments[2]);
    char *const *bases = reinterpret_cast<char *const *>(PyLong_AsLongLong(arguments[3]));
    void *thread = PyEval_SaveThread();
    const int64_t made = run(program, first, last, bases);
    PyEval_RestoreThread(thread);
    return PyLong_FromLongLong(made);
}

struct Method {  // PyMethodDef
    const char *name;
    PyObject *(*function)(PyObject *, PyObject *const *, intptr_t);
    int flags;
    const char *help;
};

extern const Method fuse_method = {"fuse_run", fuse_run, 0x80 /* positional arguments as an array */, nullptr};
}
