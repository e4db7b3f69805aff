"""The convergence report: its integrals against scipy's adaptive quadrature, and the orders it finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.integrate import dblquad, quad_vec

from continuum_ops import quadrature
from continuum_ops.cli import main
from continuum_ops.experiments import convergence as write_report
from continuum_ops.experiments.convergence import (
    RATES,
    _features,
    _function,
    _operators,
    as_text,
    measure,
    observed_order,
    rules,
)

OPERATORS = {operator.name: operator for operator in _operators(1)}


def heads(matrix: Any, y: Any) -> np.ndarray:
    """M u(y) of one point, (H, C)."""
    u = _function(np.atleast_1d(np.asarray(y, dtype=float))[None])[0]
    return np.stack([u @ matrix[:, h] for h in range(matrix.shape[1])])


def integral(f: Any, lo: float = 0.0, hi: float = 1.0) -> Any:
    return quad_vec(f, lo, hi, epsabs=1e-14, epsrel=1e-14)[0]


def rho(y: float) -> float:
    """Of y = (e^(2 s) - 1) / (e^2 - 1) with s uniform on (0, 1)."""
    return (np.e**2 - 1) / 2 / (1 + (np.e**2 - 1) * y)


@pytest.mark.parametrize("density", [False, True])
def test_the_integrals_on_an_interval(density: bool) -> None:
    q, k, v = _features()
    measure = rho if density else (lambda y: 1.0)
    assert integral(measure) == pytest.approx(1, abs=1e-13)
    x = np.linspace(0, 1, 33)
    for name, top in (("continuum attention, self", 1.0), ("continuum attention, cross", 1.5)):
        found = OPERATORS[name].exact(1, density)
        for i in (0, 7, 32):
            e = lambda y: measure(y / top) * np.exp((heads(q, x[i]) * heads(k, y)).sum(1))[:, None]  # noqa: B023, E731
            expected = integral(lambda y: e(y) * heads(v, y), 0, top) / integral(e, 0, top)  # noqa: B023
            np.testing.assert_allclose(found[:, i], expected, rtol=1e-12, atol=1e-13)
    found = OPERATORS["position attention"].exact(1, density)
    for i in (0, 20):
        e = lambda y: measure(y) * np.exp(-RATES * (x[i] - y) ** 2)[:, None]  # noqa: B023, E731
        expected = integral(lambda y: e(y) * heads(v, y)) / integral(e)  # noqa: B023
        np.testing.assert_allclose(found[:, i], expected, rtol=1e-12, atol=1e-13)
    inner = integral(lambda y: measure(y) * heads(k, y)[:, :, None] * heads(v, y)[:, None])
    for name in ("Galerkin attention", "Fourier attention"):
        expected = (heads(q, x[5])[:, None] @ inner)[:, 0]
        np.testing.assert_allclose(OPERATORS[name].exact(1, density)[:, 5], expected, rtol=1e-12, atol=1e-13)
    found = OPERATORS["patch attention"].exact(1, density)
    scores = np.empty((2, 3, 3))
    for p in range(3):
        for j in range(3):
            both = lambda s: measure(s) / 3 * (heads(q, (s + p) / 3) * heads(k, (s + j) / 3)).sum(1)  # noqa: B023, E731
            scores[:, p, j] = integral(both)
    expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def test_the_integrals_on_a_square() -> None:
    q, k, v = _features()
    x = np.array([0.25, 0.625])
    i = 2 * 9 + 5

    def number(f: Any) -> float:
        return dblquad(lambda b, a: f(np.array([a, b])), 0, 1, 0, 1, epsabs=1e-11, epsrel=1e-11)[0]

    e = lambda y: np.exp((heads(q, x)[0] * heads(k, y)[0]).sum())  # noqa: E731
    expected = number(lambda y: e(y) * heads(v, y)[0, 1]) / number(e)
    found = OPERATORS["continuum attention, self"].exact(2, False)
    assert found[0, i, 1] == pytest.approx(expected, rel=1e-10)
    e = lambda y: np.exp(-RATES[1] * ((x - y) ** 2).sum())  # noqa: E731
    expected = number(lambda y: e(y) * heads(v, y)[1, 0]) / number(e)
    found = OPERATORS["position attention"].exact(2, False)
    assert found[1, i, 0] == pytest.approx(expected, rel=1e-10)


def test_the_order_of_known_errors() -> None:
    sizes = [8.0, 16.0, 32.0]
    for fit in (False, True):
        assert observed_order(sizes, [3 * n**-2.5 for n in sizes], fit) == pytest.approx(2.5, abs=1e-12)
        # What rounding leaves is no part of it.
        errors = [*(n**-4.0 for n in sizes), 1e-16]
        assert observed_order([*sizes, 64.0], errors, fit) == pytest.approx(4, abs=1e-12)
        assert observed_order(sizes, [1e-4, 1e-16, 0.0], fit) is None
    errors = [1.0, 0.5, 0.125]
    assert observed_order(sizes, errors, False) == pytest.approx(2, abs=1e-12)
    assert observed_order(sizes, errors, True) == pytest.approx(1.5, abs=1e-12)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("convergence")
    with pytest.raises(SystemExit) as ended:
        main(["convergence", "--small", "--out", str(folder)])
    assert ended.value.code == 0
    return folder, json.loads((folder / "convergence.json").read_text())


def test_the_theorems_in_numbers(report: tuple[Path, dict[str, Any]]) -> None:
    _, result = report
    assert {(row["operator"], row["source"]) for row in result["rows"]} >= {
        ("continuum attention, self", "CA Theorem 6"),
        ("continuum attention, cross", "CA Theorem 12"),
        ("position attention", "PiT Theorem 2.1"),
    }
    assert len(result["rows"]) == 6 * len(rules(1)) + 5 * len(rules(2))
    for row in result["rows"]:
        errors, order, name = row["errors"], row["order"], row["rule"]
        what = f"{row['operator']}, d = {row['dimension']}, {name}: {errors}"
        if name == "equal weights, uneven points":
            # Another measure's integral: no refinement brings it to this one.
            assert min(errors) > 0.5 * errors[-1] > 1e-3, what
        elif name in ("Gauss-Legendre", "Clenshaw-Curtis"):
            assert errors[-1] < 1e-8 and (order is None or order > 8), what
        elif name == "Monte Carlo":
            assert order == pytest.approx(row["dimension"] / 2, abs=0.35), what
        elif name.startswith("Voronoi"):
            assert order > (1.5 if row["dimension"] == 1 else 1), what
        else:
            assert order == pytest.approx(2, abs=0.3), what


def test_the_files(report: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, result = report
    assert sorted(p.name for p in folder.iterdir()) == [
        "convergence.json",
        "convergence.png",
        "convergence.txt",
    ]
    text = (folder / "convergence.txt").read_text()
    assert text == as_text(result)
    for line in ("CA Theorem 6", "CA Theorem 12", "PiT Theorem 2.1", "exponential"):
        assert line in text
    content = (folder / "convergence.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")


def test_a_wrong_rule_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Weights that forget the uneven spacing: errors stay."""
    from continuum_ops.experiments import convergence

    module = __import__("sys").modules[convergence.__module__]
    wrong = module.Rule(
        "wrong",
        lambda n, _: (module._grade(np.linspace(0, 1, n))[:, None], quadrature.monte_carlo(n).numpy()),
        2.0,
    )
    monkeypatch.setattr(module, "_LINE", [wrong])
    monkeypatch.setattr(module, "_SQUARE", [])
    for row in measure(True, 0):
        assert row["order"] < 0.5 and row["errors"][-1] > 1e-3
    done = write_report(tmp_path, small=True, plot=False)
    assert [p.name for p in done.files] == ["convergence.json", "convergence.txt"]
