// The world that NVSHMEM gives a process, on a stand-in that reads its environment in its first call.
// needs: nvshmem
#include <cstdlib>
#include <string>

#include "driver.h"
#include "testing.h"
#include "transport/cuda/symmetric_memory.h"

namespace ep {
namespace {

SymmetricMemoryOptions options(int rank) {
    SymmetricMemoryOptions result;
    result.rank = rank;
    result.num_ranks = 2;
    result.control_bytes = 4096;
    result.data_bytes = 4096;
    result.num_queue_pairs = 12;
    return result;
}

// What NVSHMEM must have read when a rank has joined.
void check_settings(const std::string& mnnvl) {
    const auto& read = driver::nvshmem_environment();
    for (const auto& [name, value] : std::map<std::string, std::string>{
             {"NVSHMEM_DISABLE_P2P", "0"},
             {"NVSHMEM_IB_ENABLE_IBGDA", "1"},
             {"NVSHMEM_IBGDA_NUM_RC_PER_PE", "12"},
             {"NVSHMEM_QP_DEPTH", "1024"},
             {"NVSHMEM_MAX_TEAMS", "7"},
             {"NVSHMEM_DISABLE_NVLS", "1"},
             {"NVSHMEM_CUMEM_GRANULARITY", "536870912"},
             {"NVSHMEM_DISABLE_MNNVL", mnnvl},
         }) {
        CHECK_EQUAL(read.count(name) == 1 ? read.at(name) : "not set", value);
    }
}

// The handle of another rank: as this one's, of another process on another host.
std::string other(std::string handle) {
    handle[sizeof(char[8])] ^= 1;                     // process
    handle[sizeof(char[8]) + sizeof(uint64_t)] ^= 1;  // host
    return handle;
}

TEST(rank_0_has_its_settings_before_it_makes_the_unique_id) {
    Device device(0, "");
    SymmetricMemory memory(device, options(0));
    const std::string handle = memory.local_handle();
    check_settings("1");
    memory.connect({handle, other(handle)});
    CHECK_EQUAL(driver::count("nvshmemx_get_uniqueid"), 1);
}

TEST(other_ranks_have_their_settings_before_they_join) {
    Device device(0, "");
    SymmetricMemory memory(device, options(1));
    const std::string handle = memory.local_handle();
    CHECK_EQUAL(driver::nvshmem_environment().size(), size_t{0});
    memory.connect({other(handle), handle});
    check_settings("1");
}

TEST(a_user_s_depth_of_queues_is_kept) {
    setenv("NVSHMEM_QP_DEPTH", "4096", 1);
    Device device(0, "");
    SymmetricMemory memory(device, options(0));
    (void)memory.local_handle();
    CHECK_EQUAL(driver::nvshmem_environment().at("NVSHMEM_QP_DEPTH"), std::string("4096"));
}

TEST(nvlink_between_hosts_is_on_where_it_is_allowed) {
    Device device(0, "");
    SymmetricMemoryOptions allowed = options(0);
    allowed.allow_mnnvl = true;
    SymmetricMemory memory(device, allowed);
    (void)memory.local_handle();
    check_settings("0");
}

}  // namespace
}  // namespace ep
