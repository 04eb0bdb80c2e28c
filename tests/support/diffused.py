"""The shipped models of diffusers, which is an extra: without it their tests are skipped."""

from importlib.util import find_spec

import pytest

needed = pytest.mark.skipif(find_spec("diffusers") is None, reason="diffusers is not installed")

TOTALS = {
    "wan2.1-t2v-1.3b": 1_418_996_800,
    "wan2.1-t2v-14b": 14_288_491_584,
    "wan2.1-i2v-14b": 16_394_878_784,
    "flux.1-dev": 11_901_408_320,
    "hunyuanvideo": 12_821_012_544,
    "sd3-medium": 2_028_328_000,
}
"""Parameters; what the models' publishers say, rounded: 1.3 (1.4), 14, 14 (16 with its images'
projections), 12, 13 and 2 billion."""

PLANS = {"wan2.1": "wan", "flux.1": "flux", "hunyuanvideo": "hunyuan_video", "sd3": "sd3"}
"""The plan of each model, by the beginning of its name."""


def plan_of(name):
    return next(plan for start, plan in PLANS.items() if name.startswith(start))


CASES = [
    pytest.param("wan2.1-t2v-1.3b", "wan", ["tp=2"], marks=needed),
    pytest.param("wan2.1-i2v-14b", "wan", ["tp=4"], marks=needed),
    pytest.param("flux.1-dev", "flux", ["tp=2"], marks=needed),
    pytest.param("hunyuanvideo", "hunyuan_video", ["tp=2"], marks=needed),
    pytest.param("sd3-medium", "sd3", ["tp=2"], marks=needed),
]
