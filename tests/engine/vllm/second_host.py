"""A second host of an engine, which has the last half of its ranks: vLLM's own process there (as
`vllm serve --headless` begins it), under another host's name."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from pathlib import Path
from typing import Any

from tests.support.servers import free_port

NEW_NAME, NEW_USER = 0x04000000, 0x10000000
"""CLONE_NEWUTS and CLONE_NEWUSER of Linux."""
END_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""


def join(engine: dict[str, Any]) -> dict[str, Any]:
    """Begin the second host of an engine with these settings, in a process that ends with this one;
    the settings of the first."""
    hosts = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port()}
    cores = os.environ["VLLM_CPU_OMP_THREADS_BIND"].split("|")
    here = len(cores) // 2
    # Else each looks up its host's name, and no server of names knows the second's.
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    if os.fork() == 0:
        serve({**engine, **hosts, "node_rank": 1}, cores[here:])
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(cores[:here])
    return {**engine, **hosts, "node_rank": 0}


def serve(engine: dict[str, Any], cores: list[str]) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(END_WITH_PARENT, signal.SIGKILL)
    user = os.getuid()
    if libc.unshare(NEW_NAME | (NEW_USER if user else 0)):
        raise OSError(ctypes.get_errno(), "no host of another name can be had")
    if user:
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    socket.sethostname("second")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(cores)
    config = AsyncEngineArgs(**engine).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)
    os._exit(0)
