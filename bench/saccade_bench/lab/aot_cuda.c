// Stands for libcuda where there is no GPU: a launch is checked and counted, nothing runs.
#include "cuda.h"

#define EXPORT __attribute__((visibility("default")))

// What the device is said to be; set before the first launch.
EXPORT int stub_arch = 90;
EXPORT int stub_shared = 232448;
EXPORT int stub_multiprocessors = 132;
EXPORT long stub_launches = 0;
EXPORT long stub_programs = 0;
static const char *refused = "unknown error of the stand-in for libcuda";

static CUresult refuse(const char *why) {
  refused = why;
  return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
  stub_launches++;
  stub_programs += (long)c->gridDimX * c->gridDimY * c->gridDimZ;
  if (!c->gridDimX || !c->gridDimY || !c->gridDimZ)
    return refuse("a grid without programs");
  if (c->gridDimX > 2147483647u || c->gridDimY > 65535 || c->gridDimZ > 65535)
    return refuse("a grid wider than 2147483647 x 65535 x 65535");
  if (c->blockDimX * c->blockDimY * c->blockDimZ > 1024)
    return refuse("a program of more than 1024 threads");
  if (c->sharedMemBytes > (unsigned)stub_shared)
    return refuse("more shared memory than a program may have");
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **told) {
  *told = refused;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  switch ((int)which) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = stub_arch / 10; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = stub_arch % 10; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = stub_shared; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = stub_shared + 1024; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = stub_multiprocessors; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1; break;
  case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 1; break;
  case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 1; break;
  default: *value = 0;
  }
  return CUDA_SUCCESS;
}

// Memory of the host is taken for the device's.
EXPORT CUresult cuPointerGetAttribute(void *to, CUpointer_attribute which, CUdeviceptr at) {
  *(CUdeviceptr *)to = at;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *which, void **to, CUdeviceptr at) {
  for (unsigned i = 0; i < n; i++)
    if (which[i] == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
      *(CUdeviceptr *)to[i] = at;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction f) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return CUDA_SUCCESS; }
EXPORT CUresult cuModuleLoadData(CUmodule *m, const void *image) { *m = (CUmodule)1; return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) { *f = (CUfunction)1; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice *d, int ordinal) { *d = 0; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)1; return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
EXPORT CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *status) { *status = CU_STREAM_CAPTURE_STATUS_NONE; return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { *n = 1; return CUDA_SUCCESS; }

// Asked for, and nothing to be done.
static CUresult nothing(void) { return CUDA_SUCCESS; }
#define NOTHING(name) EXPORT __typeof__(name) name __attribute__((alias("nothing")));
NOTHING(cuInit)
NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxGetDevice)
NOTHING(cuCtxGetLimit)
NOTHING(cuCtxSetLimit)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuModuleUnload)
NOTHING(cuTensorMapEncodeTiled)
NOTHING(cuTensorMapEncodeIm2col)
