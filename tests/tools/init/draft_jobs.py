"""What test_drafts runs on every rank."""

import os
from unittest import mock

import numerics
import torch
from safeguard_jobs import logged, rank
from torch import distributed

import planc

FP32 = ["param_dtype=fp32", "reduce_dtype=fp32"]
MODEL = dict(model_type="vaultgemma", head_dim=16, query_pre_attn_scalar=16, **numerics.COMMON)


def without_a_plan(tp, folders=None):
    """The digest, the relative error of a loss, the log, and what is raised.

    Args:
        folders: `PLANC_PATH` of the ranks that have one, by their number as a text.
    """
    folders = folders or {}
    model = numerics.build_values(MODEL)
    tokens = torch.arange(32).reshape(2, 16) % 128
    expected = float(model(input_ids=tokens, labels=tokens).loss.detach())
    own = {"PLANC_PATH": folders[str(rank())]} if str(rank()) in folders else {}
    with mock.patch.dict(os.environ, own), logged() as lines:
        try:
            run = planc.apply(model, overrides=[f"tp={tp}", *FP32])
        except planc.PlanError as error:
            distributed.barrier()  # the group is as good as before
            return "", 0.0, lines, str(error)
    loss = float(run.model(input_ids=tokens, labels=tokens).loss.detach())
    return run.digest, abs(loss - expected) / expected, lines, ""
