"""Whose lines a message shows does not depend on how folders around a library are called."""

import torch

import planc
from planc.proxy.stack_frames import of_torch_or_planc


def test_files_are_known_by_their_folders():
    assert of_torch_or_planc(planc.__file__)
    assert of_torch_or_planc(torch.nn.functional.__file__)
    for path in (
        "/home/me/planc/.venv/lib/python3.11/site-packages/transformers/models/llama/modeling.py",
        "/home/me/torch/model.py",
        "<string>",
    ):
        assert not of_torch_or_planc(path)
