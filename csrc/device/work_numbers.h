// Numbers by which kernels share out work, of the target. On a GPU many threads are under way at a time; on the
// host lanes are fibers, which one lane spares, and the processor looks ahead by itself. The host target has the
// GPU's in the model of its time (EP_TIME_MODEL), and in tests of what its lanes do together (EP_NUMBERS_OF_GPU).
#pragma once

#include "device/target.h"

namespace ep {

#if defined(EP_TARGET_CUDA) || defined(EP_TIME_MODEL) || defined(EP_NUMBERS_OF_GPU)
// Lanes that share a group of 128 channels when casting (16 bytes each), and groups a lane has in work.
constexpr int kCastLanes = 16;
constexpr int kCastUnroll = 4;

// Rows that a step of a normal operation moves at least, if there are so many: what waits for its writes pays for
// all of them.
constexpr int kLeastStep = 16;

// Lanes of a warp that leads a team in a normal operation.
constexpr int kLeaderLanes = 32;

// Vectors a thread sums up at a time, and rows of which it has them under way.
constexpr int kTileVectors = 4;
constexpr int kRowsInFlight = 2;
#else
constexpr int kCastLanes = 1;
constexpr int kCastUnroll = 1;
constexpr int kLeastStep = 32;  // fibers meet twice in a step
constexpr int kLeaderLanes = 1;
constexpr int kTileVectors = 8;
constexpr int kRowsInFlight = 1;
#endif

// Looks for something to do in a normal operation, for each look whether somebody has given it up. Who sleeps until
// a signal comes, as a rank of the host target does, looks once.
#if defined(EP_TARGET_CUDA) || defined(EP_TIME_MODEL)
constexpr int kLooksPerCheck = 64;
#else
constexpr int kLooksPerCheck = 1;
#endif

// Loads of 16 bytes that a thread of a GPU has under way in a copy.
constexpr int kLoadsInFlight = 8;

}  // namespace ep
