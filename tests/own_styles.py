"""Styles of a plan's own, for tests: planc imports this file only where code is allowed."""

from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

imported = []


class Split(ParallelStyle):
    """torch's colwise, under a name that planc knows nothing of."""

    def __init__(self, *, gather=False, note="", sizes=None):
        from torch.distributed.tensor import Replicate

        imported.append((gather, note, sizes))
        layout = {"output_layouts": Replicate()} if gather else {}
        self.style = ColwiseParallel(**layout)

    def _apply(self, module, device_mesh):
        return self.style._apply(module, device_mesh)


class NoStyle:
    pass
