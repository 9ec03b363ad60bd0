"""SIGTERM and SIGUSR1 raise a flag; a second one ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from videox_fun.training.signals import EXIT_SAVED, SignalSaver


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_signal_is_remembered_and_handlers_are_given_back(name, caplog):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with SignalSaver() as saver:
        assert not saver.requested and saver.exit_code == 0
        os.kill(os.getpid(), number)
        assert saver.requested and saver.received == name and saver.agreed()
        assert saver.exit_code == EXIT_SAVED == 85
        with pytest.raises(SystemExit) as caught:
            os.kill(os.getpid(), number)
            signal.getsignal(number)  # a bytecode boundary, at which the handler runs
        assert caught.value.code == 128 + number
    assert signal.getsignal(number) == before
    assert f"{name} received" in caplog.text


def test_other_threads_install_nothing(caplog):
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=SignalSaver().install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before and "main thread" in caplog.text


TRAINER = """
import sys, time
from pathlib import Path
from videox_fun.training.signals import SignalSaver
with SignalSaver() as saver:
    Path(sys.argv[1]).write_text("started")
    for _ in range(600):
        if saver.requested:
            time.sleep(0.5)  # the save: the launcher's death comes meanwhile and is no second signal
            Path(sys.argv[1]).write_text(f"saved after {saver.received}")
            sys.exit(saver.exit_code)
        time.sleep(0.05)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.skipif(sys.platform != "linux", reason="a Linux call")
@pytest.mark.parametrize("whole_group", [False, True])
def test_the_launcher_dies_and_the_trainer_saves(whole_group, tmp_path, repo_root):
    note = tmp_path / "note"
    environment = {**os.environ, "PYTHONPATH": str(repo_root), "ACCELERATE_MIXED_PRECISION": "no"}
    launched = subprocess.Popen([sys.executable, "-c", LAUNCHER, TRAINER, str(note)], env=environment,
                                start_new_session=True)
    try:
        wait_for(note, "started")
        (os.killpg if whole_group else os.kill)(launched.pid, signal.SIGTERM)
        wait_for(note, "saved after SIGTERM")
        assert note.read_text() == "saved after SIGTERM"
    finally:
        launched.kill()
        launched.wait()


def wait_for(note, text):
    for _ in range(600):
        if note.exists() and note.read_text() == text:
            return
        time.sleep(0.1)
    raise AssertionError(f"{text!r} was not noted, but {note.read_text() if note.exists() else 'nothing'!r}")
