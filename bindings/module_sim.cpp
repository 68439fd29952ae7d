// The module glm5sdk_sim._C: CUDA kernels on the simulator, as functions of (*inputs, *outputs, workspace=None).
#include "bind.h"
#include "errors.h"
#include "glm5/thread_pool.h"
#include "sim/cuda/launch.h"

namespace glm5::python {

#define GLM5_OP(op, ...) void bind_##op(py::module_& module);
#include "glm5_ops.inc"
#undef GLM5_OP

}  // namespace glm5::python

PYBIND11_MODULE(_C, module) {
  using namespace glm5::python;
  namespace sim = glm5::sim;
  module.doc() = "CUDA kernels of glm5sdk on a simulator; tensors are borrowed over DLPack and must be contiguous.";
  module.attr("api_version") = 1;
  module.attr("replay_variable") = sim::kReplayVariable;
  translate_contract_errors();
  py::register_local_exception<sim::KernelFault>(module, "KernelFault", PyExc_RuntimeError);
  module.def("get_num_threads", &glm5::get_num_threads);
  module.def("set_num_threads", &glm5::set_num_threads, py::arg("n"));
  module.def(
      "configure", [](const char* settings) { sim::configure(sim::parse_settings(settings)); }, py::arg("settings"),
      "How kernels are scheduled: \"order=random,copies=late,seed=7\"; the replay variable goes before it.");
  module.def("settings", [] { return sim::to_string(sim::current_settings()); });
  module.def("check_values", &sim::check_values, py::arg("on"));
  module.def("launch_counts", [] {
    const sim::LaunchCounts counts = sim::launch_counts();
    return py::make_tuple(counts.launches, counts.blocks);
  });
#define GLM5_OP(op, ...) bind_##op(module);
#include "glm5_ops.inc"
#undef GLM5_OP
}
