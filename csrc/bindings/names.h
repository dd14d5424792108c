// What Python calls the values of our enums, by number.
#pragma once

namespace ep {

inline constexpr const char* kOperationNames[] = {
#define EP_OPERATION_NAME(value, name) name,
#include "kernels/protocol/names.def"
};
inline constexpr const char* kFailureReasonNames[] = {
#define EP_FAILURE_REASON(value, name) name,
#include "kernels/protocol/names.def"
};
inline constexpr const char* kHopNames[] = {
#define EP_HOP_NAME(value, name) name,
#include "kernels/protocol/names.def"
};
inline constexpr const char* kOwedNames[] = {
#define EP_OWED(value, name) name,
#include "kernels/protocol/names.def"
};
inline constexpr const char* kSeriesNames[] = {
#define EP_SERIES(value, name) name,
#include "kernels/protocol/names.def"
};
inline constexpr const char* kHandleFaultNames[] = {
#define EP_HANDLE_FAULT(value, name) name,
#include "kernels/protocol/names.def"
};

}  // namespace ep
