// A GPU as the host sees it: what counts as none, and launches that would wait for ever.
#include <cstring>
#include <string>

#include "device/device_runtime.h"
#include "driver.h"
#include "errors.h"
#include "testing.h"

namespace ep {
namespace {

struct NoArgs {};
void kernel(NoArgs) {}

std::string launch_error(int blocks, int ranks_on_device, size_t shared_bytes = 0) {
    Device device(0, "");
    device.share_with(ranks_on_device);
    return error_of(
        [&] { device.launch("some_kernel", &kernel, {blocks, 256, shared_bytes, true}, {}, 0); });
}

TEST(without_a_gpu_there_are_none) {
    driver::machine().failing["cudaGetDeviceCount"] = cudaErrorNoDevice;
    CHECK_EQUAL(Device::count(), 0);
}

TEST(without_a_driver_there_are_none) {
    driver::machine().failing["cudaGetDeviceCount"] = cudaErrorInsufficientDriver;
    driver::machine().driver_version = 0;
    CHECK_EQUAL(Device::count(), 0);
}

TEST(a_driver_that_is_too_old_is_named_with_both_versions) {
    driver::machine().failing["cudaGetDeviceCount"] = cudaErrorInsufficientDriver;
    driver::machine().driver_version = 12020;
    const std::string said = error_of([] { Device::count(); });
    CHECK(contains(said, "CUDA driver version is insufficient for CUDA runtime version"));
    CHECK(contains(said, "serves CUDA 12.2 and older, this module is built with CUDA 13.0"));
}

TEST(any_other_error_is_cuda_s_own_words) {
    for (const cudaError_t error : {cudaErrorNotPermitted, cudaErrorDevicesUnavailable}) {
        driver::machine().failing["cudaGetDeviceCount"] = error;
        const std::string said = error_of([] { Device::count(); });
        CHECK(contains(said, cudaGetErrorString(error)));
        CHECK(contains(said, cudaGetErrorName(error)));
    }
}

TEST(a_device_says_why_it_cannot_be_had) {
    driver::machine().failing["cudaGetDeviceCount"] = cudaErrorNotPermitted;
    CHECK(contains(error_of([] { Device device(0, ""); }), "operation not permitted"));
}

TEST(a_grid_that_is_not_resident_is_refused_with_a_number_that_is) {
    CHECK_EQUAL(launch_error(132, 1), std::string("no error"));
    CHECK(contains(launch_error(133, 1), "at most 132 blocks a rank (DEEP_EP_LAUNCH_SHAPE)"));
    CHECK(contains(launch_error(100, 2), "at most 66 blocks a rank (DEEP_EP_LAUNCH_SHAPE)"));
}

TEST(more_ranks_than_blocks_are_refused_without_impossible_advice) {
    const std::string said = launch_error(1, 133);
    CHECK(contains(said, "133 ranks share GPU 0, which holds 132 blocks"));
    CHECK(contains(said, "Put fewer ranks on it."));
}

TEST(ranks_that_share_a_gpu_launch_without_the_cooperative_attribute) {
    CHECK_EQUAL(launch_error(16, 2), std::string("no error"));
    CHECK(!driver::launches().at(0).cooperative);
    CHECK_EQUAL(launch_error(16, 1), std::string("no error"));
    CHECK(driver::launches().at(1).cooperative);
}

// Whoever launches may find the same kernel waiting for this launch.
TEST(launches_change_nothing_of_a_kernel) {
    Device device(0, "");
    device.prepare(&kernel);
    const int asked = driver::count("cudaFuncSetAttribute");
    const auto launch = [&](size_t shared_bytes, bool cooperative) {
        return error_of([&] {
            device.launch("some_kernel", &kernel, {4, 256, shared_bytes, cooperative}, {}, 0);
        });
    };
    for (const size_t bytes : {size_t{0}, kMaxSharedBytes / 2, kMaxSharedBytes}) {
        CHECK_EQUAL(launch(bytes, true), std::string("no error"));
        CHECK_EQUAL(launch(bytes, false), std::string("no error"));
    }
    CHECK_EQUAL(driver::count("cudaFuncSetAttribute"), asked);
    CHECK(contains(launch(kMaxSharedBytes + 1, true), "does not fit"));
}

TEST(a_gpu_with_less_shared_memory_launches_what_fits) {
    driver::machine().most_shared_bytes = 99 * 1024;
    Device device(0, "");
    device.prepare(&kernel);
    const auto launch = [&](size_t shared_bytes) {
        return error_of(
            [&] { device.launch("some_kernel", &kernel, {4, 256, shared_bytes, true}, {}, 0); });
    };
    CHECK_EQUAL(launch(99 * 1024), std::string("no error"));
    CHECK(contains(launch(100 * 1024), "does not fit"));
}

TEST(kernels_of_ranks_that_share_a_gpu_divide_its_memory_alike) {
    Device device(0, "");
    device.prepare(&kernel);
    const std::string most_shared = "cudaFuncSetAttribute, division 100";
    device.share_with(1);
    CHECK_EQUAL(driver::count(most_shared), 0);
    device.share_with(2);
    CHECK_EQUAL(driver::count(most_shared), 2);  // that of the device, and this one
}

TEST(a_clock_is_written_on_its_stream_while_nobody_waits) {
    Device device(0, "");
    driver::machine().argument_bytes = sizeof(uint64_t*);
    uint64_t where = 0;
    const cudaStream_t stream = driver::new_stream();
    driver::begin_capture(stream);
    const size_t before = driver::calls().size();
    device.write_clock(&where, reinterpret_cast<Stream>(stream));
    driver::end_capture(stream);
    const driver::Launch& launch = driver::launches().at(0);
    CHECK(launch.stream == stream);
    CHECK_EQUAL(launch.blocks, 1u);
    uint64_t* argument = nullptr;
    std::memcpy(&argument, launch.arguments.data(), sizeof(argument));
    CHECK(argument == &where);
    CHECK(driver::illegal().empty());
    for (size_t call = before; call < driver::calls().size(); ++call)
        CHECK(!contains(driver::calls()[call], "Synchronize"));
}

// Who waits in a copy to memory that is not pinned holds a lock of the driver.
TEST(values_pass_through_pinned_memory) {
    Device device(0, "");
    int value = 7;
    const auto stream = reinterpret_cast<Stream>(driver::new_stream());
    CHECK_EQUAL(device.read(&value, stream), 7);
    device.poke(&value, 8);
    CHECK_EQUAL(device.peek(&value), 8);
    CHECK_EQUAL(driver::count("cudaMemcpyAsync"), 3);
    CHECK_EQUAL(driver::count("cudaMemcpyAsync, not pinned"), 0);
}

}  // namespace
}  // namespace ep
