"""Operators, meshes and models over 2 and 4 gloo ranks, against one process: see distributed_worker."""

from __future__ import annotations

import importlib
import math

import helpers
import numpy as np
import patch_helpers
import position_helpers
import pytest
import torch
import torch.multiprocessing as mp
from distributed_cases import CONTINUUM, KEYS, LINEAR, PATCH, POSITION, Ranks, plain
from distributed_worker import (
    KINDS,
    LATENT,
    MASKS,
    MODELS,
    POINTS,
    RANKS,
    cloud,
    galerkin_attention,
    galerkin_layer,
    grid_model,
    grid_samples,
    masks,
    multihead,
    pit,
    samples,
    squares,
    tno,
    train,
    worker,
)
from helpers import assert_results, draw

import continuum_ops as co
from continuum_ops.distributed.mesh import bisect, bisect_patches

position_module = importlib.import_module("continuum_ops.distributed.position_attention")
sizes = pytest.mark.parametrize("size", [2, 4])


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    mp.spawn(worker, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(RANKS)]


def of_ranks(saved, kind: str, name: str, size: int):
    """Results of the ranks of a group; the two pairs have done the same and must have the same bits."""
    results = [rank[kind, name, size] for rank in saved]
    for result in results:
        assert not (isinstance(result, str) and "Traceback" in result), result
    if size == 4:
        return results
    for a, b in zip(results[:2], results[2:], strict=True):
        assert a.keys() == b.keys()
        for key, x in a.items():
            assert (
                x == b[key] if isinstance(x, str) else torch.equal(x.nan_to_num(7), b[key].nan_to_num(7))
            ), key
    return results[2:]


def joined(parts, axes, summed=(), same=()):
    """One result of the ranks' parts: put together along an axis, added, or the first of equal ones."""
    whole = {}
    for name in parts[0]:
        tensors = [part[name] for part in parts]
        if name in same:
            assert all(torch.equal(t, tensors[0]) for t in tensors), name
            whole[name] = tensors[0]
        else:
            whole[name] = torch.stack(tensors).sum(0) if name in summed else torch.cat(tensors, axes[name])
    return whole


AXES = {"out": -2, "lse": -1, "query": -2, "key": -2, "value": -2, "weights": -1, "attn_mask": -2}


@sizes
@named(CONTINUUM)
def test_continuum_attention(case, size, saved):
    tensors, (g, g_lse) = case.tensors(), case.cotangents()
    replicated = case.path == "replicated"
    result = joined(
        of_ranks(saved, "Continuum", case.name, size),
        AXES,
        ("query", "attn_mask") if replicated else (),
        ("out", "lse") if replicated else (),
    )
    if "attn_mask" in result:
        result["attn_mask"] = result["attn_mask"][..., case.places()[1]]
    hidden = case.hidden()
    mask, factor = hidden.get("attn_mask"), hidden.get("factor")
    options = {name: option for name, option in case.options.items() if name != "is_causal"}
    true = helpers.exact(*tensors, attn_mask=mask, factor=factor, grad_out=g, grad_lse=g_lse, **options)
    rough = helpers.run(plain, [*tensors, mask, None, None, None], g, g_lse, factor=factor, **options)
    given = dict(zip(helpers.NAMES[2:], [*tensors, mask], strict=False))
    assert_results(result, true, rough, given, tensors[2].nan_to_num(0, 0, 0))


@sizes
@named(POSITION)
def test_position_attention(case, size, saved):
    tensors, (g, g_lse) = case.tensors(), case.cotangents()
    summed, same = (["rate"], [])
    if case.replicated:
        summed, same = ["rate", "query_pos"], ["out", "lse"]
    axes = {"out": -2, "lse": -1, "query_pos": -2, "key_pos": -2, "value": -2, "weights": -1}
    result = joined(of_ranks(saved, "Position", case.name, size), axes, summed, same)
    options = {"radius": case.reach(), "period": case.period}
    true = position_helpers.exact(*tensors, grad_out=g, grad_lse=g_lse, **options)
    rough = position_helpers.run(position_helpers.plain, tensors, g, g_lse, **options)
    given = dict(zip(position_helpers.NAMES, tensors, strict=True))
    assert_results(result, true, rough, given, tensors[2])


@sizes
@named(PATCH)
def test_patch_attention(case, size, saved):
    tensors, patch = case.tensors(), list(case.patch)
    g, g_lse = patch_helpers.cotangents(tensors[0], tensors[2], patch)
    axes = {
        "out": 1,
        "lse": -1,
        "query": 1,
        "key": 1,
        "value": 1,
        "weights": 0 if case.weights == "grid" else 1,
    }
    result = joined(of_ranks(saved, "Patch", case.name, size), axes)
    true = patch_helpers.exact(*tensors, patch, grad_out=g, grad_lse=g_lse, scale=case.scale)
    rough = patch_helpers.run(patch_helpers.plain, tensors, patch, g, g_lse, scale=case.scale)
    assert_results(result, true, rough, dict(zip(patch_helpers.NAMES, tensors, strict=True)), tensors[2])


@sizes
@named(LINEAR)
def test_linear_attention_and_its_second_derivative(case, size, saved):
    tensors = case.tensors()
    leaves = [t.requires_grad_() for t in tensors if t is not None]
    q, k, v, *w = leaves
    # The quadratic order of the formula, (q k^T) W v.
    w = w[0] if w else torch.full((k.shape[-2],), 1.0 / sum(KEYS[2]), dtype=torch.float64)
    out = (q @ k.mT * w) @ v
    grads = torch.autograd.grad(out, leaves, draw(q.shape, torch.float64, 4), create_graph=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)
    names = ("query", "key", "value", "weights")
    true = {"out": out, **dict(zip(names, grads, strict=False))}
    true |= {f"second {name}": t for name, t in zip(names, second, strict=False)}
    axes = AXES | {f"second {name}": AXES[name] for name in names}
    result = joined(of_ranks(saved, "Linear", f"{case.name} {case.weighted}", size), axes)
    assert result.keys() == true.keys()
    for name, actual in result.items():
        expected = true[name].detach()
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13 * expected.abs().max().item())


def test_the_same_ranks_give_the_same_bits(saved):
    for rank in saved:
        again = rank["again", "", 4]
        first = rank["Continuum", CONTINUUM[2].name, 4]
        second = rank["Position", POSITION[0].name, 4]
        for name, x in (first | {"x" + k: v for k, v in second.items()}).items():
            assert torch.equal(again[name], x), name


def test_far_ranks_are_left_out():
    """Unit boxes at distances 0, 2, 5 along a line, by hand."""

    def place(lo, radius=None, mass=1.0, keys=True):
        box = [(lo, lo + 1.0), (0.0, 1.0)]
        return position_module._Place(box, box if keys else None, mass, mass, radius)

    def needs(places, rates, period=None):
        needed = position_module._needs
        return [[needed(a, b, places, rates, period, torch.float64) for b in places] for a in places]

    line = [place(0.0), place(3.0), place(7.0)]
    # Own keys are within |x - y|^2 <= 2, those of the neighbours beyond 4 and 9: e^-(4 - 2) is no rounding.
    assert needs(line, [1.0]) == [[True] * 3, [True] * 3, [True, True, True]]
    # e^(-30 (4 - 2)) = e^-60 is below 2^-52 / 24; with a second head of rate 1 it is not for that one.
    assert needs(line, [30.0]) == [[True, False, False], [False, True, False], [False, False, True]]
    assert needs(line, [30.0, 1.0])[0] == [True, True, True]
    # On a circle of length 9 the last box is 1 before the first.
    assert needs(line, [30.0], (9.0, math.inf))[0] == [True, False, True]
    within = [place(lo, radius) for lo, radius in ((0.0, 1.9), (3.0, 2.1), (7.0, 10.0))]
    assert needs(within, [0.0]) == [[True, False, False], [True, True, False], [True, True, True]]
    # A rank without keys serves nobody and is no reason to leave others out.
    assert needs([place(0.0, keys=False), place(3.0)], [1e3]) == [[False, True], [False, True]]


@pytest.mark.parametrize(
    ("name", "left_out"),
    [("radius, clusters", 12), ("radius over clusters", 6), ("clusters", 12), ("clusters, periodic", 12)],
)
def test_the_cases_leave_ranks_out(name, left_out):
    """So that the comparison above sees what is not sent: of the 12 pairs of ranks all, or the farther 6."""
    case = next(case for case in POSITION if case.name == name)
    x, y, _, _, w = case.tensors()
    queries, keys = case.cuts()
    places = [
        position_module._Place.of(
            at.part(x, -2, queries), at.part(y, -2, keys), at.part(w, -1, keys), case.radius
        )
        for at in (Ranks(None, rank, 4) for rank in range(4))
    ]
    needs = [
        position_module._needs(a, b, places, case.rate, case.period, case.dtype)
        for a in places
        for b in places
    ]
    assert needs.count(False) == left_out


@sizes
@pytest.mark.parametrize(("kind", "points"), [("run_tno", POINTS), ("run_tno_small", 3)])
def test_tno_equals_one_process(kind, points, size, saved):
    model, mesh, (u, y) = tno(), cloud(points), samples(points)
    z = model(u, mesh)
    loss = squares(z, y, mesh.weights)
    loss.backward()
    for rank in of_ranks(saved, kind, "", size):
        torch.testing.assert_close(rank["out"], z.detach(), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(rank["loss"], loss.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(rank["volume"], mesh.volume, rtol=1e-13, atol=0)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(rank[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


@sizes
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_galerkin_layers_equal_one_process(kind, weighted, size, saved):
    mesh, v = cloud(), draw((2, POINTS, 6), torch.float64, 11).requires_grad_()
    out = galerkin_layer(kind)(v, mesh.points, weights=mesh.weights if weighted else None)
    (grad,) = torch.autograd.grad(out.square().sum(), v)
    for rank in of_ranks(saved, "run_galerkin_layers", "", size):
        true = torch.cat([out.detach(), grad], -1)
        torch.testing.assert_close(rank[f"{kind} {weighted}"], true, rtol=1e-11, atol=1e-12)


@sizes
@pytest.mark.parametrize("name", MODELS)
def test_models_on_grids_equal_one_process(name, size, saved):
    model, (u, y, grid) = grid_model(name), grid_samples()
    z = model(u, grid, **MODELS[name][2])
    squares(z, y, grid.weights).backward()
    for rank in of_ranks(saved, "run_grid_models", "", size):
        torch.testing.assert_close(rank[f"{name}: out"], z.detach(), rtol=1e-11, atol=1e-12)
        for key, parameter in model.named_parameters():
            true = parameter.grad
            atol = 1e-12 * max(1.0, true.abs().max().item())
            torch.testing.assert_close(rank[f"{name}: {key}"], true, rtol=1e-10, atol=atol, msg=key)


@sizes
@pytest.mark.parametrize("name", MASKS)
def test_multihead_masks_and_dropout_equal_one_process(name, size, saved):
    layer, points, scores, keys = multihead()
    points.requires_grad_()
    torch.manual_seed(3)
    options = masks(name, scores, keys)
    out, _ = layer(points, points, points, need_weights=False, weights=cloud().weights, **options)
    (grad,) = torch.autograd.grad(out.square().sum(), points)
    for rank in of_ranks(saved, "run_masked_layers", "", size):
        torch.testing.assert_close(rank[name], torch.cat([out.detach(), grad], -1), rtol=1e-11, atol=1e-12)


@sizes
@pytest.mark.parametrize("kind", KINDS)
def test_galerkin_dropout_equals_one_process(kind, size, saved):
    points = multihead()[1].requires_grad_()
    layer = galerkin_attention(kind)
    torch.manual_seed(3)
    out = layer(points, weights=cloud().weights)
    (grad,) = torch.autograd.grad(out.square().sum(), points)
    for rank in of_ranks(saved, "run_masked_layers", "", size):
        torch.testing.assert_close(rank[kind], torch.cat([out.detach(), grad], -1), rtol=1e-11, atol=1e-12)


@sizes
def test_pit_equals_one_process(size, saved):
    model, mesh, outputs = pit(), cloud(), cloud(23)
    z = model(samples()[0], mesh, outputs, latent_mesh=LATENT)
    squares(z, samples(23)[1], outputs.weights).backward()
    for rank in of_ranks(saved, "run_pit", "", size):
        torch.testing.assert_close(rank["out"], z.detach(), rtol=1e-12, atol=1e-13)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(rank[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("run_own_losses", 1.0), ("run_mesh_2d", 0.5), ("run_ddp_of_samples", 0.5), ("run_fsdp", 0.5)],
)
def test_gradients_of_other_losses(kind, factor, saved):
    """Losses of own points and checkpointed layers; the mean over samples that are spread too."""
    model, mesh, (u, y) = tno(), cloud(), samples()
    (factor * squares(model(u, mesh), y, mesh.weights)).backward()
    for size in (2, 4) if kind == "run_own_losses" else (4,):
        for rank in of_ranks(saved, kind, "", size):
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(rank[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


@sizes
def test_gather_and_select(size, saved):
    u, _ = samples()
    ranks = of_ranks(saved, "run_gather", "", size)
    assert torch.equal(torch.cat([rank["index"] for rank in ranks]).sort().values, torch.arange(POINTS))
    factor = sum((1.0 + rank) ** 2 for rank in range(size))
    for rank in ranks:
        assert torch.equal(rank["whole"], u)
        assert torch.equal(rank["rows"], u.movedim(1, 0))
        expected = 2.0 * factor * u.index_select(1, rank["index"])
        torch.testing.assert_close(rank["gradient"], expected, rtol=1e-14, atol=0)


def test_parts_of_a_square_are_squares_and_halves():
    grid = co.Grid.uniform((8, 8))
    rows, columns = torch.arange(64) // 8, torch.arange(64) % 8
    quarters = bisect(grid.points, 4)
    expected = [((rows // 4 == a) & (columns // 4 == b)).nonzero()[:, 0] for a in range(2) for b in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(quarters, expected, strict=True))
    assert torch.equal(bisect(grid.points, 2)[1], torch.arange(32, 64))


@pytest.mark.parametrize(("count", "parts"), [(0, 3), (2, 5), (17, 5), (64, 7), (5, 1)])
def test_parts_are_balanced(count, parts):
    found = bisect(position_helpers.points((count, 3), torch.float64), parts)
    lengths = [part.numel() for part in found]
    assert max(lengths) - min(lengths) <= 1
    assert torch.equal(torch.cat(found).sort().values, torch.arange(count))
    assert all(torch.equal(part, part.sort().values) for part in found)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("counts", [(12,), (3, 4), (2, 1, 6)])
def test_boxes_of_patches_make_up_the_grid(counts, parts):
    covered = torch.zeros(counts, dtype=torch.int64)
    sizes = []
    for box in bisect_patches(counts, parts):
        covered[tuple(slice(lo, hi) for lo, hi in box)] += 1
        sizes.append(math.prod(hi - lo for lo, hi in box))
    assert bool((covered == 1).all()) and len(sizes) == parts and min(sizes) >= 1
    assert max(sizes) <= 2.0 * 12 / parts


def test_training_resumes_on_another_number_of_ranks(saved):
    model, mesh, (u, y) = tno(), cloud(), samples()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = [*train(model, optimizer, u, y, mesh), *train(model, optimizer, u, y, mesh)]
    for rank in saved:
        resumed = rank["run_resumed", "", 4]
        assert not isinstance(resumed, str), resumed
        np.testing.assert_allclose(resumed["losses"].numpy(), losses, rtol=1e-9)


# --- faults ---------------------------------------------------------------------------------------

REFUSED = {  # of the last rank, of the others
    "shape": (
        r"ValueError: .*key must have shape \(\.\.\., M, 4\)",
        r"RuntimeError: .*rank {last} of {size} refused its arguments: ValueError: .*key must have shape",
    ),
    "value": (
        r"ValueError: .*weights must be >= 0 and not NaN, got a smallest value of -1.0",
        r"RuntimeError: .*rank {last} of {size} refused its arguments: ValueError: .*weights must be >= 0",
    ),
    "dtype": (r"ValueError: .*the dtype of query must be the same on all ranks, got \['torch.float64'",) * 2,
    "weights": (r"ValueError: .*dimensions of weights must be the same on all ranks, got \[\(\),.*None\]",)
    * 2,
    "scale": (r"ValueError: .*the scale must be the same on all ranks, got \[None,.* 0.5\]",) * 2,
    "gradient": (r"ValueError: .*attn_mask require a gradient must be the same on all ranks",) * 2,
    "operator": (
        r"RuntimeError: distributed.galerkin_attention: all ranks must make the same calls, rank 0 called",
        r"RuntimeError: .*all ranks must make the same calls, rank {last} called distributed.galerkin_att",
    ),
    "mesh": (r"ValueError: .*the mesh .* must be the same on all ranks",) * 2,
    "after": (r"no error",) * 2,
}


@sizes
@pytest.mark.parametrize("what", REFUSED)
def test_wrong_arguments_on_one_rank_are_an_error_on_all(what, size, saved):
    texts = [rank[what] for rank in of_ranks(saved, "refusals", "", size)]
    for rank, text in enumerate(texts):
        pattern = REFUSED[what][0 if rank == size - 1 else 1].format(last=size - 1, size=size)
        with pytest.raises(AssertionError, match=pattern):
            raise AssertionError(text)


def test_a_rank_that_raises_stops_the_others(saved):
    for pair in (saved[:2], saved[2:]):
        first, last = (rank["raises", "", 2] for rank in pair)
        assert last == "Broken: something else"
        assert first.startswith(
            "RuntimeError: distributed.continuum_attention: rank 0 of 2 had no answer from rank 1: a rank "
            "died, raised, or did not"
        )


def test_a_rank_that_dies_stops_the_others(saved):
    for rank, result in enumerate(saved[:3]):
        assert result["dies", "", 4].startswith(
            f"RuntimeError: distributed.continuum_attention: rank {rank} of 4 had no answer from rank "
        ), result["dies", "", 4]
