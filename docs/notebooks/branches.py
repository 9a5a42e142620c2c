# %% [markdown]
# # Branches that agree and differ
#
# MOptEq solves several branches jointly, each at its own scale of the image. Two terms of one objective couple them:
# heritage makes corresponding channels of neighbours similar, diversity makes different channels orthogonal.

# %%
import torch
from matplotlib import pyplot
from torch import nn

import opteq
from opteq import data
from opteq import operators as op

scales = (1, 2, 4)
branches = [opteq.Branch(op.Conv2d(6, 10, 3, bound=0.9), nn.Conv2d(1, 10, 3, padding=1), scale=s) for s in scales]
x = data.load("digits").test.images[:4].float() / 255

# %% [markdown]
# The terms of the objective, without and with diversity. Layer and weights are the same.

# %%
for diversity in (0.0, 0.02):
    problem = opteq.MOptEq(branches, diversity=diversity, smoothing=0.05)
    solution = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-4, max_steps=100)).solve(x)
    terms = {name: round(value[0].item(), 3) for name, value in problem(x).terms(solution.state).items()}
    print(f"diversity {diversity}: {terms}")
    print(f"    {solution}")

# %% [markdown]
# The features of each branch have the size of its scale. Below: one digit, and the strongest channel of each branch.

# %%
figure, panels = pyplot.subplots(1, 4, figsize=(8, 2.3), layout="constrained")
panels[0].imshow(x[0, 0].numpy(), cmap="gray")
panels[0].set(title="image", xticks=[], yticks=[])
for panel, scale, z in zip(panels[1:], scales, solution.features):
    channel = z[0].detach().flatten(1).norm(dim=1).argmax()
    panel.imshow(z[0, channel].detach().numpy(), cmap="magma")
    panel.set(title=f"scale {scale}", xticks=[], yticks=[])

# %% [markdown]
# A named model is made of the same parts; `features_only=True` gives the features of every branch.

# %%
model = opteq.models.create("mopteq-193k", features_only=True, channels=8, hidden=[8, 8, 8])
with torch.no_grad():
    print([tuple(z.shape) for z in model(torch.randn(2, 3, 32, 32))])
