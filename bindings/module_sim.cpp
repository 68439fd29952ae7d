// The module glm5sdk_sim._C: CUDA kernels on the simulator, as functions of (*inputs, *outputs, workspace=None).
#include "bind.h"
#include "errors.h"
#include "glm5/thread_pool.h"
#include "sim/cuda/launch.h"
#include "sim/cuda/selftest/selftest.h"

namespace glm5::python {

#define GLM5_OP(op, ...) void bind_##op(py::module_& module);
#include "glm5_ops.inc"
#undef GLM5_OP

namespace {

std::vector<sim::SelfTest> selftests() {
  std::vector<sim::SelfTest> all;
  for (const auto& some : {sim::memory_selftests(), sim::warp_selftests(), sim::hopper_selftests()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

void selftest(const std::string& name, bool bug, const TensorView& in, const TensorView& out) {
  if (in.numel() != sim::kSelfTestValues || out.numel() != sim::kSelfTestValues) {
    fail("selftest: in and out have %lld and %lld elements, needs %d", static_cast<long long>(in.numel()),
         static_cast<long long>(out.numel()), sim::kSelfTestValues);
  }
  for (const sim::SelfTest& test : selftests()) {
    if (test.name != name) continue;
    sim::Guarded input(in, "in"), output(out, "out");
    test.run(bug, reinterpret_cast<const unsigned short*>(input.view().data<bf16>()), output.view().out<float>());
    return output.copy_back();
  }
  fail("selftest: name is \"%s\", needs one of selftests()", name.c_str());
}

}  // namespace
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
  module.def("selftests", [] {
    py::list names;
    for (const sim::SelfTest& test : selftests()) names.append(test.name);
    return names;
  });
  module.def("selftest", &selftest, py::arg("name"), py::arg("bug"), py::arg("values"), py::arg("out"),
             "Runs a small kernel, with its planted bug or without: bf16 [64, 64] to f32 [64, 64].");
#define GLM5_OP(op, ...) bind_##op(module);
#include "glm5_ops.inc"
#undef GLM5_OP
}
