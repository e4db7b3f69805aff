"""A model of your own with weighted attention: trained on one uneven mesh, tested on others.

It learns u -> the integral of u from 0 to x, for sums of two waves, on points that are denser on the left.
The error is printed on each mesh, with its quadrature weights and with equal ones.
"""

import torch

import continuum_ops as co


class Operator(torch.nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.lift, self.project = torch.nn.Linear(2, width), torch.nn.Linear(width, 1)
        block = co.nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = co.nn.TransformerEncoder(block, 2)

    def forward(self, u: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        features = self.lift(torch.stack([u, x.expand_as(u)], -1))  # (B, N, width)
        return self.project(self.encoder(features, weights=weights))[..., 0]


def samples(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, k = torch.randn(2, count, 2, 1)
    k = 3 + k
    return (a * torch.cos(k * x)).sum(1), (a * torch.sin(k * x) / k).sum(1)


def error(model: Operator, x: torch.Tensor, w: torch.Tensor) -> float:
    """Median over samples of the relative L2 error, an integral over (0, 1) too."""
    u, v = samples(x, 200)
    exact = co.quadrature.trapezoid(x, dtype=x.dtype)
    with torch.no_grad():
        return ((model(u, x, w) - v).square() @ exact / (v.square() @ exact)).sqrt().median().item()


def main(steps: int = 400) -> dict[str, tuple[float, float]]:
    torch.manual_seed(0)
    x = torch.linspace(0, 1, 65) ** 2
    w, model = co.quadrature.trapezoid(x, dtype=x.dtype), Operator()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        u, v = samples(x, 32)
        loss = ((model(u, x, w) - v).square() @ w).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    meshes = {"as trained": x, "finer": torch.linspace(0, 1, 257) ** 2, "even": torch.linspace(0, 1, 65)}
    return {
        name: (error(model, y, co.quadrature.trapezoid(y)), error(model, y, torch.ones_like(y)))
        for name, y in meshes.items()
    }


if __name__ == "__main__":
    for name, (weighted, equal) in main().items():
        print(f"{name:<12} error {weighted:.1%}, with equal weights {equal:.1%}")
