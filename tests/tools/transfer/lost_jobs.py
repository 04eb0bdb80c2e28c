"""Processes of both sides of a transfer; one is killed or stopped in the second publish."""

import os
import time

import torch
from torch import distributed
from transfer_jobs import started

import planc
from planc.diagnostics.diagnostic import PlanError
from planc.runtime import transfer_messages

START, LIMIT = 120, 6
"""Seconds after which a process that does not answer counts as lost: until the first transfer is
complete, and then.
"""


def end_in_bucket(number, signal):
    """Sends this process a signal when it reaches a bucket of its next transfer."""
    send = transfer_messages._send

    def ending(channel, *messages):
        if channel.bucket_number == number:
            os.kill(os.getpid(), signal)
        send(channel, *messages)

    transfer_messages._send = ending


def failed(publish):
    """The error of a transfer, and the seconds until it was raised."""
    begin = time.monotonic()
    try:
        publish()
    except PlanError as error:
        return str(error), time.monotonic() - begin
    return "complete", time.monotonic() - begin


def train(rank, folder, config, sets, serve, address, ending, results):
    """A rank of the training run; `ending` is a bucket and a signal, or None."""
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank)}
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", rank=rank, world_size=2, store=store)
    run = started(config, sets)
    transfer = run.transfer(serve, address=address, bucket=8192, seconds=START)
    transfer.publish()
    transfer.channel.seconds = LIMIT
    if ending:
        end_in_bucket(*ending)
    text, seconds = failed(transfer.publish)
    results.put(("training run", rank, text, seconds, None))


def serve(rank, address, ending, results):
    """A rank of the engine."""
    torch.set_num_threads(1)
    engine = planc.join_transfer(address, rank=rank, seconds=START)
    engine.receive()
    engine.channel.seconds = LIMIT
    if ending:
        end_in_bucket(*ending)
    text, seconds = failed(engine.receive)
    marked, _ = failed(lambda: engine.tensors)
    results.put(("engine", rank, text, seconds, (engine.version, marked)))
