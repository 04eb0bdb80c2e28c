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


class Longer(ParallelStyle):
    """Sums what a module returns, for a log; the second rank leaves out an element."""

    def _apply(self, module, device_mesh):
        from torch import distributed

        def hook(module, args, output):
            some = output.detach().flatten()[device_mesh.get_local_rank() :].clone()
            distributed.all_reduce(some, group=device_mesh.get_group())

        module.register_forward_hook(hook)
        return module


class First(ParallelStyle):
    """Sums what a module returns, for a log that the first rank alone writes."""

    def _apply(self, module, device_mesh):
        from torch import distributed

        def hook(module, args, output):
            if device_mesh.get_local_rank() == 0:
                distributed.all_reduce(output.detach().sum(), group=device_mesh.get_group())

        module.register_forward_hook(hook)
        return module
