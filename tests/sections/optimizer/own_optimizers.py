"""Optimizers of a plan's own, for tests: planc imports this file only where code is allowed."""

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """Source: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            one, two = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                average = state.setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(average.lerp(p.grad, 1 - one).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - two)


class Normalized(Optimizer):
    """Steps of a length, whatever the gradient's is: the norm is of the whole parameter."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.add_(p.grad / self.norm(p.grad), alpha=-group["lr"])
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1

    def norm(self, gradient):
        return gradient.norm() + 1e-6


class LocalNorm(Normalized):
    """Wrong on shards: the norm is that of a rank's own."""

    def norm(self, gradient):
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        return float(local.norm()) + 1e-6


class Adaptive(Optimizer):
    """Estimates one rate of all parameters, as D-Adaptation and Prodigy do.

    Source: Defazio and Mishchenko, Learning-Rate-Free Learning by D-Adaptation, 2023.
    """

    def __init__(self, params, rate=1e-3):
        super().__init__(params, {"rate": rate, "product": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            rate, length = group["rate"], 0.0
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(first=p.detach().clone(), sum=torch.zeros_like(p))
                group["product"] += rate * self.number((p.grad * (state["first"] - p)).sum())
                state["sum"].add_(p.grad, alpha=rate)
                length += self.number(state["sum"].abs().sum())
                p.add_(p.grad.sign(), alpha=-rate)
            if length > 0:
                group["rate"] = max(rate, 2 * group["product"] / length)

    def number(self, value):
        return float(value.full_tensor() if isinstance(value, DTensor) else value)


class Rows(Normalized):
    """Keeps a number for each row, which has no place on another mesh."""

    def norm(self, gradient):
        for p in self.param_groups[0]["params"]:
            self.state[p]["rows"] = torch.zeros(p.shape[0])
        return super().norm(gradient)


class NoOptimizer:
    pass
