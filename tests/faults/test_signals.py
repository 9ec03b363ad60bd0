"""SIGTERM and SIGUSR1 raise a flag; a second one ends the process."""

from __future__ import annotations

import os
import signal
import threading

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
