// For the host half of the CUDA target, whose kernels are compiled and never run: the host target's.
#pragma once

#include "device/host/row_copy.h"
