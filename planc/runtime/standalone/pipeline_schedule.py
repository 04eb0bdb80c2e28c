"""Runs the schedule of a pipeline by `torch.distributed.pipelining`.

A stage tells the next one the shape of what it sends, once for each shape of a batch:
nothing is inferred in a pass of its own, and batches may have other lengths than the
one before.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import P2POp

from planc.compat.fsdp import FSDPModule
from planc.compat.pipelines import _PipelineStageBase, schedules
from planc.runtime.standalone.pipeline import Stages, local_of
from planc.runtime.standalone.pipeline_messages import HEADER, Message, laid_out, trains

OF_THE_LOSS = (
    *("labels", "targets", "target", "y", "label", "tgt"),
    *("shift_labels", "num_items_in_batch"),
)
"""Arguments of the last stage alone: without them a model computes no loss."""
OF_THE_TOWER = (
    *("pixel_values", "pixel_values_videos"),
    *("pixel_attention_mask", "pixel_mask"),
    *("image_position_ids", "video_position_ids", "mm_encoder_outputs"),
)
"""Arguments of the first stage alone: without them a model runs no tower, whose outputs
are in the hidden states that a later stage receives.
"""


class FileSchedule(schedules._PipelineScheduleRuntime):  # type: ignore[misc]
    """A plan's own passes of each rank; torch adds the sends and receives."""

    def __init__(self, stages: list[Any], count: int, **terms: Any) -> None:
        super().__init__(stages, count, **terms)
        rows = enumerate(stages[0].section.stages.rank_passes)
        action = schedules._Action.from_str
        self.pipeline_order = {i: [*map(action, row.split(","))] for i, row in rows}
        self._prepare_schedule_with_comms(self.pipeline_order)


SCHEDULES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipe_v": schedules.ScheduleDualPipeV,
    "timetable": FileSchedule,
    "timetable_v": FileSchedule,
}


class StageModule(nn.Module):  # type: ignore[misc]
    """One stage of this rank as `torch.distributed.pipelining` calls it."""

    def __init__(
        self, model: nn.Module, stages: Stages, number: int, mesh: DeviceMesh
    ) -> None:
        super().__init__()
        self.__dict__["model"] = model  # not a child: parameters keep their names
        self.stages, self.number, self.mesh = stages, number, mesh
        self.taken: Message | None = None
        self.sent: Message | None = None
        self.telling = True

    def parameters(self, recurse: bool = True) -> Any:
        return self.__dict__["model"].parameters(recurse)

    def forward(self, *tensors: Tensor, **kwargs: Any) -> Any:
        step, features = kwargs.pop("step"), self.stages.features
        received, values = self._unpack_received(tensors), self.stages.values
        if features is not None:
            received = features.split_received(received, self.number)
        if self.number < self.stages.count - 1:  # the loss is the last stage's
            kwargs = {
                name: value for name, value in kwargs.items() if name not in OF_THE_LOSS
            }
        if self.number:
            kwargs = {n: v for n, v in kwargs.items() if n not in OF_THE_TOWER}
        output = self.stages.run(self.__dict__["model"], self.number, received, kwargs)
        if self.number == self.stages.count - 1:
            loss: Tensor = step(output)
            return loss
        if features is not None:
            output = features.append_features(output)
        self.sent, sent = Message.describe(output, values.sent if values else None)
        return tuple(map(local_of, sent))

    def _unpack_received(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The hidden states that a stage receives; what came beside is kept."""
        values = self.stages.values
        if values is not None:
            values.received, values.sent = values.nothing(), values.nothing()
        if not tensors:
            return None
        assert self.taken is not None
        forms = zip(tensors, self.taken.forms, strict=True)
        whole = [laid_out(tensor, form, self.mesh) for tensor, form in forms]
        if values is not None:
            values.received = self.taken.extra_values(whole)
        return whole[0]


class RunningStage(_PipelineStageBase):  # type: ignore[misc]
    """A stage whose tensors are told by the stage that sends them."""

    def __init__(self, section: StageModule, device: torch.device, group: Any) -> None:
        stages = section.stages
        super().__init__(section, section.number, stages.count, device, group)
        self.section = section
        self.first_chunk = True
        self.beside: dict[int, RunningStage] = {}
        self.inbox: dict[int, Sequence[Tensor]] = {}
        self.gradients: dict[int, Sequence[Tensor]] = {}
        self._stage_meta.inputs = ()

    # torch prepares its own stages with shapes, which are not known yet

    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        return []

    def _prepare_forward_infra(
        self, num_microbatches: int, *_args: Any, **_kwargs: Any
    ) -> None:
        self.chunks = num_microbatches
        self.args_recv_info = {0: ()}

    def _prepare_backward_infra(self, num_microbatches: int, **_kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _create_grad_recv_info(self, *_args: Any, **_kwargs: Any) -> tuple[Any, ...]:
        return ()

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self.inbox.clear()
        self.gradients.clear()

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward_one_chunk(*args, **kwargs)
        except RuntimeError as error:  # torch's own, around the one of the model
            if not isinstance(error.__cause__, Exception):
                raise
            error.__cause__.add_note(f"in stage {self.stage_index} of the pipeline")
            raise error.__cause__ from None

    # activations

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        if self.is_first:
            return []
        peer = self._resolve_peer_global_rank(self.stage_index - 1)
        if self.first_chunk:
            self.section.taken = self.receive_description(peer)
            self.first_chunk = False
        buffer = self.received_form.empty(self.device)
        self.inbox[fwd_chunk_id] = self.received_form.parts(buffer)
        return [P2POp(distributed.irecv, buffer, peer, self.group)]

    def receive_description(self, peer: int) -> Message:
        """Receives the stage before's description of the tensors that it sends."""
        header = torch.zeros(HEADER, dtype=torch.uint8, device=self.device)
        distributed.recv(header, peer, group=self.group)
        return Message.read(header)

    @property
    def received_form(self) -> Message:
        """The form of what this stage receives."""
        assert self.section.taken is not None
        return self.section.taken

    @property
    def sent_form(self) -> Message:
        """The form of what this stage sends."""
        assert self.section.sent is not None
        return self.section.sent

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        wanted = self.has_backward and torch.is_grad_enabled()
        tensors = (*self.inbox.pop(fwd_chunk_id),)
        self._stage_meta.inputs = (None,) * len(tensors)  # which have gradients
        for tensor, form in zip(tensors, self.received_form.forms, strict=True):
            tensor.requires_grad_(wanted and trains(form))
        return tensors

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        if self.is_last:
            return []
        sent, _ = self.fwd_cache[fwd_chunk_id]
        peer = self._resolve_peer_global_rank(self.stage_index + 1)
        ops = []
        if self.section.telling:
            header = self.sent_form.header(self.device)
            ops.append(P2POp(distributed.isend, header, peer, self.group))
            self.section.telling = False
        packed = self.sent_form.pack(sent)
        return [*ops, P2POp(distributed.isend, packed, peer, self.group)]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self.inbox[mb_index] = [tensor.detach() for tensor in prev_stage_outputs]
        self.section.taken = self.beside[self.stage_index - 1].sent_form

    # gradients

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        if not self.has_backward or self.is_last:
            return []
        buffer = self.sent_form.gradients.empty(self.device)
        self.gradients[bwd_chunk_id] = self.sent_form.gradients.parts(buffer)
        peer = self._resolve_peer_global_rank(self.stage_index + 1)
        return [P2POp(distributed.irecv, buffer, peer, self.group)]

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        gradients = iter(self.gradients.pop(bwd_chunk_id))
        return tuple(
            next(gradients) if trains(form) else None for form in self.sent_form.forms
        )

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        if not self.has_backward or self.is_first:
            return []
        packed = self.received_form.gradients.pack(
            self.get_local_bwd_output(bwd_chunk_id)
        )
        peer = self._resolve_peer_global_rank(self.stage_index - 1)
        return [P2POp(distributed.isend, packed, peer, self.group)]

    def get_local_bwd_output(self, mb_index: int) -> Any:
        if not self.has_backward:
            return ()
        pairs = zip(self.bwd_cache.pop(mb_index), self.received_form.forms, strict=True)
        return self.received_form.gradients.fill_missing(
            [gradient for gradient, form in pairs if trains(form)], self.device
        )

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        self.gradients[mb_index] = next_stage_bwd_outputs


class Schedule:
    """The schedule of one rank.

    Args:
        model: with the `Stages` of this rank.
        stages: these.
        mesh: of all ranks.
    """

    def __init__(self, model: nn.Module, stages: Stages, mesh: DeviceMesh) -> None:
        self.stages = stages
        device = torch.device(mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        group = stages.mesh.get_group()
        sections = [StageModule(model, stages, n, mesh) for n in stages.own]
        self.parts = [RunningStage(section, device, group) for section in sections]
        for part in self.parts:
            part.beside = {other.stage_index: other for other in self.parts}
        if isinstance(model, FSDPModule):
            model._get_fsdp_state()._lazy_init()  # while every unit is in its place
        self.known: Any = None
        cls = SCHEDULES[stages.schedule]
        single = issubclass(cls, schedules.PipelineScheduleSingle)
        self.schedule = cls(
            self.parts[0] if single else self.parts,
            stages.microbatches,
            loss_fn=lambda loss, _target: loss,
            scale_grads=False,  # the loss is divided by all tokens of the step already
        )

    def step(
        self, inputs: Sequence[dict[str, Any]], loss: Any, *, trains: bool
    ) -> list[Tensor]:
        """Runs the microbatches of one batch.

        Args:
            inputs: the arguments of the model's forward, of each microbatch.
            loss: maps the output of the last stage and the number of a microbatch to
                its loss.
            trains: whether to run the backward passes.

        Returns:
            The loss of each microbatch on the ranks of the last stage, else nothing.
        """
        # equal on all stages: the last alone knows if its loss takes a number of tokens
        given = {n: v for n, v in inputs[0].items() if n not in OF_THE_LOSS}
        signature = (trains, [(n, getattr(v, "shape", None)) for n, v in given.items()])
        for part in self.parts:
            part.has_backward = trains
            part.clear_runtime_states()
            part.first_chunk = part.section.telling = signature != self.known
        self.known = signature
        self.schedule._has_backward = trains
        steps = [
            {**microbatch, "step": lambda output, i=i: loss(output, i)}
            for i, microbatch in enumerate(inputs)
        ]
        losses: list[Tensor] = []
        nothing = [None] * len(steps)
        try:
            self.schedule._step_microbatches(
                [()] * len(steps), steps, nothing, losses, False
            )
        except RuntimeError as error:  # such as of a peer that has ended
            error.add_note(self._place())
            raise
        return losses

    def _place(self) -> str:
        """Names the stages of this rank, and those that it exchanges tensors with."""
        stages = self.stages.own
        near = {n for s in stages for n in (s - 1, s + 1)} - {
            *stages,
            -1,
            self.stages.count,
        }
        others = ", ".join(map(str, sorted(near)))
        mine = ", ".join(map(str, stages))
        return f"in a step of stage {mine}, which exchanges tensors with stage {others}"
