// What a GPU takes, for simulations that run kernels in its time. Figures of a model, none of a GPU's run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

namespace ep::host {

// The module that programs import has no use for it, and is spared the question at every step.
#if defined(EP_WITHOUT_TIME_MODEL)
constexpr bool kHasTimeModel = false;
#else
constexpr bool kHasTimeModel = true;
#endif

struct CostModel {
#define EP_COST(name) double name = 0;
#include "device/host/costs.def"
};

// What a thread does that another one could notice, or that takes longer than its instructions.
enum class Step {
    kOther,
    kLoad,           // of a word that others write
    kRead,           // the same, in shared memory
    kStore,          // of such a word; also a reduction that returns nothing
    kWrite,          // the same, in shared memory
    kUpdate,         // an atomic whose result is used
    kRelease,        // a store or a reduction behind all that came before
    kReleaseUpdate,  // an atomic behind all that came before, whose result is used
    kCopyWarp,       // of so many bytes, by all lanes
    kCopyBlock,
    kCopyThread,
    kLoadVector,  // 16 bytes, of several that are under way
    kTakeRow,     // a bulk copy into shared memory
    kGiveRow,     // and out of it
};

// Where the time of a thread goes.
enum class Spent {
#define EP_SPENT(value, name) value,
#include "device/host/spent.def"
};
inline constexpr const char* kSpentNames[] = {
#define EP_SPENT(value, name) name,
#include "device/host/spent.def"
};
constexpr int kNumSpent = std::size(kSpentNames);

// How often the first lanes of all warps have looked at something that they wait for.
struct Looks {
    uint64_t all = 0;
    uint64_t in_vain = 0;
};

// One launch of a rank: where the time of its blocks' first threads went, in the order of Spent, mean of the blocks.
struct LaunchRecord {
    std::string name;
    double begin_ns;
    double end_ns;
    double spent_ns[kNumSpent];
    Looks looks;
};

// Something that one user has at a time, in the order in which they come.
struct Port {
    double free_ns = 0;

    // When the use begins, which takes `ns`.
    double take(double at_ns, double ns) {
        const double begin = std::max(at_ns, free_ns);
        free_ns = begin + ns;
        return begin;
    }
};

// A rate that threads share who do not come in the order of their clocks: each takes what is left of it from its own
// time on.
class SharedRate {
  public:
    // When `ns` of all of it have been used, from `at_ns` after the begin on.
    double take(double at_ns, double ns) {
        auto bin = static_cast<size_t>(at_ns / kBinNs);
        double left_ns = ns;
        while (true) {
            bin = first_with_room(bin);
            double& used_ns = bins_[bin].used_ns;
            const double room_ns = kBinNs - used_ns;
            if (left_ns < room_ns) {
                used_ns += left_ns;
                return std::max(at_ns + ns, static_cast<double>(bin) * kBinNs + used_ns);
            }
            left_ns -= room_ns;
            used_ns = kBinNs;
            bins_[bin].next = bin + 1;
        }
    }

  private:
    static constexpr double kBinNs = 64;
    struct Bin {
        double used_ns = 0;
        size_t next = 0;  // that may have room, if this one has none
    };

    size_t first_with_room(size_t bin) {
        size_t last = bin;
        while (last < bins_.size() && bins_[last].next > last) last = bins_[last].next;
        if (last >= bins_.size()) bins_.resize(2 * last + 64);
        if (bin < last) bins_[bin].next = last;
        return last;
    }

    std::vector<Bin> bins_;
};

// A put that waits for its acknowledgement: of which launch, and from where.
struct PutOrigin {
    uint64_t launch = 0;
    int place = 0;
};

// Of one GPU.
struct GpuPorts {
    Port nvlink_out;
    Port nvlink_in;
    Port nic_out;
    Port nic_in;
};

}  // namespace ep::host
