"""Versions: what the project needs, what is known to be bad, and what each optional package would give."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata

from optim_patches.audit.text import Text, same
from optim_patches.doctor.findings import ERROR, INFO, OK, WARNING, Finding

T = Text
Version = tuple[int, ...]
Versions = Mapping[str, Version]

#: Lowest versions the code is written for, as ``setup.py`` has them.
NEEDED: dict[str, str] = {
    "torch": "2.9",
    "numpy": "1.26",
    "safetensors": "0.5",
    "diffusers": "0.40",
    "transformers": "5.0",
    "accelerate": "1.12",
    "peft": "0.18",
    "av": "15",
    "pillow": "11",
    "omegaconf": "2.3",
    "tensorboard": "2.18",
    "matplotlib": "3.9",
    "rich": "13",
    "tqdm": "4.66",
    "fsspec": "2024.2",
}

#: Optional packages: what they give, how to get them, whether they need a CUDA device.
OPTIONAL: dict[str, tuple[Text, str, bool]] = {
    "liger-kernel": (T("--liger: fused Triton kernels", "--liger：融合 Triton 内核"), "pip install liger-kernel", True),
    "bitsandbytes": (T("--use_8bit_adam and --qlora", "--use_8bit_adam 与 --qlora"), "pip install bitsandbytes", False),
    "came-pytorch": (T("--use_came", "--use_came"), "pip install came-pytorch", False),
    "deepspeed": (
        T("ZeRO-1/2/3, CPU and NVMe offload", "ZeRO-1/2/3、CPU 与 NVMe 卸载"),
        "pip install deepspeed",
        False,
    ),
    "flash-attn": (
        T("attention 2 to 3 times as fast", "注意力快 2-3 倍"),
        "pip install flash-attn --no-build-isolation",
        True,
    ),
    "torchao": (T("--fp8 on Hopper and newer", "Hopper 及以上的 --fp8"), "pip install torchao", True),
    "nvidia-ml-py": (
        T("the device's idle time in the look back at a run", "训练回顾中的设备空闲时间"),
        "pip install nvidia-ml-py",
        True,
    ),
    "wandb": (T("--report_to wandb", "--report_to wandb"), "pip install wandb", False),
}


@dataclass(frozen=True)
class Known:
    """A combination of versions with a known fault."""

    id: str
    bad: Callable[[Versions], bool]
    state: str
    title: Text
    value: Text
    fix: Text
    source: str


def _below(package: str, *limit: int) -> Callable[[Versions], bool]:
    return lambda versions: package in versions and versions[package] < limit


def _conv3d_memory(versions: Versions) -> bool:
    cuda = "cudnn" in versions
    return cuda and (2, 9) <= versions.get("torch", (0,)) < (2, 10) and versions["cudnn"] < (9, 15)


KNOWN: tuple[Known, ...] = (
    Known(
        "conv3d-memory",
        _conv3d_memory,
        WARNING,
        T("torch 2.9 with cuDNN below 9.15", "torch 2.9 与低于 9.15 的 cuDNN"),
        T(
            "bf16 Conv3d takes several times the memory; every Wan VAE is made of it",
            "bf16 Conv3d 显存增至数倍；Wan VAE 由其构成",
        ),
        T(
            "pip install 'nvidia-cudnn-cu12>=9.15' with torch 2.9.1, or torch 2.10; --vae_tiling bounds it",
            "torch 2.9.1 搭配 pip install 'nvidia-cudnn-cu12>=9.15'，或 torch 2.10；--vae_tiling 可限制其显存",
        ),
        "https://github.com/pytorch/pytorch/issues/166643",
    ),
    Known(
        "conv3d-wrong",
        lambda v: (9, 8) <= v.get("cudnn", (0,)) < (9, 11) and v.get("torch", (9,)) < (2, 9),
        ERROR,
        T("cuDNN 9.8 to 9.10 before torch 2.9", "torch 2.9 之前的 cuDNN 9.8-9.10"),
        T("bf16 Conv3d can give wrong results on large inputs", "大输入的 bf16 Conv3d 可能结果错误"),
        T("torch 2.9.1 or newer", "升级到 torch 2.9.1 及以上"),
        "https://github.com/pytorch/pytorch/issues/163539",
    ),
    Known(
        "peft-transformers",
        lambda v: "transformers" in v and v.get("peft", (9,)) < (0, 18) and v["transformers"] >= (5,),
        ERROR,
        T("peft below 0.18 with transformers 5", "低于 0.18 的 peft 与 transformers 5"),
        T("the import of peft fails", "peft 导入失败"),
        T("pip install 'peft>=0.18'", "pip install 'peft>=0.18'"),
        "https://github.com/NKU-HLT/DIFFA/issues/6",
    ),
    Known(
        "torchao-diffusers",
        lambda v: v.get("torchao", (0,)) >= (0, 18) and v.get("diffusers", (9,)) < (0, 43),
        INFO,
        T("torchao 0.18 with diffusers 0.42", "torchao 0.18 与 diffusers 0.42"),
        T(
            "diffusers warns that it cannot import torchao's tensors; --fp8 is not concerned",
            "diffusers 提示无法导入 torchao 张量；不影响 --fp8",
        ),
        same(""),
        "tried with torchao 0.18.0 and diffusers 0.42.1",
    ),
)


def parse(text: str) -> Version:
    """``2.13.0+cpu`` as ``(2, 13, 0)``."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def installed_versions() -> dict[str, str]:
    """Versions of the packages of the two tables, without importing any."""
    found = {}
    for name in (*NEEDED, *OPTIONAL):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def look_at_packages(installed: Mapping[str, str], *, cudnn: int | None, cuda: bool) -> list[Finding]:
    """Needed versions, known faults, and what is missing.

    Args:
        installed: version by package.
        cudnn: as ``torch.backends.cudnn.version()`` counts, for example 91002.
        cuda: whether there is a CUDA device.
    """
    versions: dict[str, Version] = {name: parse(text) for name, text in installed.items()}
    if cudnn and cuda:
        versions["cudnn"] = (cudnn // 10000, cudnn // 100 % 100)
    return [*_needed(installed, versions), *_faults(versions), *_optional(installed, cuda=cuda)]


def _needed(installed: Mapping[str, str], versions: Versions) -> list[Finding]:
    found, fine = [], []
    for name, lowest in NEEDED.items():
        if name not in installed:
            found.append(
                Finding(
                    "packages",
                    name,
                    ERROR,
                    same(name),
                    T("is missing", "缺失"),
                    same(f"pip install '{name}>={lowest}'"),
                )
            )
        elif versions[name] < parse(lowest):
            found.append(
                Finding(
                    "packages", name, ERROR, same(name), same(installed[name]), same(f"pip install '{name}>={lowest}'")
                )
            )
        else:
            fine.append(f"{name} {installed[name]}")
    if fine:
        found.append(Finding("packages", "needed", OK, T("needed", "必需"), same(", ".join(fine))))
    return found


def _faults(versions: Versions) -> list[Finding]:
    return [
        Finding("packages", known.id, known.state, known.title, known.value, known.fix, known.source)
        for known in KNOWN
        if known.bad(versions)
    ]


def _optional(installed: Mapping[str, str], *, cuda: bool) -> list[Finding]:
    found = []
    for name, (gives, command, needs_cuda) in OPTIONAL.items():
        if name in installed:
            found.append(Finding("packages", name, OK, same(name), same(installed[name])))
        elif cuda or not needs_cuda:
            found.append(
                Finding(
                    "packages",
                    name,
                    INFO,
                    same(name),
                    T("not installed; it would give: {0}", "未安装；安装后可得：{0}").format(gives),
                    same(command),
                )
            )
    return found
