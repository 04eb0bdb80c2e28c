"""Errors of published rows with the constants of kernels fitted to rows of other models only.

The fit is the same for each profile of kernels: constants that are not measured begin at round
numbers, and Gauss and Newton's method lowers the sum of the absolute logarithms of the ratios of
estimated and published tokens a second, with a weak pull to these numbers.
"""

from collections import defaultdict
from dataclasses import replace
from math import exp, log

import numpy as np

CONSTANTS = {
    "fused": {
        "matmul_pace": 0.9,
        "expert_rows": 1000,
        "layer_ms": 1,
        "expert_layer_ms": 5,
        "expert_ms": 0.1,
    },
    "llmfoundry": {"matmul_pace": 0.9, "attention_share": 0.4, "layer_ms": 1},
    "llmfoundry-a100": {"matmul_pace": 0.9, "attention_share": 0.4, "layer_ms": 1},
}
"""By profile of kernels, the constants that no measurement gives, with the numbers before a fit."""
LIKE = {"automodel": ("fused", ("expert_rows", "expert_ms"))}
"""Profiles with the constants of another one, but for those that are measured."""
STEP = 0.05
"""The change of a constant's logarithm by which derivatives are taken."""
SMALL, PULL, FAR = 0.02, 0.01, log(4)
"""The residual below which a row counts by its square, the weight of the numbers before a fit, and
the most by which a constant differs from them."""


def kernels_with(row, logs):
    """The kernels of a row with constants e^x times those before a fit."""
    kernels = row.stack.kernels
    name, measured = LIKE.get(kernels.name, (kernels.name, ()))
    pairs = zip(CONSTANTS[name].items(), logs, strict=True)
    changes = {key: n * exp(x) for (key, n), x in pairs if key not in measured}
    return replace(kernels, **changes)


def residual(row, logs):
    """The logarithm of the ratio of estimated and published tokens a second."""
    rate = row.estimate(kernels_with(row, logs)).time.tokens_per_second
    return log(rate / row.row.tokens)


def linearize(rows, logs):
    """Residuals of rows and their derivatives by the logarithms of constants."""
    residuals = np.array([residual(row, logs) for row in rows])
    columns = []
    for i in range(len(logs)):
        moved = logs + STEP * (np.arange(len(logs)) == i)
        columns.append(([residual(row, moved) for row in rows] - residuals) / STEP)
    return residuals, np.stack(columns, axis=1)


def solve(residuals, slopes, logs):
    """Logarithms of constants with the least sum of absolute residuals, by reweighted squares."""
    size, x = len(logs), logs.copy()
    for _ in range(30):
        now = residuals + slopes @ (x - logs)
        weights = 1 / np.maximum(np.abs(now), SMALL)
        left = slopes.T @ (weights[:, None] * slopes) + PULL * len(weights) * np.eye(size)
        right = slopes.T @ (weights * (slopes @ logs - residuals))
        x = np.clip(np.linalg.solve(left, right), -FAR, FAR)
    return x


def fitted_elsewhere(rows):
    """By published row, its estimate with constants fitted to rows of other models; rows whose
    profile has no fitted constants are left out.
    """
    by = defaultdict(list)
    for row in rows:
        name, _ = LIKE.get(row.stack.kernels.name, (row.stack.kernels.name, ()))
        if name in CONSTANTS and row.row.judged:
            by[name].append(row)
    found = {}
    for name, group in by.items():
        logs = np.zeros(len(CONSTANTS[name]))
        for _ in range(2):
            residuals, slopes = linearize(group, logs)
            logs = solve(residuals, slopes, logs)
        residuals, slopes = linearize(group, logs)
        for model in {row.row.model_name for row in group}:
            other = np.array([row.row.model_name != model for row in group])
            without = solve(residuals[other], slopes[other], logs)
            for row in group:
                if row.row.model_name == model:
                    found[row.row] = row.estimate(kernels_with(row, without))
    return found
