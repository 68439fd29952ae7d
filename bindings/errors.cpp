#include "errors.h"

#include <pybind11/pybind11.h>

#include "glm5/check.h"

namespace glm5::python {
namespace {

// The class every layer raises; a bare ValueError where the base package is absent.
void raise_contract_error(const char* sentence) {
  PyObject* errors = PyImport_ImportModule("glm5sdk.core.errors");
  PyObject* type = errors ? PyObject_GetAttrString(errors, "ContractError") : nullptr;
  PyErr_Clear();
  PyErr_SetString(type ? type : PyExc_ValueError, sentence);
  Py_XDECREF(type);
  Py_XDECREF(errors);
}

}  // namespace

void translate_contract_errors() {
  pybind11::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const glm5::ContractError& e) {
      raise_contract_error(e.what());
    }
  });
}

}  // namespace glm5::python
