// One-sided communication between ranks. Every rank owns one symmetric memory of equal layout; an
// offset into it names the same place on every rank. Kernels get a Transport by value.
//
//   put_warp(dst, offset, src, bytes, qp)  Full warp. Writes to dst's memory; multiples of 16 bytes. What
//                                          elect_one()'s lane releases afterwards covers the put.
//                                          `src` must stay unchanged until a later signal on the same
//                                          queue pair has been seen by dst; for ranks out of NVLink
//                                          reach it must lie in symmetric memory.
//   put_row(dst, offset, row, qp)          Full warp. The same for what a RowCopy has taken, and covered only
//                                          behind its finish() and a block_sync(). dst is within NVLink reach.
//   put(dst, offset, src, bytes, qp)       One thread. The same for a few times 16 bytes.
//   put_word(dst, offset, value, qp)       One thread. 8 bytes.
//   fence(dst, qp)                         One thread. Puts to dst on this queue pair that happened
//                                          before are delivered before later operations on it. Orders
//                                          nothing between queue pairs or destinations.
//   quiet(dst, qp)                         One thread. Puts and signals to dst on this queue pair that
//                                          happened before are complete: delivered, sources reusable.
//   signal(dst, offset, value, qp)         One thread. Sets a word of dst's control region, releasing
//                                          everything ordered before it by fence(). Pairs with poll().
//   poll(offset)                           One thread. This rank's word, acquiring what its signal
//                                          released; 0 while nothing has arrived.
//   newest(offset)                         The same for what is written once and may be learned at any
//                                          time: on the host target without waiting for its stamp.
//   arrival_ns(offset)                     When the signal just seen by poll() arrived, on this rank's
//                                          clock; without stamps_arrivals(), the time of this call.
//   stamps_arrivals()                      Whether signals carry the time of their arrival.
//   flush()                                One thread. No later operation will follow soon: lets
//                                          waiting ranks know.
//   direct(dst, offset)                    A pointer when dst's memory can be addressed, else nullptr.
//   all_direct()                           Whether every rank's memory can.
//   local(offset)                          This rank's own memory.
#pragma once

#include "device/target.h"

#if defined(EP_TARGET_CUDA)
#include "transport/cuda/transport.cuh"
#else
#include "transport/host/transport.h"
#endif
