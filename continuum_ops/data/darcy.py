"""Darcy flow on the unit square: random coefficients and their pressures (PiT A.3, CA 6.2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..mesh import Grid
from .functions import one_blas_thread, with_progress
from .trajectories import check_dtype, check_int, check_positive

# Cosine modes per axis of the random field; their number fixes the field, whatever the grid. The modes beyond
# hold 2e-5 of its variance.
MODES = 256
HIGH, LOW = 12.0, 3.0
COEFFICIENTS = ("piecewise", "lognormal")
_NEEDS_SCIPY = 'darcy needs scipy: pip install "continuum_ops[train]"'


@dataclass(frozen=True)
class DarcyFlow:
    """Coefficients and solutions on one grid of the unit square.

    coefficient: (n, N, 1), a at the points of the grid, N = resolution^2 in row-major order.
    solution: (n, N, 1), u there.
    grid: the endpoint `Grid` with resolution points an axis, in the dtype of the samples.
    """

    coefficient: Tensor
    solution: Tensor
    grid: Grid

    @property
    def resolution(self) -> int:
        """Points an axis."""
        return self.grid.shape[0]

    def at(self, resolution: int) -> DarcyFlow:
        """The same functions on a coarser grid whose points are points of this one.

        Raises:
            ValueError: resolution - 1 does not divide this resolution - 1.
        """
        resolution = check_int("resolution", resolution, minimum=2)
        stride = _stride("resolution", resolution, self.resolution)
        n, fine = len(self.coefficient), self.resolution

        def coarse(samples: Tensor) -> Tensor:
            return samples.view(n, fine, fine, 1)[:, ::stride, ::stride].reshape(n, resolution**2, 1)

        return DarcyFlow(
            coarse(self.coefficient), coarse(self.solution), _unit_square(resolution, self.solution.dtype)
        )

    def __getitem__(self, rows: slice) -> DarcyFlow:
        """Some of the samples."""
        return DarcyFlow(self.coefficient[rows], self.solution[rows], self.grid)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.coefficient)


def darcy(
    n: int,
    resolution: int,
    *,
    seed: int,
    solver_resolution: int | None = None,
    constant_mode: bool = True,
    coefficient: Literal["piecewise", "lognormal"] = "piecewise",
    sigma: float = 1.0,
    tau: float = 3.0,
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> DarcyFlow:
    """n samples of Darcy flow with a random coefficient (PiT section A.3, CA section 6.2.2).

    ::

        -div(a grad u) = 1 in (0, 1)^2,   u = 0 on the boundary,
        piecewise: a = 12 where m >= 0, 3 where m < 0;   lognormal: a = exp(m),
        m ~ N(0, sigma^2 (-Laplace + tau^2 I)^-2), zero Neumann conditions.

    The defaults are PiT's: piecewise, sigma = 1 (of no effect there), tau = 3. Both variants of CA have a
    field without its constant, ``constant_mode=False``, and 64 or 416 points an axis. Its third version
    states the covariance as 12^2 (-Laplace + 6^2 I)^-2, as far as its text can be read, ``sigma=12, tau=6``;
    its second as 48^2 (-Laplace + 12^2 I)^-2, ``sigma=48, tau=12``.

    m is drawn in the eigenfunctions of its covariance, cos(pi k x) cos(pi l y) for 0 <= k, l < 256
    (Karhunen-Loeve), so a sample's coefficient is one function, whatever grid it is asked for on; the
    solution is :func:`solve_darcy` on the grid of solver_resolution, read at the points of the grid.

    GT 5.3 takes the inverse way, from u with noise on the grid (:func:`with_noise`: 0, 1 % or 10 %) to a on a
    coarser one (:meth:`DarcyFlow.at`).

    The samples depend on seed, solver_resolution, constant_mode, coefficient, sigma and tau alone; the first
    m of n are those of a call with n = m, and the two kinds of coefficient share their m.
    The same arguments give the same bytes on one machine.

    Args:
        n: number of samples, >= 1.
        resolution: points an axis, both ends included, >= 3. 43, 85, 141 and 211 are nested in 421.
        seed: >= 0; use different seeds for training and test data.
        solver_resolution: points an axis of the grid on which the equation is solved; resolution - 1 must
            divide solver_resolution - 1. None: resolution. The jumps of a dominate the error: against a
            solution with 421 points an axis it is about 0.9 % in the relative L2 norm with 43, 0.4 % with 85,
            0.2 % with 127 and 0.1 % with 211. A sample takes about 10, 20, 30 and 80 ms, and 0.4 s with 421.
        constant_mode: keep the constant among the eigenfunctions, as the covariance says. The generator of
            the published data set leaves it out, so that in every sample m has mean 0 and each value takes
            about half of the square: False gives that distribution.
        coefficient: "piecewise" or "lognormal".
        sigma, tau: of the covariance of m, positive.
        dtype: torch.float32 or torch.float64, of everything that is returned. The computation is in float64.
        progress: show a progress bar (tqdm) on stderr.

    Returns:
        DarcyFlow on the CPU.

    Raises:
        TypeError: if an argument has the wrong type or dtype.
        ValueError: if an argument is out of range or the grids are not nested.
        ImportError: without scipy, or with progress=True without tqdm.
    """
    n = check_int("n", n, minimum=1)
    resolution = check_int("resolution", resolution, minimum=3)
    seed = check_int("seed", seed, minimum=0)
    fine = resolution
    if solver_resolution is not None:
        fine = check_int("solver_resolution", solver_resolution, minimum=3)
    stride = _stride("resolution", resolution, fine, "solver_resolution")
    if not isinstance(constant_mode, bool):
        raise TypeError(f"constant_mode must be a bool, got {type(constant_mode).__name__}")
    if coefficient not in COEFFICIENTS:
        raise ValueError(f"coefficient must be one of {COEFFICIENTS}, got {coefficient!r}")
    sigma, tau = check_positive("sigma", sigma), check_positive("tau", tau)
    dtype = check_dtype(dtype)

    generator = np.random.default_rng(seed)
    samples = torch.empty(n, resolution**2, 1, dtype=dtype)
    solution = torch.empty(n, resolution**2, 1, dtype=dtype)
    x = np.linspace(0, 1, fine)
    with one_blas_thread():
        for row in with_progress(range(n), progress, "darcy"):
            field = gaussian_field(generator, x, constant_mode=constant_mode, sigma=sigma, tau=tau)
            a = np.exp(field) if coefficient == "lognormal" else np.where(field >= 0, HIGH, LOW)
            u = solve_darcy(a)
            for out, values in ((samples, a), (solution, u)):
                coarse = np.ascontiguousarray(values[::stride, ::stride])
                out[row, :, 0] = torch.from_numpy(coarse).flatten().to(dtype)
    return DarcyFlow(samples, solution, _unit_square(resolution, dtype))


def gaussian_field(
    generator: np.random.Generator,
    x: np.ndarray,
    *,
    constant_mode: bool = True,
    sigma: float = 1.0,
    tau: float = 3.0,
) -> np.ndarray:
    """A draw of N(0, sigma^2 (-Laplace + tau^2)^-2), zero Neumann conditions, at (x_i, x_j): (N, N) float64.

    sum_kl sigma xi_kl phi_k(x) phi_l(y) / (pi^2 (k^2 + l^2) + tau^2) over 0 <= k, l < 256, xi ~ N(0, 1), with
    the orthonormal phi_0 = 1, phi_k = sqrt(2) cos(pi k x). Takes 256^2 numbers from the generator.
    """
    k = np.arange(MODES)
    deviation = sigma / (np.pi**2 * (k[:, None] ** 2 + k**2) + tau**2)
    if not constant_mode:
        deviation[0, 0] = 0.0
    basis = np.sqrt(np.where(k == 0, 1.0, 2.0)) * np.cos(np.pi * np.outer(x, k))
    return basis @ (deviation * generator.standard_normal((MODES, MODES))) @ basis.T


def solve_darcy(
    coefficient: np.ndarray, forcing: np.ndarray | float = 1.0, *, rtol: float = 1e-10
) -> np.ndarray:
    """-div(a grad u) = f on the unit square with u = 0 on its boundary, by finite differences.

    The five-point scheme on nodes: the flux between two neighbours is the difference of u over h times the
    harmonic mean of their a, since the halves of the way lie in series: across a jump of a midway the flux is
    exact in one dimension, where the arithmetic mean would let the large value short-circuit the small one.
    Second order where a is smooth. The linear system is solved by conjugate gradients (scipy), preconditioned
    with the Laplacian, which a sine transform inverts; the number of iterations grows with
    sqrt(max a / min a) and not with the resolution.

    Args:
        coefficient: (n, n), a > 0 at the nodes (i h, j h), h = 1 / (n - 1), n >= 3.
        forcing: f there, (n, n), or a number; its boundary values are not read.
        rtol: residual of the linear system relative to the right-hand side.

    Returns:
        (n, n), float64.

    Raises:
        ValueError: a shape that does not fit; a coefficient or rtol that is not finite and positive.
        ImportError: without scipy.
        RuntimeError: if the iteration does not converge.
    """
    try:
        from scipy.fft import dstn
        from scipy.sparse import diags_array
        from scipy.sparse.linalg import LinearOperator, cg
    except ImportError as error:
        raise ImportError(_NEEDS_SCIPY) from error
    a = np.asarray(coefficient, dtype=np.float64)
    if a.ndim != 2 or a.shape[0] != a.shape[1] or len(a) < 3:
        raise ValueError(f"coefficient must have shape (n, n) with n >= 3, got {a.shape}")
    if not (np.isfinite(a).all() and (a > 0).all()):
        raise ValueError("coefficient must be finite and positive, got other values")
    f = np.asarray(forcing, dtype=np.float64)
    if f.shape not in ((), a.shape):
        raise ValueError(
            f"forcing must be a number or have the shape of coefficient, {a.shape}, got {f.shape}"
        )
    rtol = check_positive("rtol", rtol)

    m, h = len(a) - 2, 1.0 / (len(a) - 1)
    resistance = 1.0 / a
    # Faces of the m x m inner nodes: vertical[i, j] lies below node (i, j), horizontal[i, j] left of it.
    vertical = 2.0 / (resistance[1:, 1:-1] + resistance[:-1, 1:-1])
    horizontal = 2.0 / (resistance[1:-1, 1:] + resistance[1:-1, :-1])
    centre = vertical[:-1] + vertical[1:] + horizontal[:, :-1] + horizontal[:, 1:]
    beside = np.concatenate([np.zeros((m, 1)), horizontal[:, 1:-1]], axis=1).ravel()[1:]
    beyond = vertical[1:-1].ravel()
    matrix = diags_array(
        [centre.ravel(), -beside, -beside, -beyond, -beyond], offsets=[0, 1, -1, m, -m], format="csr"
    )
    frequency = 4.0 * np.sin(np.pi * h / 2 * np.arange(1, m + 1)) ** 2
    inverse = 1.0 / (frequency[:, None] + frequency)

    def solve_laplace(right: np.ndarray) -> np.ndarray:
        transformed = dstn(right.reshape(m, m), type=1, norm="ortho")
        return dstn(transformed * inverse, type=1, norm="ortho").ravel()

    right = h**2 * np.broadcast_to(f, a.shape)[1:-1, 1:-1].ravel()
    preconditioner = LinearOperator(matrix.shape, matvec=solve_laplace, dtype=np.float64)
    inner, failed = cg(matrix, right, rtol=rtol, atol=0.0, M=preconditioner, maxiter=10_000)
    if failed:
        raise RuntimeError(f"conjugate gradients did not reach rtol = {rtol} in 10,000 iterations")
    u = np.zeros_like(a)
    u[1:-1, 1:-1] = inner.reshape(m, m)
    return u


def _stride(name: str, coarse: int, fine: int, of: str = "this resolution") -> int:
    if coarse > fine or (fine - 1) % (coarse - 1):
        raise ValueError(f"{name} - 1 must divide {of} - 1 = {fine - 1}, got {name} = {coarse}")
    return (fine - 1) // (coarse - 1)


def _unit_square(resolution: int, dtype: torch.dtype) -> Grid:
    return Grid.uniform((resolution, resolution)).to(dtype=dtype)
