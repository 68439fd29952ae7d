// The module glm5sdk_<target>._C: kernels as functions of (level, *inputs, *outputs).
#include "bind.h"
#include "errors.h"
#include "glm5/cpuid.h"
#include "glm5/probe.h"
#include "glm5/thread_pool.h"

namespace glm5::python {

#define GLM5_OP(op, ...) void bind_##op(py::module_& module);
#include "glm5_ops.inc"
#undef GLM5_OP

Context context_for(int level) {
  const int most = static_cast<int>(cpu_level());
  if (level < 0 || level > most) fail("native kernel: level is %d, needs 0 to %d on this processor", level, most);
  return Context{static_cast<Level>(level)};
}

}  // namespace glm5::python

PYBIND11_MODULE(_C, module) {
  using namespace glm5::python;
  module.doc() = "Native kernels of glm5sdk; tensors are borrowed over DLPack and must be contiguous.";
  // Compared by the registry before a kernel is called; raised when a signature changes.
  module.attr("api_version") = 1;
  translate_contract_errors();
  module.def("cpu_level", [] { return static_cast<int>(glm5::cpu_level()); });
  module.def("get_num_threads", &glm5::get_num_threads);
  module.def("set_num_threads", &glm5::set_num_threads, py::arg("n"));
  module.def(
      "follow_num_threads", [](uintptr_t function) { glm5::follow_num_threads(reinterpret_cast<int (*)()>(function)); },
      py::arg("function"), "Address of an int function that tells the host program's threads; 0 for none.");
  using Release = py::call_guard<py::gil_scoped_release>;
  module.def("probe_read", &glm5::probe_read, py::arg("bytes"), py::arg("repeats"), Release());
  module.def(
      "probe_product",
      [](int level, int product, double seconds) {
        if (product < 0 || product > 2) glm5::fail("probe_product: product is %d, needs 0, 1 or 2", product);
        return glm5::probe_product(static_cast<glm5::Level>(level), static_cast<glm5::Product>(product), seconds);
      },
      py::arg("level"), py::arg("product"), py::arg("seconds"), Release());
  py::dict levels;  // of each op: the instruction levels that have a kernel of their own
#define GLM5_OP(op, ...) bind_##op(module), levels[#op] = py::make_tuple(__VA_ARGS__);
#include "glm5_ops.inc"
#undef GLM5_OP
  module.attr("levels") = levels;
}
