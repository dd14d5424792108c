// A stand-in for NVSHMEM's headers: the host calls are recorded by driver.cpp; the device calls are never
// made, because no kernel runs.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

using nvshmemx_qp_handle_t = int32_t;
struct nvshmemx_uniqueid_t {
    int version;
    char internal[124];
};
struct nvshmemx_init_attr_t {
    int version;
};
#define NVSHMEMX_UNIQUEID_INITIALIZER \
    {                                 \
        1, {}                         \
    }
#define NVSHMEMX_INIT_ATTR_INITIALIZER {1}
constexpr unsigned NVSHMEMX_INIT_WITH_UNIQUEID = 8;
enum { NVSHMEMX_QP_HOST = 0, NVSHMEMX_QP_DEFAULT = 1, NVSHMEMX_QP_ANY = INT_MAX };
enum { NVSHMEM_STATUS_NOT_INITIALIZED = 0, NVSHMEM_STATUS_IS_INITIALIZED = 2 };
enum { NVSHMEM_SIGNAL_SET = 9, NVSHMEM_CMP_NE = 1 };

int nvshmemx_get_uniqueid(nvshmemx_uniqueid_t* id);
int nvshmemx_set_attr_uniqueid_args(int rank,
                                    int num_ranks,
                                    const nvshmemx_uniqueid_t* id,
                                    nvshmemx_init_attr_t* attributes);
int nvshmemx_init_attr(unsigned flags, nvshmemx_init_attr_t* attributes);
int nvshmemx_init_status();
int nvshmemx_qp_create(int count, nvshmemx_qp_handle_t** handles);
void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch);
void* nvshmem_align(size_t alignment, size_t bytes);
void nvshmem_barrier_all();
void* nvshmem_ptr(const void* memory, int rank);

inline void nvshmemx_qp_uint64_put_nbi_warp(
    uint64_t*, const uint64_t*, size_t, int, nvshmemx_qp_handle_t) {}
inline void nvshmemx_qp_uint64_put_nbi(
    uint64_t*, const uint64_t*, size_t, int, nvshmemx_qp_handle_t) {}
inline void nvshmemx_qp_uint64_p(uint64_t*, uint64_t, int, nvshmemx_qp_handle_t) {}
inline void nvshmemx_qp_fence(int, nvshmemx_qp_handle_t*, int) {}
inline void nvshmemx_qp_quiet(int, nvshmemx_qp_handle_t*, int) {}
inline void nvshmemx_qp_signal_op(uint64_t*, uint64_t, int, int, nvshmemx_qp_handle_t) {}
inline int nvshmem_uint64_test(uint64_t*, int, uint64_t) { return 1; }
