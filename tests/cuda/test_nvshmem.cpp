// The world that NVSHMEM gives a process, on a stand-in that reads its environment in its first call.
// needs: nvshmem
#include <cstdlib>
#include <string>

#include "driver.h"
#include "errors.h"
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
             {"NVSHMEM_IBGDA_NUM_RC_PER_PE", "1"},
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

// Handles as the device gets them.
std::vector<int> handles(const QueuePairs& pairs) {
    return {pairs.handles, pairs.handles + pairs.num_handles * QueuePairs::kCopies};
}

// Rank 0 of two on different hosts, joined.
std::string connect(const SymmetricMemoryOptions& asked, QueuePairs* pairs = nullptr) {
    Device device(0, "");
    SymmetricMemory memory(device, asked);
    const std::string handle = memory.local_handle();
    return error_of([&] {
        memory.connect({handle, other(handle)});
        if (pairs != nullptr) *pairs = memory.transport().queue_pairs;
    });
}

TEST(each_queue_pair_is_there_so_often_that_its_number_means_no_default) {
    QueuePairs pairs{};
    CHECK_EQUAL(connect(options(0), &pairs), std::string("no error"));
    CHECK_EQUAL(pairs.num_handles, 12);
    const auto found = handles(pairs);
    for (int qp = 0; qp < 24; ++qp) {
        CHECK_EQUAL(pairs.handle(qp) - pairs.handles, qp % 12 * QueuePairs::kCopies);
        for (int copy = 0; copy < QueuePairs::kCopies; ++copy)
            CHECK_EQUAL(pairs.handle(qp)[copy], driver::machine().first_handle + qp % 12);
    }
    CHECK(QueuePairs::kCopies != NVSHMEMX_QP_DEFAULT);
    CHECK_EQUAL(found.size(), size_t{24});
}

// The first of twelve handles is a reserved one.
void check_refused(int reserved) {
    driver::machine().first_handle = reserved;
    driver::machine().is_first_handle_alone = true;
    const std::string said = connect(options(0));
    CHECK(contains(said, "nvshmemx_qp_create returned the handle " + std::to_string(reserved)));
}

TEST(a_created_handle_that_means_the_host_s_queue_pair_is_refused) {
    check_refused(NVSHMEMX_QP_HOST);
}
TEST(a_created_handle_that_means_the_default_ones_is_refused) {
    check_refused(NVSHMEMX_QP_DEFAULT);
}
TEST(a_created_handle_that_means_any_is_refused) { check_refused(NVSHMEMX_QP_ANY); }

TEST(a_transport_without_queue_pairs_uses_the_default_one_alone) {
    driver::machine().has_queue_pairs = false;
    QueuePairs pairs{};
    CHECK_EQUAL(connect(options(0), &pairs), std::string("no error"));
    CHECK_EQUAL(pairs.num_handles, 1);
    for (const int handle : handles(pairs)) CHECK_EQUAL(handle, int{NVSHMEMX_QP_DEFAULT});
}

TEST(queue_pairs_are_created_once) {
    CHECK_EQUAL(connect(options(0)), std::string("no error"));
    CHECK_EQUAL(connect(options(0)), std::string("no error"));
    CHECK_EQUAL(driver::count("nvshmemx_qp_create"), 1);
    CHECK_EQUAL(driver::count("nvshmemx_init_attr"), 1);
}

// One rank has collected its garbage, the other has not yet.
TEST(memory_is_used_again_only_if_it_is_free_on_all_ranks) {
    Device device(0, "");
    SymmetricMemory next(device, options(0));
    std::string before;
    {
        SymmetricMemory first(device, options(0));
        const std::string handle = first.local_handle();
        first.connect({handle, other(handle)});
        before = other(next.local_handle());
    }
    next.connect({next.local_handle(), before});
    CHECK_EQUAL(driver::count("nvshmem_align"), 2);
    SymmetricMemory last(device, options(0));
    const std::string handle = last.local_handle();
    last.connect({handle, other(handle)});
    CHECK_EQUAL(driver::count("nvshmem_align"), 2);
}

TEST(nvlink_between_hosts_that_is_not_there_is_refused) {
    SymmetricMemoryOptions asked = options(0);
    asked.allow_mnnvl = true;
    const std::string said = connect(asked);
    CHECK(contains(said, "allow_mnnvl is True"));
    CHECK(contains(said, "nvidia-imex"));
    CHECK(contains(said, "allow_mnnvl=False"));
}

TEST(nvlink_between_hosts_is_used_where_it_is) {
    driver::machine().reachable = {true, true};
    SymmetricMemoryOptions asked = options(0);
    asked.allow_mnnvl = true;
    CHECK_EQUAL(connect(asked), std::string("no error"));
}

}  // namespace
}  // namespace ep
