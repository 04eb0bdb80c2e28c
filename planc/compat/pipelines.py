"""Pipelines: schedules of a plan's own, and stages that tell each other shapes."""

from planc.compat.names import private_names, require

with private_names("torch"):
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    from torch.distributed.pipelining.stage import _PipelineStageBase

require("torch", schedules, "_Action", "_PipelineScheduleRuntime")

__all__ = ["_PipelineStageBase", "get_schedule_ops", "schedules"]
