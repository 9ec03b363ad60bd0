"""System, devices, memory and disks."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optim_patches.audit.text import Text, same, size
from optim_patches.doctor.child import ask
from optim_patches.doctor.findings import ERROR, INFO, OK, WARNING, Finding

T = Text
GIB = 1 << 30
_SHM = Path("/dev/shm")
_SHM_NEEDED = 2 * GIB
_DISK_NEEDED, _DISK_LEAST = 50 * GIB, 2 * GIB
_SLOW_DISK = 100e6  # bytes per second; a batch of decoded clips and a 14B state are then noticeable waits
_TEST_BYTES = 64 << 20
_OLD_LINUX = (5, 5)
#: Lowest driver of each CUDA major version.
DRIVERS = {11: 450, 12: 525, 13: 580}
DRIVER_SOURCE = "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"
KERNEL_SOURCE = "accelerate, utils/other.py (check_os_kernel)"


@dataclass(frozen=True)
class Torch:
    """What torch says about itself, asked in a process of its own."""

    works: bool
    problem: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> str:
        return str(self.data.get("torch", ""))

    @property
    def devices(self) -> list[dict[str, Any]]:
        return list(self.data.get("devices", ()))

    @property
    def capability(self) -> tuple[int, int]:
        """Of the weakest device; (0, 0) without one."""
        found = [tuple(device["capability"]) for device in self.devices]
        return min(found, default=(0, 0))


def ask_torch(*, timeout: float) -> Torch:
    """Import torch elsewhere and look at it."""
    answer = ask("torch", timeout=timeout)
    return Torch(answer.ok, answer.problem, answer.data)


def look_at_machine(torch: Torch, *, timeout: float) -> list[Finding]:
    """Python, system, torch, devices, memory."""
    found = [_python(), *_kernel(), _torch(torch)]
    if torch.works:
        found += [*_devices(torch), *_driver(torch)]
    found += [_compiler(), *_memory(), *_shared_memory()]
    if torch.devices:
        found.append(_pinned(timeout=timeout))
    return found


def _python() -> Finding:
    version = platform.python_version_tuple()
    number = (int(version[0]), int(version[1]))
    state = ERROR if number < (3, 10) else INFO if number > (3, 13) else OK
    fix = T("3.10 to 3.13 are supported", "支持 3.10 至 3.13") if state != OK else same("")
    return Finding(
        "machine", "python", state, same("Python"), same(f"{platform.python_version()}, {platform.system()}"), fix
    )


def _kernel() -> list[Finding]:
    if platform.system() != "Linux":
        return []
    try:
        major, minor = (int(part) for part in platform.release().split(".")[:2])
    except ValueError:
        return []
    if (major, minor) >= _OLD_LINUX:
        return []
    return [
        Finding(
            "machine",
            "kernel",
            WARNING,
            T("Linux kernel", "Linux 内核"),
            same(platform.release()),
            T("below 5.5 processes may hang; update the kernel", "低于 5.5 可能挂起，请升级内核"),
            KERNEL_SOURCE,
        )
    ]


def _torch(torch: Torch) -> Finding:
    if not torch.works:
        return Finding(
            "machine",
            "torch",
            ERROR,
            same("torch"),
            T("cannot be used: {0}", "不可用：{0}").format(torch.problem),
            T("install it anew: pip install -c constraints.txt torch", "请重装：pip install -c constraints.txt torch"),
        )
    built = torch.data.get("cuda")
    return Finding(
        "machine",
        "torch",
        OK,
        same("torch"),
        same(torch.version)
        + (
            same(f", CUDA {built}, cuDNN {torch.data.get('cudnn')}")
            if built
            else T(", built without CUDA", "，不含 CUDA")
        ),
    )


def _devices(torch: Torch) -> list[Finding]:
    found = []
    for number, device in enumerate(torch.devices):
        major, minor = device["capability"]
        text = f"{device['name']}, {size(device['bytes'])}, compute capability {major}.{minor}"
        busy = device["bytes"] - device["free"]
        state = WARNING if busy > device["bytes"] / 10 else OK
        fix = T(f"{size(busy)} are in use by others", f"已被占用 {size(busy)}") if state == WARNING else same("")
        if (major, minor) < (8, 0):
            fix += T(" no bf16: use --mixed_precision fp16", " 不支持 bf16：请用 --mixed_precision fp16")
            state = WARNING
        found.append(Finding("machine", f"gpu{number}", state, same(f"GPU {number}"), same(text), fix))
    if len({device["name"] for device in torch.devices}) > 1:
        found.append(
            Finding(
                "machine",
                "mixed_gpus",
                WARNING,
                T("GPUs", "GPU"),
                T("they differ", "型号不一致"),
                T(
                    "the slowest sets the pace; choose with CUDA_VISIBLE_DEVICES",
                    "最慢者决定速度；用 CUDA_VISIBLE_DEVICES 选择",
                ),
            )
        )
    return found


def _driver(torch: Torch) -> list[Finding]:
    """Whether the driver can serve the CUDA that torch was built with."""
    driver, built = driver_version(), torch.data.get("cuda")
    if driver is None:
        if torch.devices:
            return []
        why = T("none: training runs on the CPU", "无：训练将在 CPU 上运行")
        return [Finding("machine", "gpu", INFO, same("GPU"), why)]
    if not built:
        return [
            Finding(
                "machine",
                "driver",
                ERROR,
                T("driver", "驱动"),
                same(driver),
                T(
                    "there is a GPU, but this torch was built without CUDA: install a CUDA build",
                    "有 GPU，但该 torch 不含 CUDA：请安装 CUDA 版",
                ),
            )
        ]
    needed = DRIVERS.get(int(str(built).split(".")[0]), 0)
    old = int(driver.split(".")[0]) < needed
    if not old and torch.devices:
        return [Finding("machine", "driver", OK, T("driver", "驱动"), same(driver))]
    reason = T(f"CUDA {built} needs driver {needed} or newer", f"CUDA {built} 需要驱动 {needed} 及以上")
    if not old:
        reason = T(
            "the driver answers, but torch sees no device: is CUDA_VISIBLE_DEVICES empty, is /dev/nvidia* readable?",
            "驱动可用，但 torch 看不到设备：请检查 CUDA_VISIBLE_DEVICES 与 /dev/nvidia* 权限",
        )
    return [
        Finding("machine", "driver", ERROR, T("driver", "驱动"), same(driver), reason, DRIVER_SOURCE if old else "")
    ]


def driver_version() -> str | None:
    """The NVIDIA driver's version, ``None`` where there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    first = done.stdout.strip().splitlines()[:1]
    return first[0].strip() if done.returncode == 0 and first and first[0][:1].isdigit() else None


def _compiler() -> Finding:
    title = T("C++ compiler for --compile", "--compile 所需 C++ 编译器")
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl"]
    program = next((found for name in names if name and (found := shutil.which(name))), None)
    if program is not None:
        return Finding("machine", "compiler", OK, title, same(program))
    return Finding(
        "machine",
        "compiler",
        WARNING,
        title,
        T("none found", "未找到"),
        T("install one, for example: apt-get install g++", "请安装，例如：apt-get install g++"),
    )


def _memory() -> list[Finding]:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if ":" in line}
        free, total = values["MemAvailable"], values["MemTotal"]
    except (OSError, ValueError, KeyError, IndexError):
        return []
    limit = _container_limit()
    text = T(
        f"{size(free)} of {size(total)} free, {os.cpu_count()} cores",
        f"可用 {size(free)}/{size(total)}，{os.cpu_count()} 核",
    )
    if limit is not None and limit < total:
        text += T(f"; this container may use {size(limit)}", f"；容器上限 {size(limit)}")
    return [
        Finding(
            "machine",
            "memory",
            WARNING if free < 8 * GIB else OK,
            T("host memory", "主机内存"),
            text,
            T("loading weights and ZeRO offload need host memory", "加载权重与 ZeRO 卸载需要主机内存")
            if free < 8 * GIB
            else same(""),
        )
    ]


def _container_limit() -> int | None:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    return None


def _shared_memory() -> list[Finding]:
    if not _SHM.is_dir():
        return []
    usage = shutil.disk_usage(_SHM)
    state = WARNING if usage.total < _SHM_NEEDED else OK
    fix = T(
        "loader workers hand over batches there: start the container with --shm-size=16g or --ipc=host, "
        "or use --dataloader_num_workers 0",
        "加载进程通过它传递批次：请以 --shm-size=16g 或 --ipc=host 启动容器，或用 --dataloader_num_workers 0",
    )
    text = T(f"{size(usage.free)} of {size(usage.total)} free", f"可用 {size(usage.free)}/{size(usage.total)}")
    return [
        Finding("machine", "shm", state, T("shared memory", "共享内存"), text, fix if state == WARNING else same(""))
    ]


def _pinned(*, timeout: float) -> Finding:
    title = T("pinned memory", "锁页内存")
    answer = ask("pinned", timeout=timeout)
    if not answer.ok:
        return Finding(
            "machine",
            "pinned",
            WARNING,
            title,
            T("fails: {0}", "失败：{0}").format(answer.problem),
            T(
                "offloading will be slow; raise the limit of locked memory (ulimit -l)",
                "卸载会变慢；请提高锁定内存上限（ulimit -l）",
            ),
        )
    rate = float(answer.data.get("gb_per_s", 0))
    slow = rate < 8
    return Finding(
        "machine",
        "pinned",
        WARNING if slow else OK,
        title,
        T(f"{rate:.1f} GB/s to the device", f"到设备 {rate:.1f} GB/s"),
        T("below PCIe 3.0 x16: offloading costs time", "低于 PCIe 3.0 x16：卸载代价高") if slow else same(""),
    )


def look_at_storage(folders: dict[str, str]) -> list[Finding]:
    """Space and speed of folders, by the flag that names them."""
    return [finding for flag, folder in folders.items() for finding in _folder(flag, Path(folder))]


def _folder(flag: str, folder: Path) -> list[Finding]:
    title = T(f"{flag} {folder}", f"{flag} {folder}")
    place = next((p for p in (folder, *folder.absolute().parents) if p.is_dir()), None)
    if place is None or (folder.exists() and not folder.is_dir()):
        return [Finding("storage", flag, ERROR, title, T("is no folder", "不是文件夹"))]
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return [Finding("storage", flag, ERROR, title, same(str(error.strerror)))]
    state = ERROR if free < _DISK_LEAST else WARNING if free < _DISK_NEEDED else OK
    text = T(f"{size(free)} free", f"可用 {size(free)}")
    fix = (
        T(
            "a 14B state takes about 28 GB per copy; see --checkpoints_total_limit",
            "14B 状态每份约 28 GB；见 --checkpoints_total_limit",
        )
        if state != OK
        else same("")
    )
    speeds = disk_speed(place, room=free)
    if isinstance(speeds, str):
        return [
            Finding("storage", flag, ERROR, title, text + T(f"; cannot be written: {speeds}", f"；不可写：{speeds}"))
        ]
    if speeds is not None:
        text += T(f", writes {speeds / 1e6:.0f} MB/s", f"，写入 {speeds / 1e6:.0f} MB/s")
        if speeds < _SLOW_DISK and state == OK:
            state, fix = WARNING, T("slow: checkpoints will stop training for a while", "较慢：保存检查点会阻塞训练")
    return [Finding("storage", flag, state, title, text, fix)]


def disk_speed(folder: Path, *, room: int, number: int = _TEST_BYTES) -> float | str | None:
    """Bytes per second that reach the disk, why they cannot, or ``None`` where there is no room to try."""
    if room < 4 * number:
        return None
    block = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            start = time.perf_counter()
            for _ in range(number >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return number / max(time.perf_counter() - start, 1e-9)
    except OSError as error:
        return str(error.strerror)
