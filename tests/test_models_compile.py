"""Every model preset under torch.compile, torch.export and AOTInductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_cases import CLASSES, PRESETS, ModelCase, by_preset, run
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_and_plain(case: ModelCase, backend: str, dynamic: bool | None) -> None:
    """Outputs and gradients at three sizes; the third compiles nothing if the size is a symbol."""
    model, plain = case.model(), case.model()
    compiled: Callable[..., Tensor] = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    sides = (case.side, case.side + 2, case.side + 6) if dynamic is not False else (case.side,)
    for i, side in enumerate(sides):
        inputs, mesh = case.inputs(side=side), case.mesh(model, side)
        with torch._dynamo.config.patch(error_on_recompile=i == 2):
            out = run(compiled, inputs, mesh)
        expected = run(plain, inputs, mesh)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        gradients = torch.autograd.grad(out.square().sum(), list(model.parameters()))
        wanted = torch.autograd.grad(expected.square().sum(), list(plain.parameters()))
        for gradient, right in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(
                gradient, right, rtol=1e-4, atol=1e-5 * float(right.abs().max()) + 1e-6
            )


def all_but(names: set[str]) -> list[Any]:
    """The presets, those of other names marked slow."""
    return [
        pytest.param(case, id=case.preset, marks=() if case.preset in names else pytest.mark.slow)
        for case in PRESETS
    ]


@pytest.mark.parametrize("case", all_but({"tno-cde", "pit-elasticity", "galerkin-burgers"}))
def test_one_graph_serves_every_number_of_points(case):
    compiled_and_plain(case, "eager", True)


@pytest.mark.slow
@by_preset(PRESETS)
def test_gradients_are_compiled_too(case):
    """The first size is a constant of its graph, the second one makes it a symbol."""
    compiled_and_plain(case, "aot_eager", None)


@pytest.mark.slow
@by_preset([case for case in PRESETS if case.preset in ("tno-cde", "galerkin-burgers")])
def test_inductor(case):
    compiled_and_plain(case, "inductor", False)


def test_a_compiled_pit_asks_for_its_geometry():
    case = next(case for case in PRESETS if case.preset == "pit-darcy")
    model = case.model()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(
        Exception, match=r"pass PiT a geometry made outside: model\(u, model.geometry\(mesh\)\)"
    ):
        run(compiled, case.inputs(), case.grid())
    torch._dynamo.reset()
    broken = torch.compile(model, backend="eager")
    torch.testing.assert_close(
        run(broken, case.inputs(), case.grid()), run(model, case.inputs(), case.grid())
    )


class OnMesh(nn.Module):
    """A model with its mesh: a function of tensors alone, as torch.export takes it."""

    def __init__(self, model: nn.Module, mesh: Any) -> None:
        super().__init__()
        self.model, self.mesh = model, mesh

    def forward(self, *inputs: Tensor) -> Tensor:
        return run(self.model, inputs, self.mesh)


@by_preset(CLASSES)
def test_export_on_a_mesh(case, tmp_path):
    model = case.model().eval()
    inputs = case.inputs()
    program = torch.export.export(OnMesh(model, case.mesh(model)), inputs)
    torch.export.save(program, tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2").module()
    other = case.inputs(seed=5)
    torch.testing.assert_close(again(*other), run(model, other, case.grid()), rtol=1e-5, atol=1e-5)


class OnPoints(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, u: Tensor, points: Tensor, weights: Tensor) -> Tensor:
        return self.model(u, points, weights=weights)


def export_on_points() -> tuple[nn.Module, torch.export.ExportedProgram, list[tuple[Tensor, ...]]]:
    """A TNO exported for any number of points, and inputs of three sizes."""
    case = next(case for case in PRESETS if case.preset == "tno-darcy64")
    model = case.model().eval()
    examples = []
    for side in (6, 8, 11):
        grid = case.grid(side=side)
        examples.append((*case.inputs(side=side), grid.points, grid.weights))
    n = torch.export.Dim("n", min=2, max=4096)
    shapes = ({1: n}, {0: n}, {0: n})
    return model, torch.export.export(OnPoints(model), examples[0], dynamic_shapes=shapes), examples


def test_export_with_any_number_of_points():
    model, program, examples = export_on_points()
    for u, points, weights in examples:
        expected = model(u, points, weights=weights)
        torch.testing.assert_close(program.module()(u, points, weights), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_aot_inductor(tmp_path):
    model, program, examples = export_on_points()
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    for u, points, weights in examples:
        with torch.no_grad():
            expected = model(u, points, weights=weights)
            torch.testing.assert_close(loaded(u, points, weights), expected, rtol=1e-5, atol=1e-5)
