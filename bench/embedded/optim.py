"""The optimiser: Muon for matrices inside layers, AdamW for everything else, one learning rate for both."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al., "Muon", 2024
BETAS = (0.9, 0.95)
DECAY = 0.1  # of the matrices that Muon trains


def orthogonalise(update: Tensor) -> Tensor:
    """Five Newton-Schulz steps on a batch of matrices [n, rows, columns]."""
    a, b, c = NEWTON_SCHULZ
    x = update.bfloat16()
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if wide else x).to(update.dtype)


class Optimiser:
    """Muon with Moonlight's update scale (0.2 * sqrt(larger side)), beside AdamW; without `muon` AdamW alone."""

    def __init__(self, model: nn.Module, *, muon: bool = True) -> None:
        groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        plain: list[Tensor] = []
        for name, parameter in model.named_parameters():
            inner = parameter.ndim == 3 or (parameter.ndim == 2 and "layers" in name and "router" not in name)
            if muon and inner:
                groups[tuple(parameter.shape[-2:])].append(parameter)
            else:
                plain.append(parameter)
        self.groups = list(groups.values())
        self.momenta = [
            torch.cat([torch.zeros_like(p).view(-1, *p.shape[-2:]) for p in group]) for group in self.groups
        ]
        fused = bool(plain) and plain[0].is_cuda
        self.adam = torch.optim.AdamW(plain, betas=BETAS, weight_decay=0.0, eps=1e-10, fused=fused)
        self.orthogonalise = torch.compile(orthogonalise) if fused else orthogonalise

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply the gradients with learning rate `rate`, then clear them."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradient = torch.cat([p.grad.view(-1, *p.shape[-2:]) for p in group if p.grad is not None])
            momentum.lerp_(gradient, 0.05)
            update = self.orthogonalise(gradient.lerp(momentum, 0.95))
            scale = rate * 0.2 * max(update.shape[-2:]) ** 0.5
            pieces = update.split([p.numel() // (p.shape[-1] * p.shape[-2]) for p in group])
            torch._foreach_mul_(group, 1 - rate * DECAY)
            torch._foreach_add_(
                group, [piece.reshape(p.shape) for piece, p in zip(pieces, group, strict=True)], alpha=-scale
            )
        for group in (*self.groups, *(g["params"] for g in self.adam.param_groups)):
            for parameter in group:
                parameter.grad = None


def schedule(progress: float, peak: float, warmup: float = 0.02) -> float:
    """Linear warm-up, then linear decay to zero; `progress` runs from 0 to 1."""
    return peak * min(progress / warmup, (1 - progress) / (1 - warmup), 1.0) if progress < 1 else 0.0
