"""Kernels and libraries that must run, not just be installed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec

from optim_patches.audit.text import Text, same
from optim_patches.doctor.child import Answer, ask
from optim_patches.doctor.findings import ERROR, INFO, OK, WARNING, Finding
from optim_patches.doctor.machine import Torch

AT_ONCE = 2
T = Text


@dataclass(frozen=True)
class Trial:
    """One call that is tried.

    Attributes:
        words: trial and arguments for the child process.
        module: package that must be there, empty for none.
        gives: what it is good for.
        fits: whether a device of this capability can run it; CPUs have (0, 0).
        vital: its failure is an error, not a warning.
        slow: left out with ``--quick``.
        install: how to get the package.
    """

    id: str
    words: tuple[str, ...]
    title: Text
    gives: Text
    module: str = ""
    fits: Callable[[tuple[int, int]], bool] = lambda capability: True
    vital: bool = False
    slow: bool = False
    install: str = ""


def _from(major: int, minor: int = 0) -> Callable[[tuple[int, int]], bool]:
    return lambda capability: capability >= (major, minor)


TRIALS: tuple[Trial, ...] = (
    Trial(
        "sdpa",
        ("attention", "SDPA"),
        T("PyTorch SDPA, forward and backward", "PyTorch SDPA 前向与反向"),
        T("attention everywhere", "通用注意力"),
        vital=True,
    ),
    Trial(
        "flash_attn_2",
        ("attention", "FLASH_ATTENTION_2"),
        same("FlashAttention 2"),
        T("attention 2 to 3 times as fast as SDPA's fall-back", "注意力比 SDPA 兜底快 2-3 倍"),
        "flash_attn",
        _from(8),
        install="pip install flash-attn --no-build-isolation",
    ),
    Trial(
        "flash_attn_3",
        ("attention", "FLASH_ATTENTION_3"),
        same("FlashAttention 3"),
        T("the fastest attention on Hopper", "Hopper 上最快的注意力"),
        "flash_attn_interface",
        lambda capability: capability[0] == 9,
        install="build flash-attention/hopper",
    ),
    Trial(
        "flash_attn_4",
        ("attention", "FLASH_ATTENTION_4"),
        same("FlashAttention 4"),
        T("attention on Blackwell", "Blackwell 注意力"),
        "flash_attn.cute",
        lambda capability: capability[0] == 10,
        install="pip install flash-attn-4",
    ),
    Trial(
        "sage",
        ("attention", "SAGE_ATTENTION"),
        T("SageAttention, forward (it has no backward)", "SageAttention 前向（无反向）"),
        T("faster sampling; never training", "加速采样，不用于训练"),
        "sageattention",
        _from(8),
        install="pip install sageattention",
    ),
    Trial(
        "liger",
        ("liger",),
        T("Liger kernels", "Liger 内核"),
        T("--liger", "--liger"),
        "liger_kernel",
        _from(7),
        install="pip install liger-kernel",
    ),
    Trial(
        "adam_8bit",
        ("adam_8bit",),
        T("8-bit AdamW (bitsandbytes)", "8-bit AdamW（bitsandbytes）"),
        same("--use_8bit_adam"),
        "bitsandbytes",
        install="pip install bitsandbytes",
    ),
    Trial(
        "nf4",
        ("nf4",),
        T("4-bit layers (bitsandbytes)", "4-bit 层（bitsandbytes）"),
        same("--qlora"),
        "bitsandbytes",
        install="pip install bitsandbytes",
    ),
    Trial("came", ("came",), same("CAME"), same("--use_came"), "came_pytorch", install="pip install came-pytorch"),
    Trial("fp8", ("fp8",), T("FP8 matrix product", "FP8 矩阵乘"), same("--fp8"), "", _from(8, 9)),
    Trial("compile", ("compile",), same("torch.compile"), same("--compile"), slow=True),
)


def try_kernels(torch: Torch, *, quick: bool, timeout: float) -> list[Finding]:
    """Run the trials that this machine can run; the others say why not."""
    chosen = [trial for trial in TRIALS if _runs(trial, torch, quick=quick)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = dict(zip(chosen, pool.map(lambda trial: ask(*trial.words, timeout=timeout), chosen), strict=True))
    return [
        _finding(trial, torch, answers.get(trial)) for trial in TRIALS if trial in answers or not (quick and trial.slow)
    ]


def installed(module: str) -> bool:
    """Whether a package can be found, without importing it."""
    try:
        return not module or find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _runs(trial: Trial, torch: Torch, *, quick: bool) -> bool:
    return torch.works and installed(trial.module) and trial.fits(torch.capability) and not (quick and trial.slow)


def _finding(trial: Trial, torch: Torch, answer: Answer | None) -> Finding:
    if answer is None:
        return _not_run(trial, torch)
    if answer.ok:
        details = ", ".join(f"{key} {_short(value)}" for key, value in answer.data.items())
        return Finding("kernels", trial.id, OK, trial.title, T("ran ({0})", "已运行（{0}）").format(details))
    value = T("does not run: {0}", "无法运行：{0}").format(answer.problem)
    fix = T("without it you lose: {0}", "缺少它将失去：{0}").format(trial.gives)
    if trial.module:
        fix = (
            T("reinstall it for this torch ({0}): {1}; ", "请为当前 torch（{0}）重装：{1}；").format(
                torch.version, trial.install
            )
            + fix
        )
    return Finding("kernels", trial.id, ERROR if trial.vital else WARNING, trial.title, value, fix)


def _not_run(trial: Trial, torch: Torch) -> Finding:
    if not torch.works:
        return Finding(
            "kernels",
            trial.id,
            ERROR if trial.vital else INFO,
            trial.title,
            T("not tried, torch does not work", "未尝试，torch 不可用"),
        )
    if not trial.fits(torch.capability):
        why = (
            T("needs a CUDA device", "需要 CUDA 设备")
            if not torch.devices
            else T("not for this device", "不适用于该设备")
        )
        return Finding("kernels", trial.id, INFO, trial.title, why)
    return Finding(
        "kernels",
        trial.id,
        INFO,
        trial.title,
        T("not installed; it would give: {0}", "未安装；安装后可得：{0}").format(trial.gives),
        same(trial.install),
    )


def _short(value: object) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)
