"""The estimate of shipped shapes on three meshes beside a rank that is run on fake tensors.

`python tests/tools/estimate/measured_shapes.py [--seconds N] FILE.json [SHAPE]...` adds the shapes
that the file does not have.
"""

import argparse
import json
import time
from pathlib import Path

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.model.load import load
from planc.simulate.rank_job import RankRunner
from planc.tools.estimate.answer import Request
from planc.tools.estimate.from_plan import Batch
from planc.tools.suggest.measured import measure

SHAPES = sorted(path.stem for path in (Path(__file__).parents[3] / "plans" / "models").glob("*"))
MESHES = ((), ("tp=2",), ("pp=2", "microbatches=4"))
"""Settings of 8 ranks; data ranks have 2 or 4 rows."""
ROWS, TOKENS = 16, 2048


def difference(model, settings, runner=None):
    """How much larger the estimate is than what the rank holds that differs most, as a share; a
    text for a plan that cannot be measured.
    """
    sink = Sink()
    facts = load(model, sink)
    positions = facts.config.get("max_position_embeddings") or TOKENS
    batch = Batch(global_batch=ROWS, sequence=min(TOKENS, positions))
    compiled = compile_plan(facts, None, sink, world_size=8, settings=settings)
    request = Request(batch=batch, kernels=False)
    found = measure(compiled, request, sink, runner=runner) if compiled.applied else None
    if found is None:
        return "; ".join(f"{d.code} {d.message}" for d in sink if d.severity == "error")[:200]
    estimated = found.answer.estimate.ranks
    ratios = (estimated[rank.rank].peak / rank.peak - 1 for rank in found.counted.ranks)
    return max(ratios, key=abs)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("file", type=Path)
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    options = parser.parse_args()
    known = json.loads(options.file.read_text()) if options.file.exists() else {}
    end = time.monotonic() + options.seconds
    with RankRunner() as runner:
        for shape in options.shapes:
            for settings in MESHES:
                name = " ".join(settings) or "dp_shard=8"
                if name in known.get(shape, {}) or time.monotonic() > end:
                    continue
                begin = time.process_time()
                try:
                    found = difference(shape, settings, runner)
                except Exception as error:  # the file has why
                    found = f"{type(error).__name__}: {error}"[:200]
                known.setdefault(shape, {})[name] = found
                print(shape, name, found, f"{time.process_time() - begin:.1f} s", flush=True)
                options.file.write_text(json.dumps(known, indent=1))


if __name__ == "__main__":
    main()
