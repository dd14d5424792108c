// What kernels see of a call: the lists of calls.def that are theirs, as structs.
#pragma once

#include "kernels/protocol/counters.cuh"

namespace ep {

enum Phase : int { kPhaseSend = 1, kPhaseReceive = 2 };

#define EP_FIELD(type, name, ...) type name{__VA_ARGS__};

struct Routing {
#define EP_ROUTING EP_FIELD
#include "kernels/protocol/calls.def"
};

struct HandleTensors {
#define EP_HANDLE EP_FIELD
#include "kernels/protocol/calls.def"
};

struct DispatchTensors : Routing, HandleTensors {
#define EP_DISPATCH EP_FIELD
#include "kernels/protocol/calls.def"
};

struct CombineTensors : Routing, HandleTensors {
#define EP_COMBINE EP_FIELD
#include "kernels/protocol/calls.def"
};

struct OperationOptions {
#define EP_OPERATION EP_FIELD
#include "kernels/protocol/calls.def"
};

struct DispatchLayoutArgs {
#define EP_LAYOUT EP_FIELD
#include "kernels/protocol/calls.def"
};

struct CopyRowsTensors {
#define EP_COPY_ROWS EP_FIELD
#include "kernels/protocol/calls.def"
};

struct SumRowsArgs {
#define EP_SUM_ROWS EP_FIELD
#include "kernels/protocol/calls.def"
};

struct NormalSize {
#define EP_NORMAL_SIZE EP_FIELD
#include "kernels/protocol/calls.def"
};

struct NormalHandle {
#define EP_NORMAL_HANDLE EP_FIELD
#include "kernels/protocol/calls.def"
};

struct NotifyTensors {
#define EP_NOTIFY EP_FIELD
#include "kernels/protocol/calls.def"
};

struct NormalDispatchTensors {
#define EP_NORMAL_DISPATCH EP_FIELD
#include "kernels/protocol/calls.def"
};

struct NormalDispatchFlags {
#define EP_NORMAL_FLAG EP_FIELD
#include "kernels/protocol/calls.def"
};

struct NormalCombineTensors {
#define EP_NORMAL_COMBINE EP_FIELD
#include "kernels/protocol/calls.def"
};

struct NormalOperationOptions {
#define EP_NORMAL_OPERATION EP_FIELD
#include "kernels/protocol/calls.def"
};

#undef EP_FIELD

}  // namespace ep
