// The Python module continuum_ops._C. Importing it registers the CPU kernels (static initialisers of the other files); what
// takes no tensors is bound here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu_isa.h"
#include "parallel.h"
#include "position_transform_plan.h"

#define CO_STRING_(x) #x
#define CO_STRING(x) CO_STRING_(x)

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled CPU kernels of continuum_ops";
  m.def("isa", &continuum_ops::current_isa, "Instruction set whose kernels run");
  m.def("isas", &continuum_ops::available_isas, "Instruction sets that this machine can run, best first");
  m.def("set_isa", &continuum_ops::set_isa, pybind11::arg("name"), "Choose the kernels of another instruction set (tests, measurements)");
  pybind11::enum_<continuum_ops::Grids>(m, "Grids", "Heads of position attention that go through a grid")
      .value("never", continuum_ops::Grids::never)
      .value("when_faster", continuum_ops::Grids::when_faster)
      .value("when_possible", continuum_ops::Grids::when_possible);
  m.def("set_grids", [](continuum_ops::Grids use) { continuum_ops::use_of_grids() = use; }, pybind11::arg("use"),
        "Choose which heads of position attention go through a grid (tests, measurements)");
  m.def("heads_through_grids", &continuum_ops::heads_through_grids, "Heads that have gone through a grid, passes counted apart");
  m.def("started_threads", [] { return continuum_ops::started_threads; }, "Whether an operator called by this thread has used several threads");
  m.def("build_info", [] {
    pybind11::dict info;
    info["compiler"] = __VERSION__;
    info["torch_target_version"] = CO_STRING(TORCH_TARGET_VERSION);
#if defined(__SANITIZE_ADDRESS__)
    info["sanitizer"] = "address";
#elif defined(__SANITIZE_THREAD__)
    info["sanitizer"] = "thread";
#endif
    return info;
  });
}
