# %% [markdown]
# # From torchdeq to opteq
#
# A deep equilibrium model in torchdeq is a function `z -> f(z, x)` and a solver. `opteq.FixedPoint` takes the same
# function, and the layer keeps a status for every sample. This page solves one problem with both.

# %%
import torch
import torchdeq
from torch import nn

import opteq


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(3, 8)
        nn.init.orthogonal_(self.inner.weight, gain=0.8)

    def forward(self, z, x):
        return torch.tanh(self.inner(z) + self.outer(x))


cell, x = Cell(), torch.randn(5, 3)

# %%
deq = torchdeq.get_deq(f_solver="anderson", f_max_iter=60, f_tol=1e-5)
(theirs,), _ = deq(lambda z: cell(z, x), torch.zeros(5, 8))[:2]

# %%
problem = opteq.FixedPoint(cell, start=lambda x: torch.zeros(len(x), 8))
layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-5, max_steps=60))
ours = layer(x)
print("largest difference", f"{(ours - theirs).abs().max().item():.0e}")
print(layer.solve(x))

# %% [markdown]
# | torchdeq | opteq |
# |---|---|
# | `get_deq(f_solver="anderson", f_max_iter=60)` | `Equilibrium(problem, Anderson(max_steps=60))` |
# | `deq(lambda z: f(z, x), z0)` | `FixedPoint(f)`, then `layer(x)` |
# | `ift=True`, `b_solver`, `b_tol` | `gradient=Implicit(tol=...)`, the default |
# | `grad=5`, `tau=0.8` (phantom gradients) | `gradient=Phantom(steps=5, damping=0.8)` |
# | `info["abs_lowest"]`, `info["nstep"]` | `solution.residual`, `solution.steps`, `solution.status`, per sample |
# | weight or spectral normalisation | `operators.Dense(..., bound=0.9)`: a certified norm |
#
# New in opteq: write the layer as an objective, and get existence, uniqueness, the value of every term and a symmetric
# backward system.

# %%
optimal = opteq.OptEq(opteq.operators.Dense(8, 8, bound=0.9), nn.Linear(3, 8), activation="tanh")
layer = opteq.Equilibrium(optimal)
print(optimal.certificate())
print({name: round(value[0].item(), 3) for name, value in optimal(x).terms(layer.solve(x).state).items()})
