"""Trains and tests denoisers that minimise an energy: one process, one device, torch, numpy and pillow alone.

    python benchmarks/denoising.py train --data DIR --out runs/weak --minutes 5
    python benchmarks/denoising.py train --data DIR --out runs/convex --minutes 4 --rho 0
    python benchmarks/denoising.py test  --data DIR --model runs/weak --out runs/weak/test.json
    python benchmarks/denoising.py time  --data DIR

DIR holds folders train, set12 and bsd68 of grey images. Training stops at its time, or at ``--steps``, and leaves
``checkpoint.pt`` on the way; called again, it goes on from there. Learning rates follow the share of time, or of steps,
that has passed. PSNR is that of images in [0, 1] with Gaussian noise that is neither clipped nor rounded.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import opteq
from opteq.data.grey import Crops, read_grey
from opteq.models.denoiser import Denoiser, DenoiserConfig

TESTED = (15, 25, 50)
BATCH = 17
"""Images of one shape that are denoised at once."""


def main() -> None:
    arguments = parsed()
    torch.backends.cudnn.benchmark = True
    # Rounding to TF32 leaves residuals above 1e-4.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = arguments.tf32
    command = {"train": train, "test": test, "time": time_steps}[arguments.command]
    with plain_path() if arguments.plain else nullcontext():
        command(arguments)


def plain_path() -> AbstractContextManager[None]:
    """Every operation as it is written: no captured graphs, no fused kernels."""
    return opteq.engine.off()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "test", "time"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path, help="a folder that training left")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plain", action="store_true", help="no captured graphs, no fused kernels")
    parser.add_argument("--tf32", action="store_true", help="convolutions in TF32")
    parser.add_argument("--seed", type=int, default=0)
    limit = parser.add_argument_group("length of training")
    limit.add_argument("--minutes", type=float, help="of training in all, checkpoints of earlier calls included")
    limit.add_argument("--steps", type=int, help="in place of minutes")
    limit.add_argument("--call-minutes", type=float, default=9.0, help="stop and leave a checkpoint after this time")
    model = parser.add_argument_group("model")
    model.add_argument("--rho", type=float, default=1.0, help="0 for a convex prior")
    model.add_argument("--mu", type=float, default=10.0)
    model.add_argument("--width", type=int, default=56)
    model.add_argument("--adaptive", type=int, default=0, help="channels of weights that look at the image; 0 for none")
    model.add_argument("--knots", type=int, default=24)
    learn = parser.add_argument_group("training")
    learn.add_argument("--batch", type=int, default=128)
    learn.add_argument("--patch", type=int, default=40)
    learn.add_argument("--margin", type=int, default=6, help="pixels at the border of a patch outside the loss")
    learn.add_argument("--lr", type=float, default=4e-3)
    learn.add_argument("--sigmas", type=float, nargs=2, default=(10.0, 55.0), help="noise levels, of 255")
    learn.add_argument("--tol", type=float, default=1e-4, help="of the forward solve")
    learn.add_argument("--max-steps", type=int, default=120)
    learn.add_argument("--backward-tol", type=float, default=1e-3)
    learn.add_argument("--backward-steps", type=int, default=60)
    learn.add_argument("--solver", choices=("fista", "anderson"), default="fista")
    learn.add_argument("--one-step", action="store_true", help="one step in place of the minimiser")
    learn.add_argument("--compile", action="store_true", help="fuse the steps of solves by torch's Inductor")
    learn.add_argument("--log-every", type=int, default=100)
    tests = parser.add_argument_group("tests")
    tests.add_argument("--test-tol", type=float, default=1e-4)
    tests.add_argument("--test-steps", type=int, default=400)
    tests.add_argument("--images", type=int, help="of each test set, all by default")
    return parser.parse_args()


def train(arguments: argparse.Namespace) -> None:
    if arguments.out is None or (arguments.minutes is None) == (arguments.steps is None):
        raise SystemExit("training needs --out and one of --minutes and --steps")
    run = Run(arguments)
    began = time.monotonic()
    run.resume()
    print(f"{run.model.size} parameters on {arguments.device}, from step {run.step}", flush=True)
    while run.progress(began) < 1 and time.monotonic() - began < 60 * arguments.call_minutes:
        run.advance(began)
        if run.step % arguments.log_every == 0:
            run.log(began)
        if run.step % 500 == 0:
            run.save(began)
    run.save(began)
    if run.progress(began) >= 1:
        run.finished().save(arguments.out)
        print(f"trained: {arguments.out}", flush=True)
    else:
        print(f"stopped at {100 * run.progress(began):.0f} %; the same command goes on", flush=True)


class Run:
    """Model, optimiser, average of weights and data of one training."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        torch.manual_seed(arguments.seed)
        device = torch.device(arguments.device)
        self.model = built(arguments).to(device)
        if device.type == "cuda":
            self.model = self.model.to(memory_format=torch.channels_last)
        self.average = {name: tensor.detach().clone() for name, tensor in self.model.prior.state_dict().items()}
        prior = self.model.prior
        groups = [
            {"params": list(prior.filters.parameters()), "share": 1.0},
            {"params": [*prior.potential.parameters(), *prior.levels.parameters()], "share": 2.0},
            {"params": [] if prior.weights is None else list(prior.weights.parameters()), "share": 1.0},
        ]
        self.optimiser = torch.optim.Adam(groups, lr=arguments.lr, betas=(0.9, 0.99), fused=device.type == "cuda")
        images = torch.stack([image[0] for image in read_grey(arguments.data / "train")])
        self.crops = Crops(images.to(device).float() / 255, arguments.patch)
        self.generator = torch.Generator(device).manual_seed(arguments.seed)
        self.device = device
        self.step, self.elapsed = 0, 0.0
        self.sums = torch.zeros(4, device=device)
        self.counted = 0

    def progress(self, began: float) -> float:
        if self.arguments.steps is not None:
            return self.step / self.arguments.steps
        return (self.elapsed + time.monotonic() - began) / (60 * self.arguments.minutes)

    def advance(self, began: float) -> None:
        arguments = self.arguments
        done = min(1.0, self.progress(began))
        rate = arguments.lr * min(1.0, (self.step + 1) / 50) * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)
        for group in self.optimiser.param_groups:
            group["lr"] = rate * group["share"]
        clean = self.crops.draw(arguments.batch, self.generator)
        low, high = arguments.sigmas
        drawn = torch.rand(arguments.batch, device=self.device, generator=self.generator)
        sigma = (low + (high - low) * drawn) / 255
        noise = torch.randn(clean.shape, device=self.device, generator=self.generator)
        noisy = clean + sigma[:, None, None, None] * noise
        cut = slice(arguments.margin, arguments.patch - arguments.margin)
        errors = (self.model(noisy, sigma) - clean)[..., cut, cut].square().mean(dim=(1, 2, 3))
        # The error that is left grows about as sigma does: all levels count the same.
        loss = (errors / sigma).mean()
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.prior.parameters(), 1.0)
        self.optimiser.step()
        self.step += 1
        kept = min(0.998, self.step / (self.step + 10))
        with torch.no_grad():
            new = self.model.prior.state_dict()
            torch._foreach_lerp_(list(self.average.values()), [new[name] for name in self.average], 1 - kept)
            report, slot = self.model.layer.last or (None, None)
            backward = 0.0 if slot is None or slot.report is None else slot.report.steps.float().mean()
            forward = report.steps.float().mean()
            failed = report.failures().float().mean()
            parts = (loss.detach(), forward, backward, failed)
            self.sums += torch.stack([torch.as_tensor(part, device=self.device).float() for part in parts])
            self.counted += 1

    def log(self, began: float) -> None:
        loss, forward, backward, failed = (self.sums / max(1, self.counted)).tolist()
        self.sums.zero_()
        self.counted = 0
        now = self.elapsed + time.monotonic() - began
        line = {
            "step": self.step, "seconds": round(now, 1), "loss": round(loss, 6), "forward": round(forward, 1),
            "backward": round(backward, 1), "failed": round(failed, 4),
        }  # fmt: skip
        print(json.dumps(line), flush=True)
        self.arguments.out.mkdir(parents=True, exist_ok=True)
        with (self.arguments.out / "training.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def save(self, began: float) -> None:
        self.arguments.out.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "elapsed": self.elapsed + time.monotonic() - began,
            "weights": self.model.prior.state_dict(),
            "average": self.average,
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
        }
        draft = self.arguments.out / "checkpoint.tmp"
        torch.save(state, draft)
        draft.replace(self.arguments.out / "checkpoint.pt")

    def resume(self) -> None:
        file = self.arguments.out / "checkpoint.pt"
        if not file.exists():
            return
        state = torch.load(file, map_location=self.device, weights_only=True)
        self.model.prior.load_state_dict(state["weights"])
        self.average = state["average"]
        self.optimiser.load_state_dict(state["optimiser"])
        self.generator.set_state(state["generator"].cpu())
        self.step, self.elapsed = state["step"], state["elapsed"]

    def finished(self) -> Denoiser:
        model = Denoiser(self.model.config)
        model.prior.load_state_dict(self.average)
        return model


def built(arguments: argparse.Namespace) -> Denoiser:
    config = replace(
        DenoiserConfig(),
        channels=(1, 4, 8, arguments.width),
        knots=arguments.knots,
        rho=arguments.rho,
        mu=arguments.mu,
        hidden=arguments.adaptive,
    )
    if arguments.one_step:
        return Denoiser(config, opteq.Picard(tol=1e-12, max_steps=1), opteq.Unrolled(steps=1), on_failure="ignore")
    # One look at the residuals every eight steps keeps the device busy.
    every = 8 if arguments.device != "cpu" else 1
    kind = opteq.FISTA if arguments.solver == "fista" else opteq.Anderson
    solver = kind(tol=arguments.tol, max_steps=arguments.max_steps, check_every=every)
    linear = opteq.CG(tol=arguments.backward_tol, max_steps=arguments.backward_steps, check_every=every)
    return Denoiser(config, solver, opteq.Implicit(linear=linear), "ignore", arguments.compile)


def test(arguments: argparse.Namespace) -> None:
    if arguments.model is None:
        raise SystemExit("a test needs --model")
    solver = opteq.FISTA(tol=arguments.test_tol, max_steps=arguments.test_steps)
    if arguments.one_step:
        solver = opteq.Picard(tol=1e-12, max_steps=1)
    model = Denoiser.load(arguments.model, solver, on_failure="ignore").to(arguments.device).eval()
    certificate = model.layer.problem.certificate()
    print(certificate)
    found = {"parameters": model.size, "tol": arguments.test_tol, "certificate": str(certificate).splitlines()}
    for name in ("set12", "bsd68"):
        images = read_grey(arguments.data / name)[: arguments.images]
        for level in TESTED:
            values, steps, converged = psnr(model, images, level / 255, arguments.device)
            found[f"{name}-{level}"] = {
                "psnr": round(sum(values) / len(values), 3), "images": len(values), "worst steps": steps,
                "converged": converged,
            }  # fmt: skip
            print(f"{name:6} sigma {level}: {found[f'{name}-{level}']}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


@torch.no_grad()
def psnr(model: Denoiser, images: list[Tensor], sigma: float, device: str) -> tuple[list[float], int, float]:
    """PSNR of every image, the most steps, and the share of images whose energy was minimised."""
    around = 2 * max(model.prior.filters.prepare().padding)
    by_shape: dict[torch.Size, list[int]] = {}
    for number, image in enumerate(images):
        by_shape.setdefault(image.shape, []).append(number)
    values, steps, converged = [0.0] * len(images), 0, 0
    for numbers in by_shape.values():
        for group in (numbers[i : i + BATCH] for i in range(0, len(numbers), BATCH)):
            clean = torch.stack([images[number] for number in group]).float() / 255
            noise = [torch.randn(clean[0].shape, generator=torch.Generator().manual_seed(n)) for n in group]
            noisy = torch.nn.functional.pad(clean + sigma * torch.stack(noise), [around] * 4, mode="reflect").to(device)
            solution = model.layer.solve((noisy, torch.full((len(group),), sigma, device=device)))
            restored = solution.features[..., around:-around, around:-around]
            errors = (restored - clean.to(device)).double().square().mean(dim=(1, 2, 3))
            for number, value in zip(group, (-10 * errors.log10()).tolist(), strict=True):
                values[number] = value
            steps = max(steps, int(solution.steps.max()))
            converged += int(solution.converged.sum())
    return values, steps, converged / len(images)


def time_steps(arguments: argparse.Namespace) -> None:
    """Seconds of a training step, the median of 20 after a warm-up of 20 at the beginning of training."""
    run = Run(arguments)
    began = time.monotonic()
    arguments.minutes = arguments.minutes or 60.0
    spent = []
    for step in range(40):
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        before = time.perf_counter()
        run.advance(began)
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        if step >= 20:
            spent.append(time.perf_counter() - before)
    forward, backward = (run.sums / run.counted).tolist()[1:3]
    print(json.dumps({
        "median step in s": round(sorted(spent)[len(spent) // 2], 4), "forward steps": round(forward, 1),
        "backward steps": round(backward, 1), "batch": arguments.batch, "patch": arguments.patch,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
