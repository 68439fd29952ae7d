// The part of DLPack 1.x that crosses our boundary, declared by us so that no framework header is needed.
// Field order and sizes follow the DLPack ABI; only what we read is named.
#pragma once

#include <cstdint>

extern "C" {

struct DLPackVersion {
  uint32_t major;
  uint32_t minor;
};

// Values of DLDevice::device_type that we tell apart.
enum : int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3 };

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

// Values of DLDataType::code that we tell apart.
enum : uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6, kDLFloat8_e4m3fn = 10 };

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;      // in elements; null means contiguous (before version 1.2)
  uint64_t byte_offset;  // added to data
};

// What an unversioned capsule ("dltensor") holds.
struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};

constexpr uint64_t kDLFlagReadOnly = 1;

// What a versioned capsule ("dltensor_versioned") holds.
struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned*);
  uint64_t flags;
  DLTensor dl_tensor;
};

// The table of C functions that a producer hangs on its tensor type, so that no capsule is made per call.
struct DLPackExchangeAPIHeader {
  DLPackVersion version;
  DLPackExchangeAPIHeader* prev_api;  // an older table, or null
};

struct DLPackExchangeAPI {
  DLPackExchangeAPIHeader header;
  int (*managed_tensor_allocator)(DLTensor* prototype, DLManagedTensorVersioned** out, void* error_ctx,
                                  void (*set_error)(void* error_ctx, const char* kind, const char* message));
  int (*managed_tensor_from_py_object_no_sync)(void* py_object, DLManagedTensorVersioned** out);
  int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned* tensor, void** out_py_object);
  int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out);  // borrows; may be null
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** out_stream);
};

}  // extern "C"

static_assert(sizeof(DLTensor) == 48, "DLTensor must match the DLPack ABI of 64-bit targets");
