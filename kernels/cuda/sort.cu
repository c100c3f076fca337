// sort.cu - the toolkit's radix sort behind one function (Adinets and Merrill 2022, "Onesweep"; it is stable).
//
// This file stands alone: the sort's headers bring a namespace cuda::std, and kernels.h, by naming its own namespace
// cuda for all to see, would make every `std` in them ambiguous.
#include <cub/device/device_radix_sort.cuh>
#include <stdint.h>

// See common.cuh.
cudaError_t sort_pairs(void *temporary, size_t *temporary_bytes, const int32_t *keys, int32_t *keys_sorted, const int32_t *values,
                       int32_t *values_sorted, int n, int key_bits, cudaStream_t stream) {
    return cub::DeviceRadixSort::SortPairs(temporary, *temporary_bytes, keys, keys_sorted, values, values_sorted, n, 0, key_bits, stream);
}
