"""Nodes that are ranks: torchrun or mpirun has started the same program several times.

Rank 0 is the trainer. In all others the constructor of the collector is the node, and ends the process when the trainer
is done. They learn where to come, and the secret, from the store of torch that the ranks have in common.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from swath.collectors.distributed.launchers import Launched, Way
from swath.collectors.distributed.meeting import Invitation, Meeting
from swath.collectors.distributed.remote_config import DistributedConfig

NAMES = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
"""How torchrun, Open MPI and MPICH tell a process which rank it is, and of how many."""


def become(config: DistributedConfig) -> Way:
    """In rank 0, the meeting of its collector; in others, the node: then this does not return."""
    told = [(int(os.environ[rank]), int(os.environ[size])) for rank, size in NAMES if rank in os.environ]
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not told or not host or not port:
        raise RuntimeError(
            "launcher='torchrun' is for programs that torchrun has started, as in `torchrun --nproc-per-node 3 "
            "train.py`, or mpirun, with MASTER_ADDR and MASTER_PORT (of rank 0, and free) in the environment."
        )
    rank, ranks = told[0]
    if config.workers != ranks - 1:
        raise ValueError(f"Rank 0 is the trainer: {config.workers} nodes need {config.workers + 1} ranks, not {ranks}.")
    store = _store(host, int(port), rank, config.start_timeout_s)
    key = f"swath/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    if rank:
        try:
            address, at, secret = store.get(key).decode().split()
        except RuntimeError as error:
            raise TimeoutError(f"Rank 0 has made no collector within {config.start_timeout_s:g} s.") from error
        Invitation(address, int(at), bytes.fromhex(secret), rank - 1).accept()

    def begin(invitation: Invitation) -> Launched:
        if invitation.index == ranks - 2:  # all are expected
            store.set(key, f"{invitation.address} {invitation.port} {invitation.secret.hex()}")
        return Launched(lambda: f"rank {invitation.index + 1}, which must come to the constructor of this collector")

    return Meeting(config.address or host, int(config.tcp_port or 0)), begin, lambda: None


def _store(host: str, port: int, rank: int, timeout_s: float) -> dist.TCPStore:
    """What the ranks have in common: torchrun has it, or rank 0."""
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        try:
            listener = socket.create_server((host, port))  # torch would listen at all addresses
        except OSError:  # the program has a store there already
            pass
        else:
            options |= {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return dist.TCPStore(host, port, **options)
