"""Lorenz-63 against a Taylor-series integrator and against the equations themselves."""

import sys

import numpy as np
import pytest
import torch

import continuum_ops as co

FULL = "x,y0,z0->y,z"


def states(data):
    return torch.cat([data.input, data.target], dim=-1)


def taylor_solution(initial, times, step=0.005, order=22):
    """(n, N, 3) at increasing times from (n, 3): power series of the solution, restarted every step.

    If x = sum_m x_m t^m, the equations give (m + 1) x_{m+1} = sigma (y_m - x_m), and the products x z and x y
    become Cauchy products. Coefficients of order 22 at steps of 0.005 leave nothing but rounding.
    """

    def series(state):
        c = np.zeros((order + 1, 3, state.shape[1]))
        c[0] = state
        for m in range(order):
            x, y, z = c[: m + 1].transpose(1, 0, 2)
            c[m + 1, 0] = 10 * (y[m] - x[m]) / (m + 1)
            c[m + 1, 1] = (28 * x[m] - y[m] - (x * z[::-1]).sum(0)) / (m + 1)
            c[m + 1, 2] = ((x * y[::-1]).sum(0) - 8 * z[m] / 3) / (m + 1)
        return c

    state, now, out = initial.T.copy(), 0.0, []
    for t in times:
        steps = max(1, int(np.ceil((t - now) / step)))
        for _ in range(steps):
            state = np.polynomial.polynomial.polyval((t - now) / steps, series(state), tensor=False)
        now = t
        out.append(state.T)
    return np.stack(out, axis=1)


def test_taylor_solution_of_the_invariant_axis():
    # On x = y = 0 the system is dz/dt = -8/3 z.
    times = np.array([0.0, 0.3, 2.0])
    solution = taylor_solution(np.array([[0.0, 0.0, 7.0]]), times)
    np.testing.assert_allclose(solution[0, :, 2], 7 * np.exp(-8 / 3 * times), rtol=1e-13)
    assert (solution[0, :, :2] == 0).all()


def test_agrees_with_a_taylor_series_integrator():
    times = np.sort(np.concatenate([[0.0, 2.0], np.random.default_rng(1).uniform(0, 2, 30)]))
    data = co.data.lorenz63(64, times, seed=7, task=FULL, dtype=torch.float64)
    reference = taylor_solution(states(data)[:, 0].numpy(), times)
    np.testing.assert_allclose(states(data).numpy(), reference, rtol=0, atol=1e-7)


def test_derivatives_on_fine_times():
    h = 1e-3
    data = co.data.lorenz63(16, seed=2, dt=h, task=FULL, dtype=torch.float64)
    state = states(data)
    # Central differences of order 4: the error is h^4 |f^(5)| / 30.
    slope = (8 * (state[:, 3:-1] - state[:, 1:-3]) - (state[:, 4:] - state[:, :-4])) / (12 * h)
    x, y, z = state[:, 2:-2].unbind(-1)
    velocity = torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], dim=-1)
    torch.testing.assert_close(slope, velocity, rtol=0, atol=1e-5 * velocity.abs().max().item())


def test_initial_values_are_uniform():
    n = 4000
    data = co.data.lorenz63(n, [0.0], seed=0, task=FULL, T=1e-3, dtype=torch.float64)
    initial = states(data)[:, 0]
    assert torch.equal(initial[:, 1:], data.initial)
    low = torch.tensor([-15.0, -15.0, 0.0], dtype=torch.float64)
    width = torch.tensor([30.0, 30.0, 40.0], dtype=torch.float64)
    unit = (initial - low) / width
    assert (unit >= 0).all() and (unit < 1).all()
    # Kolmogorov-Smirnov distance to the uniform distribution: above 1.95 / sqrt(n) with probability 1e-3.
    level = torch.arange(1, n + 1, dtype=torch.float64).unsqueeze(1) / n
    distance = (unit.sort(dim=0).values - level).abs().max()
    assert distance < 1.95 / n**0.5
    # Independent of each other: sample correlations have standard deviation 1 / sqrt(n).
    correlation = torch.corrcoef(unit.T) - torch.eye(3, dtype=torch.float64)
    assert correlation.abs().max() < 4 / n**0.5


def test_trajectories_do_not_depend_on_the_times():
    even = co.data.lorenz63(8, seed=4, task=FULL, dtype=torch.float64)
    times = co.data.uneven_times(200)
    uneven = co.data.lorenz63(8, times, seed=4, task=FULL, dtype=torch.float64)
    common = torch.isin(uneven.times, even.times)
    assert common.sum() == 201
    assert torch.equal(states(uneven)[:, common], states(even))
    # Also where the last time is far from T.
    early = co.data.lorenz63(8, [0.5], seed=4, task=FULL, dtype=torch.float64)
    assert torch.equal(states(early)[:, 0], states(even)[:, 50])


def test_times_in_any_order_and_repeated():
    data = co.data.lorenz63(3, [1.0, 0.5, 1.0, 2.0], seed=4)
    ordered = co.data.lorenz63(3, [0.5, 1.0, 2.0], seed=4)
    assert torch.equal(data.times, torch.tensor([1.0, 0.5, 1.0, 2.0]))
    assert torch.equal(states(data), states(ordered)[:, [1, 0, 1, 2]])


def test_the_first_of_many_trajectories_are_the_few():
    # 300 trajectories take two blocks, the second of them padded.
    options = {"seed": 9, "task": FULL, "dtype": torch.float64}
    many = co.data.lorenz63(300, [0.0, 1.0, 2.0], **options)
    for m in (1, 256, 257):
        few = co.data.lorenz63(m, [0.0, 1.0, 2.0], **options)
        assert torch.equal(states(few), states(many)[:m])
        assert torch.equal(few.initial, many.initial[:m])


def test_second_block_is_integrated_from_its_own_initial_values():
    data = co.data.lorenz63(300, [0.0, 0.5], seed=9, task=FULL, dtype=torch.float64)
    start, end = states(data)[250:].unbind(1)
    reference = taylor_solution(start.numpy(), [0.5])[:, 0]
    np.testing.assert_allclose(end.numpy(), reference, rtol=0, atol=1e-7)


def test_seeds():
    first, again, other = (co.data.lorenz63(4, seed=seed, task=FULL) for seed in (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()
    assert not torch.isclose(first.initial, other.initial).any()


def test_both_tasks_show_the_same_trajectories():
    observed = co.data.lorenz63(4, seed=1)
    full = co.data.lorenz63(4, seed=1, task=FULL)
    assert observed.input.shape == observed.target.shape == (4, 201, 1) and observed.initial is None
    assert (
        full.input.shape == (4, 201, 1) and full.target.shape == (4, 201, 2) and full.initial.shape == (4, 2)
    )
    assert torch.equal(full.input, observed.input)
    assert torch.equal(full.target[..., :1], observed.target)
    assert torch.equal(full.target[:, 0], full.initial)
    assert full.target.is_contiguous()
    later = co.data.lorenz63(4, [1.0], seed=1, task=FULL)
    assert torch.equal(later.initial, full.initial)


def test_float32_is_the_rounded_float64():
    single = co.data.lorenz63(4, seed=1, task=FULL)
    double = co.data.lorenz63(4, seed=1, task=FULL, dtype=torch.float64)
    for s, d in zip(single, double, strict=True):
        assert s.dtype == torch.float32 and torch.equal(s, d.float())


def test_longer_interval():
    data = co.data.lorenz63(4, [0.0, 5.0], seed=1, task=FULL, T=5.0, dtype=torch.float64)
    start, end = states(data).unbind(1)
    reference = taylor_solution(start.numpy(), [5.0])[:, 0]
    np.testing.assert_allclose(end.numpy(), reference, rtol=0, atol=1e-6)


def test_progress_bar_goes_to_stderr(capsys):
    pytest.importorskip("tqdm", reason="the progress bar is tqdm's")
    shown = co.data.lorenz63(2, [1.0], seed=0, progress=True)
    captured = capsys.readouterr()
    assert "lorenz63" in captured.err and captured.out == ""
    assert torch.equal(shown.target, co.data.lorenz63(2, [1.0], seed=0).target)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("task", ["y->x", "x", None])
def test_unknown_task(task):
    with pytest.raises(ValueError, match=r"task must be one of \('x->y', 'x,y0,z0->y,z'\), got "):
        co.data.lorenz63(1, seed=0, task=task)


@pytest.mark.parametrize(("module", "message"), [("scipy.integrate", "needs scipy"), ("tqdm", "needs tqdm")])
def test_missing_package_names_the_extra(monkeypatch, module, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=message + r': pip install "continuum_ops\[train\]"'):
        co.data.lorenz63(1, seed=0, progress=True)
