"""Sound of a clip as one channel of floats, read and resampled by FFmpeg (through PyAV)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from videox_fun.data.decode import DecodeError
from videox_fun.data.storage import open_media


def read_audio(path: str | Path, *, rate: int, start: float = 0.0, seconds: float | None = None) -> np.ndarray:
    """Samples in -1..1 at ``rate`` per second, channels averaged, from ``start`` for ``seconds``.

    Raises ``DecodeError`` when the file has no sound or ends before the wanted part does.
    """
    import av

    parts: list[np.ndarray] = []
    with open_media(path) as handle:
        try:
            with av.open(handle, metadata_errors="ignore") as container:
                if not container.streams.audio:
                    raise DecodeError(f"{path}: no sound in this file")
                resampler = av.AudioResampler(format="fltp", rate=rate)
                for frame in container.decode(container.streams.audio[0]):
                    frame.pts = None
                    parts += [part.to_ndarray().mean(axis=0) for part in resampler.resample(frame)]
                parts += [part.to_ndarray().mean(axis=0) for part in resampler.resample(None)]
        except av.error.FFmpegError as error:
            raise DecodeError(f"{path}: the sound cannot be decoded ({error})") from error
    sound = np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)
    first = round(start * rate)
    last = len(sound) if seconds is None else first + round(seconds * rate)
    # Encoders round the length to whole packets: a tenth of a second may be missing at the end.
    if last - rate // 10 > len(sound):
        raise DecodeError(f"{path}: {len(sound) / rate:.2f} s of sound, {last / rate:.2f} s are needed")
    return np.pad(sound[first:last], (0, max(last - len(sound), 0)))
