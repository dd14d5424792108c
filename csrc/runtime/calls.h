// Calls as the runtime gets them; see kernels/protocol/calls.def.
#pragma once

#include "device/device_runtime.h"
#include "kernels/protocol/calls.cuh"
#include "kernels/protocol/messages.cuh"

namespace ep {

#define EP_FIELD(type, name, ...) type name{__VA_ARGS__};

struct LowLatencySize {
#define EP_SIZE EP_FIELD
#include "kernels/protocol/calls.def"
};

struct LaunchStream {
#define EP_STREAM EP_FIELD
#include "kernels/protocol/calls.def"
};

struct OperationCall : LowLatencySize, OperationOptions, LaunchStream {};

struct DispatchCall : OperationCall, DispatchTensors {
#define EP_DISPATCH_FLAG EP_FIELD
#include "kernels/protocol/calls.def"

    Payload payload() const {
        if (!use_fp8) return Payload::kBf16;
        if (use_ue8m0) return Payload::kFp8Ue8m0;
        return round_scale ? Payload::kFp8PowerOfTwo : Payload::kFp8;
    }
};

struct CombineCall : OperationCall, CombineTensors {
#define EP_COMBINE_FLAG EP_FIELD
#include "kernels/protocol/calls.def"
};

// What a combine takes of its dispatch.
struct HandleCall : LowLatencySize, Routing, HandleTensors {};

struct NormalCall : NormalSize, NormalHandle, LaunchStream {};

struct NotifyCall : NormalCall, NotifyTensors {};

struct NormalDispatchCall : NormalCall,
                            NormalDispatchTensors,
                            NormalDispatchFlags,
                            NormalOperationOptions {};

struct NormalCombineCall : NormalCall, NormalCombineTensors, NormalOperationOptions {};

struct DispatchLayoutCall : DispatchLayoutArgs, LaunchStream {};

struct CopyRowsCall : CopyRowsTensors, LaunchStream {};

struct SumRowsCall : SumRowsArgs, LaunchStream {};

#undef EP_FIELD

}  // namespace ep
