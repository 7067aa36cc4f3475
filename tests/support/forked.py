"""Python commands in forked children of a server that has imported torch and leandit before any test.

What a start imports, and a signal while it does, is tested with an interpreter.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from leandit.datasets.disk import files

# What most processes of tests import in any case, so that no child has to.
IMPORTED = (
    *("torch._dynamo", "torch._inductor", "torch.utils.tensorboard", "numpy.ma", "pyarrow.dataset"),
    *("transformers.models.t5.modeling_t5", "diffusers.models.autoencoders.autoencoder_kl"),
    "diffusers.models.transformers.pixart_transformer_2d",  # and peft
    *("leandit.precompute.pipeline", "leandit.precompute.unchanged", "leandit.tools.cli.commands"),
    *("leandit.tools.terminal.progress", "leandit.tools.sample.sample", "leandit.train.loop"),
)
MAX_REQUEST_BYTES = 1 << 17
MAX_FDS = 8  # its three files, its status, and those that it is passed
_server: tuple[socket.socket, int] | None = None  # and its process


def start_server() -> None:
    """Import and fork the server; it ends with this process, and kills its children then."""
    global _server
    for name in IMPORTED:
        importlib.import_module(name)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if pid := os.fork():
        its.close()
        _server = ours, pid
        return
    try:
        ours.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the children
        _serve(its)
    finally:
        os._exit(1)


def stop_server() -> None:
    """Kill its children and wait for its end."""
    if _server:
        _server[0].close()
        os.waitpid(_server[1], 0)


class ForkedPython(subprocess.Popen[Any]):
    """``Popen`` of ``python -c CODE``, ``-m MODULE`` or ``FILE``, forked by the server; PYTHONPATH comes first."""

    def __init__(self, command: Sequence[object], **how: Any) -> None:
        self._reading = threading.Lock()
        super().__init__(list(map(str, command)), **{"text": True} | how)

    def _execute_child(self, *given: Any) -> None:
        """Let the server fork it: the files that ``Popen`` has made are its own."""
        args, _, _, _, pass_fds, cwd, env, *_, start_new_session, process_group = given
        ends = given[10:16]  # of stdin, stdout and stderr
        theirs = [number if end == -1 else end for number, end in enumerate((ends[0], ends[3], ends[5]))]
        self._status, status = os.pipe()
        weakref.finalize(self, os.close, self._status)  # not before: several threads may wait
        place = dict(os.environ if env is None else env), str(cwd or os.getcwd())
        request = json.dumps([args, *place, list(pass_fds), process_group, start_new_session]).encode()
        assert len(request) < MAX_REQUEST_BYTES, "more than a message of the server may hold"
        assert _server is not None
        socket.send_fds(_server[0], [request], [*theirs, status, *pass_fds])
        os.close(status)
        self._close_pipe_fds(*ends)  # pyright: ignore[reportAttributeAccessIssue]
        self.pid = int.from_bytes(os.read(self._status, 4), "little")
        self._child_created = True

    def _internal_poll(self, _deadstate: object = None) -> int | None:
        return self._wait(0, poll=True)

    def _wait(self, timeout: float | None, *, poll: bool = False) -> int | None:
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            if poll:
                return None
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        with self._reading:
            if self.returncode is None:
                status = os.read(self._status, 4)  # nothing where the server itself has ended
                code = os.waitstatus_to_exitcode(int.from_bytes(status, "little")) if status else -signal.SIGKILL
                self.returncode = code
            return self.returncode


def run_forked(
    command: Sequence[object], *, input: Any = None, timeout: float | None = None, check: bool = False, **how: Any
) -> subprocess.CompletedProcess[Any]:
    """As ``subprocess.run`` with captured output."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = ForkedPython(command, **pipes | how, **({} if input is None else {"stdin": subprocess.PIPE}))
    try:
        out, err = process.communicate(input, timeout)
    except BaseException:
        process.kill()
        raise
    ended = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        ended.check_returncode()
    return ended


SHRINK = """
import runpy, sys, pytest
from making import shrink_models
shrink_models(pytest.MonkeyPatch())
sys.argv[:2] = sys.argv[1:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def fork_interpreters(module: types.ModuleType, patch: pytest.MonkeyPatch, *, shrunk: bool = False) -> None:
    """Let a module that starts ``python -m`` by ``subprocess`` get forked ones, with the models of ``tiny_models``."""

    def words(command: list[str]) -> list[str]:
        executable, *_, option, name = command[: command.index("-m") + 2]
        assert executable == sys.executable
        rest = command[command.index("-m") + 2 :]
        return ["-c", SHRINK, name, *rest] if shrunk else [option, name, *rest]

    def run(command: list[str], *, capture_output: bool, **how: Any) -> subprocess.CompletedProcess[Any]:
        assert capture_output
        return run_forked(words(command), text=False, **how)

    def start(command: list[str], *, text: bool = False, **how: Any) -> ForkedPython:
        return ForkedPython(words(command), text=text, **how)

    like = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired")}
    patch.setattr(module, "subprocess", types.SimpleNamespace(Popen=start, run=run, **like))


def _serve(requests: socket.socket) -> None:
    """Fork a child for each request, and send its status when it ends."""
    gc.freeze()  # a child that collects garbage would copy every page
    running: dict[int, tuple[int, int]] = {}  # pidfd: pid and the pipe for its status
    with selectors.DefaultSelector() as ready:
        ready.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is requests:
                    message, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, MAX_FDS)
                    if not message:  # the tests have ended
                        for pid, _ in running.values():
                            os.kill(pid, signal.SIGKILL)
                            os.waitpid(pid, 0)
                        return
                    if not (pid := os.fork()):
                        _become(fds, *json.loads(message))
                    os.write(fds[3], pid.to_bytes(4, "little"))
                    pidfd = os.pidfd_open(pid)
                    running[pidfd] = pid, fds[3]
                    ready.register(pidfd, selectors.EVENT_READ)
                    for fd in (*fds[:3], *fds[4:]):
                        os.close(fd)
                else:
                    pid, pipe = running.pop(key.fd)
                    ready.unregister(key.fd)
                    os.close(key.fd)
                    os.write(pipe, os.waitpid(pid, 0)[1].to_bytes(4, "little"))
                    os.close(pipe)


def _become(
    fds: list[int],
    command: list[str],
    environment: dict[str, str],
    folder: str,
    passed: list[int],
    group: int,
    new_session: bool,
) -> NoReturn:
    """Be the process that was asked for, to its end."""
    faulthandler.disable()  # it holds a file of the parent
    _hold_only(dict(zip((0, 1, 2, *passed), fds[:3] + fds[4:], strict=True)))
    if new_session:
        os.setsid()
    elif group >= 0:
        os.setpgid(0, group)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry not in sys.path]
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        errors = "backslashreplace" if name == "stderr" else "strict"
        file = open(fd, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115 - as long as the process
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    # What was read from the parent's environment when it was imported.
    files.failpoint = files._failpoint_of_environment()
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    code = _exit_code(command)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _hold_only(files: dict[int, int]) -> None:
    """Have no files but these, each under the number that it shall have."""
    above = max(files) + 1
    copies = {number: fcntl.fcntl(file, fcntl.F_DUPFD, above) for number, file in files.items()}
    os.closerange(0, above)
    for number, copy in copies.items():
        os.dup2(copy, number)
    os.closerange(above, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _exit_code(command: list[str]) -> int:
    """Run the code as ``__main__``; the exit code of an interpreter."""
    try:
        if command[0] == "-c":
            sys.argv = ["-c", *command[2:]]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(command[1], "<string>", "exec"), main.__dict__)
        elif command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return 1 if isinstance(end.code, str) else (end.code or 0) & 0xFF
    except BaseException:  # noqa: BLE001 - as an interpreter does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


IN_TURN = """
import contextlib, io, json, sys
from leandit.tools.cli.main import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["leandit", *words]
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as end:
            loaded = [name for name in ("torch", "diffusers", "transformers") if name in sys.modules]
            print(json.dumps([end.code, err.getvalue(), loaded]))
"""
