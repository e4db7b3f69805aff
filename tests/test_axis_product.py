"""The compiled products along one axis of a field against float64 products of torch."""

import pytest
import torch

from continuum_ops.backends import extension
from continuum_ops.ops import _grid_product  # noqa: F401  its schemas

KERNELS = extension()[0]
pytestmark = pytest.mark.skipif(KERNELS is None, reason="the compiled extension is not built")

# before, m, n, columns: whole panels and broken ones, several depths, blocks and parts, nothing at all
SHAPES = [
    (1, 24, 128, 512),
    (6, 128, 128, 64),
    (3, 5, 7, 1),
    (40, 13, 200, 1),
    (7, 12, 400, 33),
    (2, 1, 1, 31),
    (5, 300, 270, 16),
    (9, 30, 577, 3),
    (2, 5, 9, 900),
    (1, 0, 4, 5),
    (3, 4, 0, 6),
    (2, 3, 4, 0),
    (0, 3, 4, 5),
]


def assert_near(actual, expected, terms):
    """Rounding of a sum of `terms` products of normal numbers, which adds up as a root: 32 eps of it."""
    bound = 32 * torch.finfo(actual.dtype).eps * max(1, terms) ** 0.5
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(isa, shape, dtype):
    before, m, n, columns = shape
    generator = torch.Generator().manual_seed(n + columns)

    def normal(*size):
        return torch.randn(size, generator=generator, dtype=dtype)

    x, matrix, transposed = normal(before, n, columns), normal(m, n), normal(n, m).mT
    for a in (matrix, transposed):
        out = torch.full((before, m, columns), 7.0, dtype=dtype)
        torch.ops.continuum_ops.axis_product(a, x, out)
        assert_near(out, torch.einsum("mn,bnc->bmc", a.double(), x.double()), n)
    grad = normal(before, m, columns)
    contraction = torch.ops.continuum_ops.axis_contraction(grad, x)
    expected = torch.einsum("bmc,bnc->mn", grad.double(), x.double())
    assert_near(contraction, expected, before * columns)


def test_bits_do_not_depend_on_threads():
    grad, x = torch.randn(2, 3, 40, 999, generator=torch.Generator().manual_seed(1))
    threads, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        try:
            out = torch.empty_like(x)
            torch.ops.continuum_ops.axis_product(x[0, :, :40], x, out)
            results.append((out, torch.ops.continuum_ops.axis_contraction(grad, x)))
        finally:
            torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_what_does_not_fit_is_refused():
    x, out = torch.zeros(2, 4, 3), torch.zeros(2, 5, 3)
    for arguments, message in (
        ((torch.zeros(5, 3), x, out), r"matrix \(m, n\)"),
        ((torch.zeros(5, 4).double(), x, out), "of x's dtype"),
        ((torch.zeros(5, 4), x.mT.contiguous().mT, out), "x: contiguous"),
        ((torch.zeros(5, 4), x, out.double()), "out: contiguous"),
        ((torch.zeros(5, 4), x.long(), out), "float32 or float64"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.continuum_ops.axis_product(*arguments)
    with pytest.raises(RuntimeError, match=r"grad \(before, m, columns\)"):
        torch.ops.continuum_ops.axis_contraction(out[:, :, :2].contiguous(), x)
