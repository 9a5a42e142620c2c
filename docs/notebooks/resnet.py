# %% [markdown]
# # An equilibrium inside a ResNet
#
# An `Equilibrium` is an ordinary module. Here it takes the place of a stage of residual blocks, and the network is
# trained as any other: backward works, and its memory does not grow with the number of solver steps.

# %%
import torch
from matplotlib import pyplot
from torch import nn

import opteq
from opteq import data
from opteq import operators as op


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(x + self.body(x))


W = op.Conv2d(16, 32, kernel_size=3, bound=0.9)
stage = opteq.Equilibrium(opteq.OptEq(W, U=nn.Conv2d(16, 32, 3, padding=1)), opteq.Anderson(tol=1e-3))
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
    Residual(16),
    stage,  # in place of another Residual(16), or of several
    nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10),
)  # fmt: skip
print(sum(weight.numel() for weight in model.parameters()), "parameters")

# %% [markdown]
# Ten steps on the digits of the package.

# %%
digits = data.load("digits")
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
losses = []
batches = data.Batches(digits.train, digits.mean, digits.std, 32, shuffle=True).epoch(0)
for _, (images, labels) in zip(range(10), batches):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(float(loss.detach()))
figure, panel = pyplot.subplots(figsize=(5, 2.4), layout="constrained")
panel.plot(losses)
panel.set(xlabel="step", ylabel="loss")
print(stage.last[0])

# %% [markdown]
# The bound holds after every optimiser step, and so does the certificate.

# %%
print(f"|W| = {W.norm().item():.3f}")
print(stage.problem.certificate())
