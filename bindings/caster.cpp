#include "caster.h"

namespace glm5::python {
namespace {

constexpr uint32_t kMajor = 1;

// The table of a major version we know, from the attribute's capsule; null when there is none.
const DLPackExchangeAPI* table_of(PyTypeObject* type) {
  for (const char* name : {"__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"}) {
    PyObject* found = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name);
    if (found == nullptr) {
      PyErr_Clear();
      continue;
    }
    const py::object attribute = py::reinterpret_steal<py::object>(found);
    void* pointer = nullptr;
    if (PyCapsule_CheckExact(found)) pointer = PyCapsule_GetPointer(found, "dlpack_exchange_api");
    if (pointer == nullptr) {
      PyErr_Clear();
      continue;
    }
    for (auto* header = static_cast<DLPackExchangeAPIHeader*>(pointer); header != nullptr; header = header->prev_api) {
      if (header->version.major != kMajor) continue;
      const auto* table = reinterpret_cast<const DLPackExchangeAPI*>(header);
      if (table->dltensor_from_py_object_no_sync != nullptr) return table;
    }
  }
  return nullptr;
}

// Looking the attribute up costs more than a small kernel, so a few types are remembered. Each is kept alive: a freed
// type's address could come back as another type. Guarded by the GIL.
const DLPackExchangeAPI* remembered_table(PyTypeObject* type) {
  constexpr int kMost = 16;
  static struct {
    PyTypeObject* type;
    const DLPackExchangeAPI* table;
  } known[kMost];
  static int count = 0;
  for (int i = 0; i < count; ++i) {
    if (known[i].type == type) return known[i].table;
  }
  const DLPackExchangeAPI* table = table_of(type);
  if (table != nullptr && count < kMost) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    known[count++] = {type, table};
  }
  return table;
}

// A capsule from object.__dlpack__(), versioned if the producer knows how; null when it has no such method.
py::object capsule_of(py::handle object) {
  const py::object method = py::getattr(object, "__dlpack__", py::none());
  if (method.is_none() || PyType_Check(object.ptr())) return {};
  try {
    return method(py::arg("max_version") = py::make_tuple(1, 0));
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return method();
}

bool borrow_capsule(py::handle object, Borrowed& out) {
  out.owner = capsule_of(object);
  PyObject* capsule = out.owner.ptr();
  if (capsule == nullptr) return false;
  // The capsule is not renamed to "used": its own destructor frees the tensor when the call is over.
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    auto* managed = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    if (managed->version.major != kMajor) {
      fail("tensor: its DLPack version is %u, needs %u", managed->version.major, kMajor);
    }
    out.tensor = managed->dl_tensor;
    out.read_only = (managed->flags & kDLFlagReadOnly) != 0;
    return true;
  }
  if (PyCapsule_IsValid(capsule, "dltensor")) {
    out.tensor = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"))->dl_tensor;
    return true;
  }
  fail("tensor: __dlpack__() returned something that is no DLPack capsule");
}

// What every kernel takes for granted.
void check(const DLTensor& tensor) {
  if (tensor.device.device_type != kDLCPU && tensor.device.device_type != kDLCUDAHost) {
    fail("tensor: its DLPack device type is %d, needs %d (memory of the CPU)", tensor.device.device_type, kDLCPU);
  }
  if (tensor.dtype.lanes != 1) fail("tensor: its dtype has %d lanes, needs 1", tensor.dtype.lanes);
  int64_t numel = 1;
  bool contiguous = true;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.strides != nullptr && tensor.shape[i] > 1 && tensor.strides[i] != numel) contiguous = false;
    numel *= tensor.shape[i];
  }
  if (numel == 0) return;
  if (!contiguous) fail("tensor: it is strided, needs to be contiguous: call .contiguous() first");
  if (tensor.data == nullptr) fail("tensor: it has no memory (a fake or meta tensor?), needs real data");
}

}  // namespace

bool borrow(py::handle object, Borrowed& out) {
  if (const DLPackExchangeAPI* table = remembered_table(Py_TYPE(object.ptr()))) {
    if (table->dltensor_from_py_object_no_sync(object.ptr(), &out.tensor) != 0) {
      if (!PyErr_Occurred()) fail("tensor: its producer refused to lend it");
      throw py::error_already_set();
    }
  } else if (!borrow_capsule(object, out)) {
    return false;
  }
  check(out.tensor);
  return true;
}

}  // namespace glm5::python
