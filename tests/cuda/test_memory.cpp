// Memory that ranks share on one host: within a process, and between processes over CUDA IPC.
#include <string>
#include <vector>

#include "driver.h"
#include "errors.h"
#include "testing.h"
#include "transport/cuda/symmetric_memory.h"

namespace ep {
namespace {

SymmetricMemoryOptions options(int num_ranks) {
    SymmetricMemoryOptions result;
    result.num_ranks = num_ranks;
    result.control_bytes = 4096;
    result.data_bytes = 4096;
    return result;
}

// Of rank 0; rank 1's handle is as rank 0's, of this process or of another one of the host.
std::string connect(int num_ranks, bool in_other_process = false) {
    return error_of([&] {
        Device device(0, "");
        SymmetricMemory memory(device, options(num_ranks));
        std::vector<std::string> handles(num_ranks, memory.local_handle());
        if (in_other_process) handles[1][sizeof(char[8])] ^= 1;
        memory.connect(handles);
    });
}

TEST(ranks_of_one_process_need_no_cuda_ipc) {
    driver::machine().failing["cudaIpcGetMemHandle"] = cudaErrorNotPermitted;
    CHECK_EQUAL(connect(1), std::string("no error"));
    CHECK_EQUAL(connect(2), std::string("no error"));
}

TEST(ranks_of_several_processes_say_which_of_them_cannot_share_memory) {
    driver::machine().failing["cudaIpcGetMemHandle"] = cudaErrorNotPermitted;
    const std::string said = connect(2, true);
    CHECK(contains(said, "rank 0 cannot address the memory of some ranks: rank 1: "));
    CHECK(contains(said, "cudaIpcGetMemHandle on that rank failed: operation not permitted"));
    CHECK(contains(said, "DEEP_EP_RANKS_PER_NODE=1"));
    CHECK_EQUAL(driver::count("cudaIpcOpenMemHandle"), 0);
}

TEST(memory_that_a_late_rank_may_write_to_is_kept) {
    int freed[2];
    for (const bool keeps : {false, true}) {
        const int before = driver::count("cudaFree");
        error_of([&] {
            Device device(0, "");
            SymmetricMemory memory(device, options(1));
            memory.connect({memory.local_handle()});
            if (keeps) memory.keep();
        });
        freed[keeps] = driver::count("cudaFree") - before;
    }
    CHECK_EQUAL(freed[true], freed[false] - 1);
}

}  // namespace
}  // namespace ep
