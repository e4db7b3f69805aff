"""continuum_ops.distributed in a group of one rank: messages, autocast, torch.compile, layers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers import draw, exact

import continuum_ops as co
from continuum_ops import distributed as cd


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    store = tmp_path_factory.mktemp("alone") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def qkv(dtype=torch.float64):
    return [draw((2, 7, 4), dtype, seed) for seed in range(3)]


def test_no_process_group():
    with pytest.raises(RuntimeError, match=r"init_process_group must be called first"):
        cd.continuum_attention(*qkv())


@pytest.mark.usefixtures("alone")
class TestArguments:
    def test_group(self):
        with pytest.raises(TypeError, match=r"a DeviceMesh, a ShardedMesh or None, got str"):
            cd.continuum_attention(*qkv(), group="world")
        with pytest.raises(ValueError, match=r"group must contain this process"):
            cd.continuum_attention(*qkv(), group=dist.GroupMember.NON_GROUP_MEMBER)
        mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        with pytest.raises(ValueError, match=r"group must be a DeviceMesh of one dimension, got 2"):
            cd.continuum_attention(*qkv(), group=mesh)
        assert torch.equal(cd.continuum_attention(*qkv(), group=mesh["a"]), cd.continuum_attention(*qkv()))

    def test_continuum_attention(self):
        q, k, v = qkv()
        with pytest.raises(ValueError, match=r"is_causal must be False with query_replicated, whose queries"):
            cd.continuum_attention(q, k, v, is_causal=True, query_replicated=True)
        mask = torch.ones(7, 7, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"attn_mask must be None when is_causal=True"):
            cd.continuum_attention(q, k, v, is_causal=True, attn_mask=mask)
        with pytest.raises(ValueError, match=r"a column for each of the 7 keys of all ranks, .* got 6"):
            cd.continuum_attention(q, k, v, attn_mask=mask[:, :6])
        with pytest.raises(ValueError, match=r"attn_mask must be broadcastable to .* got \(6, 7\)"):
            cd.continuum_attention(q, k, v, attn_mask=mask[:6])
        with pytest.raises(TypeError, match=r"attn_mask must be bool .* or floating-point, got torch.int64"):
            cd.continuum_attention(q, k, v, attn_mask=mask.long())
        with pytest.raises(ValueError, match=r"dropout_p must be in \[0, 1\], got 1.5"):
            cd.continuum_attention(q, k, v, dropout_p=1.5)
        with pytest.raises(TypeError, match=r"query_index must be an int64 tensor, got torch.float32"):
            cd.continuum_attention(q, k, v, query_index=torch.rand(7))
        with pytest.raises(
            ValueError, match=r"key_index must have shape \(7,\), a place for each row of key"
        ):
            cd.continuum_attention(q, k, v, key_index=torch.arange(6))
        with pytest.raises(ValueError, match=r"query_index must be >= 0, got a smallest place of -1"):
            cd.continuum_attention(q, k, v, query_index=torch.arange(7) - 1)
        with pytest.raises(ValueError, match=r"key_index must be below 7, .* got a place of 7"):
            cd.continuum_attention(q, k, v, key_index=torch.arange(7) + 1)
        with pytest.raises(ValueError, match=r"weights must have an entry for each of the 7 rows of key"):
            cd.continuum_attention(q, k, v, torch.ones(1))
        with pytest.raises(ValueError, match=r"weights must be >= 0 and finite, got inf"):
            cd.continuum_attention(q, k, v, torch.full((7,), torch.inf))
        with pytest.raises(TypeError, match=r"query must be a Tensor, got list"):
            cd.continuum_attention([1.0], k, v)

    def test_the_other_operators(self):
        q, k, v = qkv()
        with pytest.raises(ValueError, match=r"distributed.galerkin_attention: key must have shape"):
            cd.galerkin_attention(q, k[..., :2], v)
        with pytest.raises(ValueError, match=r"distributed.fourier_attention: weights must be >= 0"):
            cd.fourier_attention(q, k, v, torch.full((7,), -1.0))
        x, rate = torch.rand(7, 2), torch.ones(2)
        with pytest.raises(ValueError, match=r"rate must be >= 0 and not NaN, got a smallest value of -1.0"):
            cd.position_attention(x, x, v.float(), -rate)
        with pytest.raises(TypeError, match=r"query_pos must be a Tensor, got Grid; pass its .points"):
            cd.position_attention(co.Grid.uniform((7,)), x, v.float(), rate)
        with pytest.raises(ValueError, match=r"radius must be >= 0"):
            cd.position_attention(x, x, v.float(), rate, radius=-torch.ones(7))
        patches = torch.rand(1, 6, 2, 3)
        with pytest.raises(ValueError, match=r"patch_size must divide the grid of query"):
            cd.patch_attention(patches, patches, patches, 4)
        with pytest.raises(TypeError, match=r"scale must be None or a number, got str"):
            cd.patch_attention(patches, patches, patches, 3, scale="1")

    def test_meshes(self):
        mesh = cd.shard(co.Grid.uniform((3, 3)))
        with pytest.raises(TypeError, match=r"mesh must be a whole mesh, got a ShardedMesh"):
            cd.shard(mesh)
        with pytest.raises(TypeError, match=r"mesh must be a ShardedMesh, got Grid"):
            cd.gather(torch.rand(9, 1), co.Grid.uniform((3, 3)))
        with pytest.raises(ValueError, match=r"field must have 9 points at dimension -2, got shape \(8, 1\)"):
            cd.gather(torch.rand(8, 1), mesh)
        with pytest.raises(ValueError, match=r"field must have 9 points at dimension 0, got shape \(8, 1\)"):
            mesh.select(torch.rand(8, 1), 0)
        with pytest.raises(TypeError, match=r"field must be a Tensor, got list"):
            mesh.select([1.0])
        pit = co.models.PiT(1, 1, 2, width=4, num_heads=1, num_layers=1)
        with pytest.raises(TypeError, match=r"was ShardedMesh|got ShardedMesh"):
            pit(torch.rand(1, 9, 1), mesh)
        with pytest.raises(TypeError, match=r"a mesh with .weights, got ShardedMesh"), co.nn.quadrature(mesh):
            pass
        with pytest.raises(
            TypeError, match=r"all_reduce: x must be a floating-point tensor, got torch.int64"
        ):
            cd.all_reduce(torch.arange(3))
        single = mesh.to(dtype=torch.bfloat16)
        assert single.part.points.dtype == torch.bfloat16 and single.part.weights.dtype == torch.float32
        assert repr(mesh).startswith("ShardedMesh(9 of 9 points, rank 0 of 1")

    def test_layers(self):
        x = torch.rand(2, 5, 4)
        layer = co.nn.MultiheadAttention(4, 2, batch_first=True)
        world = dist.group.WORLD
        with pytest.raises(ValueError, match=r"need_weights must be False .* no rank has the N x M prob"):
            layer(x, x, x, group=world)
        for name, options in (
            ("add_bias_kv must be False .* an appended key is in no rank's part", {"add_bias_kv": True}),
            ("add_zero_attn must be False .* an appended key is in no rank's part", {"add_zero_attn": True}),
        ):
            other = co.nn.MultiheadAttention(4, 2, batch_first=True, **options)
            with pytest.raises(ValueError, match=name):
                other(x, x, x, need_weights=False, group=world)
        position = co.nn.PositionAttention(4, 4, 2, quantile=0.5)
        with pytest.raises(ValueError, match=r"radius must be given where group is, the quantile being"):
            position(x, torch.rand(5, 2), group=world)
        model = co.models.TNO(1, 1, 2, d_model=4, num_heads=2, num_layers=1, initial_channels=1)
        mesh = cd.shard(co.Grid.uniform((3, 3), dtype=torch.float32))
        with pytest.raises(
            ValueError, match=r"initial_channels must be 0 on a mesh that is spread over ranks"
        ):
            model(torch.rand(2, 9, 1), mesh, torch.rand(2, 1))

    def test_models_on_grids(self):
        grid = co.Grid.uniform((8, 6), dtype=torch.float32)
        for message, error, mesh, patches in (
            (r"mesh must be a Grid for num_patches, got Tensor", TypeError, grid.points, 2),
            (r"mesh must have a multiple of 4 points along axis 1", ValueError, grid, 4),
            (r"num_patches must be one number for each of 2 axes", ValueError, grid, (2, 2, 2)),
        ):
            with pytest.raises(error, match=message):
                cd.shard(mesh, num_patches=patches)
        sizes = {"num_patches": 2, "patch_size": (4, 3), "modes": 1, "d_model": 4, "num_heads": 1}
        model = co.models.ViTNO(1, 1, 2, **sizes, num_layers=1)
        u = torch.rand(1, 48, 1)
        with pytest.raises(ValueError, match=r"in \(2, 2\) patches, .* was spread in single points"):
            model(u, cd.shard(grid))
        with pytest.raises(ValueError, match=r"in \(2, 2\) patches, .* was spread in \(4, 2\) patches"):
            model(u, cd.shard(grid, num_patches=(4, 2)))
        mesh = cd.shard(grid, num_patches=2)
        torch.testing.assert_close(model(u, mesh.to(dtype=torch.float32)), model(u, grid))
        options = {"d_model": 4, "num_layers": 1, "modes": 2}
        galerkin = co.models.GalerkinTransformer(1, 1, 2, **options)
        with pytest.raises(ValueError, match=r"mesh must be a Grid for the spectral decoder, was a part of"):
            galerkin(u, cd.shard(co.PointCloud(grid.points)))
        coarse = co.models.GalerkinTransformer(1, 1, 2, **options, coarsening=2, coarse_output=True)
        with pytest.raises(ValueError, match=r"coarse_output must be False for a mesh that is spread"):
            coarse(u, cd.shard(grid))

    def test_pit(self):
        grid = co.Grid.uniform((3, 3), dtype=torch.float32)
        mesh, other = cd.shard(grid), cd.shard(co.Grid.uniform((2, 3), dtype=torch.float32))
        options = {"width": 4, "num_heads": 1, "num_layers": 1}
        without = co.models.PiT(1, 1, 2, **options).geometry(grid)
        with pytest.raises(ValueError, match=r"geometry must have a latent mesh of its own"):
            without.shard(mesh)
        model = co.models.PiT(1, 1, 2, **options, latent=(2, 2), decoder_layers=1)
        geometry = model.geometry(grid)
        with pytest.raises(ValueError, match=r"^mesh must be the one of the geometry with 9 points, had 6"):
            geometry.shard(other)
        with pytest.raises(ValueError, match=r"output_mesh must be the one of the geometry with 9 points"):
            geometry.shard(mesh, other)
        with pytest.raises(ValueError, match=r"decoder_layers must be 0 for a mesh that is spread .* was 1"):
            model(torch.rand(2, 9, 1), geometry.shard(mesh))

    def test_position_layer(self):
        torch.manual_seed(0)
        layer = co.nn.PositionAttention(4, 4, 2, dtype=torch.float64)
        value, grid = draw((2, 12, 4), torch.float64), co.Grid.uniform((3, 4))
        for mesh in (grid, co.PointCloud(grid.points, grid.weights)):
            torch.testing.assert_close(
                layer(value, mesh, group=dist.group.WORLD), layer(value, mesh), rtol=1e-12, atol=1e-12
            )

    def test_rows_without_keys_have_no_gradient(self):
        q, k, v = (t.requires_grad_() for t in qkv())
        x = torch.rand(7, 2, dtype=torch.float64)
        rate, none = torch.ones(2, dtype=torch.float64, requires_grad=True), torch.zeros(7)
        for (out, lse), inputs in (
            (cd.continuum_attention(q, k, v, none, return_lse=True), (q, k, v)),
            (cd.position_attention(x, x, v, rate, none, return_lse=True), (v, rate)),
        ):
            assert bool((lse == -torch.inf).all()) and not out.any()
            incoming = (torch.full_like(out, torch.nan), torch.full_like(lse, torch.inf))
            assert not any(grad.any() for grad in torch.autograd.grad((out, lse), inputs, incoming))

    def test_no_second_derivative(self):
        q, k, v = (t.requires_grad_() for t in qkv())
        (grad,) = torch.autograd.grad(cd.continuum_attention(q, k, v).square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match=r"once_differentiable"):
            grad.sum().backward()

    def test_autocast(self):
        q, k, v = qkv(torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outs = [cd.continuum_attention(q, k, v), cd.galerkin_attention(q, k, v)]
        assert [out.dtype for out in outs] == [torch.bfloat16] * 2
        true = exact(*(t.bfloat16() for t in (q, k, v)))["out"]
        assert abs(outs[0].double().numpy() - true).max() <= 8 * 2**-8 * v.abs().max().item()

    def test_encoder(self):
        torch.manual_seed(0)
        layer = co.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, dtype=torch.float64)
        encoder = co.nn.TransformerEncoder(layer, 2)
        x, w = draw((2, 5, 4), torch.float64), draw((5,), torch.float64, positive=True)
        torch.testing.assert_close(
            encoder(x, weights=w, group=dist.group.WORLD), encoder(x, weights=w), rtol=1e-12, atol=1e-12
        )

    def test_compile_does_not_look_inside(self):
        def function(q, k, v):
            return cd.continuum_attention(q.sin(), k, v).cos()

        q, k, v = qkv()
        compiled = torch.compile(function, backend="eager")
        assert torch.equal(compiled(q, k, v), function(q, k, v))

    def test_compiled_model_on_a_part(self):
        torch.manual_seed(0)
        model = co.models.TNO(1, 1, 2, d_model=4, num_heads=2, num_layers=1, dtype=torch.float64)
        grid, u = co.Grid.uniform((3, 3)), draw((2, 9, 1), torch.float64)
        true = model(u, grid)
        compiled = torch.compile(model, backend="eager")(u, cd.shard(grid))
        torch.testing.assert_close(compiled, true, rtol=1e-12, atol=1e-12)
        grads = [torch.autograd.grad(z.square().sum(), model.parameters()) for z in (compiled, true)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
