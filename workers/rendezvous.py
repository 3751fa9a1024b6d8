"""The TCPStore through which pipeline stages or tensor-parallel ranks find each other for
torch.distributed."""

import secrets
import socket
from datetime import timedelta
from functools import partial

from torch._C._distributed_c10d import TCPStore

from deltafront.workers.messages.stages import Rendezvous

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_meet = partial(TCPStore, timeout=timedelta(seconds=120), wait_for_workers=False)


def host_store(address: str, processes: int) -> tuple[TCPStore, Rendezvous]:
    """Open the store on a free port of `address`. Only the first process calls this."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family)  # TCPStore would listen on all addresses
    port, handed_over = listening.getsockname()[1], listening.detach()
    store = _meet(address, port, processes, is_master=True, master_listen_fd=handed_over)
    return store, Rendezvous(address, port, secrets.token_bytes(16))


def join_store(rendezvous: Rendezvous, processes: int) -> TCPStore:
    return _meet(rendezvous.address, rendezvous.port, processes, is_master=False)
