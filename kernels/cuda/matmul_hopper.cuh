// matmul_hopper.cuh - the products of matmul_hopper.cu, which matmul.cu chooses.
#pragma once
#include "common.cuh"

// What becomes of a sum of products before it is stored.
enum MatmulFinish {
    MATMUL_BIAS,         // + bias (none where bias.data is NULL)
    MATMUL_RESIDUAL,     // + pre + bias (none where bias.data is NULL); out may be pre
    MATMUL_GELU,         // pre = sum + bias, rounded; out = gelu(pre)
    MATMUL_GELU_BACKWARD // out = sum * gelu'(pre), and partial = sums of out's columns
};

// Whether the kernels take this product, and this device has them: 16 bits, N and K multiples of 8; addresses are aligned to 16 bytes.
bool matmul_hopper_fits(DType dtype, int64_t M, int64_t N, int64_t K);

// out (M,N) = finish(a (M,K) b). b is (N,K), or (K,N) where b_rows_are_k; GELU and the residual want the first, GELU' the second. pre (M,N) is
// written by MATMUL_GELU and read by the other two. partial, unless NULL, gets matmul_hopper_partials(M) rows of N sums, to be added by columns_reduce.
void matmul_hopper(MatmulFinish finish, Tensor out, Tensor a, Tensor b, bool b_rows_are_k, Tensor bias, Tensor pre, float *partial, Stream stream);
int64_t matmul_hopper_partials(int64_t M);
