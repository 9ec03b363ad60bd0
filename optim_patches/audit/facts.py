"""What the checks ask about a run: family, size, mode, method, hardware, precision, distribution, data, shape.

Built once per launch, from a command line (static audit) or from parsed arguments (live audit). Everything that cannot
be told is None, and checks treat None as "not known", never as "no".
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from optim_patches.audit.configs import Distribution, apply_deepspeed, read_accelerate, read_distribution
from optim_patches.audit.families import FAMILIES, Family, block_classes, heads, size_from_config, size_from_name
from optim_patches.audit.flagtable import known_flags, upstream_flags
from optim_patches.audit.hardware import Gpu
from optim_patches.audit.launch import Launch, Options
from optim_patches.audit.metadata import DataFacts, read_data
from optim_patches.audit.project import CodeFacts, ConfigFile, Project

PACKAGES = ("flash_attn", "flash_attn_interface", "sageattention", "bitsandbytes", "came_pytorch", "liger_kernel",
            "triton", "deepspeed", "torchao", "peft")  # fmt: skip
GOALS = ("balanced", "memory", "speed", "quality")
#: GB of device memory: the checklist's table (49 frames, 512 pixels, bf16, one sample), by method and size.
MEMORY_TABLE: dict[str, dict[float, float]] = {
    "full": {1.3: 24, 5.0: 60, 14.0: 160},
    "lora": {1.3: 12, 5.0: 24, 14.0: 48},
    "lora_zero2": {1.3: 10, 5.0: 18, 14.0: 35},
    "full_fsdp": {1.3: 8, 5.0: 16, 14.0: 40},
    "full_offload": {1.3: 16, 5.0: 40, 14.0: 48},
}


@dataclass
class Facts:
    """Everything the checks may ask. See the properties for what is derived.

    Attributes:
        packages: importable optional packages, None when the training machine is another one.
        target: whose scripts will run: ``own`` or ``upstream`` (whose parsers lack this project's flags).
        goal: what the user wants most, one of ``GOALS``.
        host_ram: GB of host memory, None when unknown.
    """

    launch: Launch
    distribution: Distribution = field(default_factory=Distribution)
    gpu: Gpu | None = None
    gpu_count: int | None = None
    data: DataFacts | None = None
    code: CodeFacts | None = None
    packages: frozenset[str] | None = None
    requirements: frozenset[str] = frozenset()
    model_config: dict[str, object] | None = None
    model_keys: frozenset[str] | None = None
    target: str = "own"
    goal: str = "balanced"
    host_ram: float | None = None

    # -- what is trained --------------------------------------------------------------------------------------------
    @property
    def options(self) -> Options:
        return self.launch.options

    @property
    def script_id(self) -> str:
        return self.launch.script_id

    @property
    def family(self) -> Family | None:
        return FAMILIES.get(self.script_id.split("/")[0])

    @property
    def model_name(self) -> str:
        option = self.options.get("pretrained_model_name_or_path")
        return option.values[-1].rstrip("/") if option and option.values else ""

    @property
    def params(self) -> float | None:
        """Billions of parameters: from the checkpoint's config.json, its name, else the family's usual size."""
        named = size_from_name(self.model_name.rsplit("/", 1)[-1]) or size_from_name(self.model_name)
        if self.model_config is not None:
            named = size_from_config(self.model_config) or named
        if named is not None:
            return named
        return self.family.params if self.family else None

    @property
    def size_known(self) -> bool:
        return self.model_config is not None or size_from_name(self.model_name) is not None

    @property
    def training(self) -> bool:
        return self.launch.kind == "train"

    @property
    def task(self) -> str:
        """``plain``, ``control``, ``reward``, ``distill``, ``s2v``, ``animate``, ``avatar`` or ``edit``."""
        name = self.script_id.rsplit("/", 1)[-1]
        tasks = ("reward", "distill", "control", "s2v", "animate", "avatar", "edit")
        return next((task for task in tasks if task in name), "plain")

    @property
    def lora(self) -> bool:
        return self.training and self.script_id.endswith("_lora")

    @property
    def full(self) -> bool:
        return self.training and not self.lora

    @property
    def peft(self) -> bool:
        return self.lora and self.options.on("use_peft_lora")

    @property
    def mode(self) -> str:
        return self.options.text("train_mode") or "normal"

    @property
    def image_conditioned(self) -> bool:
        """Whether an encoder run for a condition is added to each step (inpaint, image to video, control)."""
        return self.mode not in ("normal", "") or self.task in ("control", "s2v", "animate", "avatar") or (
            "vace" in self.script_id
        )

    @property
    def still(self) -> bool:
        """A family of still images."""
        return self.family is not None and self.family.image

    @property
    def big(self) -> bool:
        return self.params is not None and self.params >= 10

    @property
    def blocks(self) -> tuple[str, ...]:
        return block_classes(self.script_id, self.family)

    @property
    def heads(self) -> int | None:
        return heads(self.family, self.params)

    # -- hardware and distribution ----------------------------------------------------------------------------------
    @property
    def cpu(self) -> bool:
        return self.distribution.cpu or (self.gpu is not None and self.gpu.is_cpu)

    def capability(self, major: int, minor: int = 0) -> bool | None:
        """Whether the card has at least this compute capability; None when the card is not known."""
        if self.cpu:
            return False
        if self.gpu is None or self.gpu.capability is None:
            return None
        return self.gpu.capability >= (major, minor)

    @property
    def hopper(self) -> bool | None:
        if self.cpu:
            return False
        return None if self.gpu is None or self.gpu.capability is None else self.gpu.capability[0] == 9

    @property
    def memory(self) -> float | None:
        return self.gpu.memory if self.gpu is not None else None

    @property
    def world(self) -> int | None:
        """Processes of the run; None when it could not be told."""
        if self.distribution.processes:
            return self.distribution.processes
        visible = self.launch.environment.get("CUDA_VISIBLE_DEVICES", "")
        if visible and all(part.strip().isdigit() for part in visible.split(",")):
            return len(visible.split(",")) * self.distribution.machines
        if self.gpu_count:
            return self.gpu_count
        return 1 if self.launch.launcher == "python" or self.cpu else None

    @property
    def several(self) -> bool:
        return (self.world or 1) > 1

    @property
    def nodes(self) -> int:
        return self.distribution.machines

    @property
    def zero(self) -> int:
        """ZeRO stage, 0 without DeepSpeed."""
        return (self.distribution.stage or 0) if self.distribution.kind == "deepspeed" else 0

    @property
    def fsdp(self) -> bool:
        return self.distribution.kind == "fsdp"

    @property
    def sharded(self) -> bool:
        return self.zero == 3 or self.fsdp

    @property
    def precision(self) -> str | None:
        """The script's flag, else the launcher's; ``no`` when neither is given."""
        script = self.options.text("mixed_precision")
        if script is not None or self.options.given("mixed_precision"):
            return script
        return self.distribution.precision or "no"

    # -- shape of the work ------------------------------------------------------------------------------------------
    @property
    def size(self) -> int:
        """Pixels: the largest of the sizes that apply."""
        if self.task == "reward":
            return max(self.options.integer(f"train_sample_{side}") or 0 for side in ("height", "width"))
        names = ("image_sample_size",) if self.still else ("video_sample_size",)
        fixed = [int(v) for v in self.options.values("fix_sample_size") if v.isdigit()]
        return max([self.options.integer(name) or 512 for name in names] + fixed)

    @property
    def frames(self) -> int:
        if self.still:
            return 1
        name = "video_length" if self.task == "reward" else "video_sample_n_frames"
        return self.options.integer(name) or 17

    @property
    def tokens(self) -> int:
        """Tokens of one sample at the nominal size."""
        quantum = 32 if self.params == 5.0 and self.script_id.startswith("wan2.2") else 16
        if self.family is not None:
            quantum = max(quantum, self.family.quantum)
        return ((self.frames - 1) // 4 + 1) * (self.size // quantum) ** 2

    @property
    def batch(self) -> int:
        return self.options.integer("train_batch_size") or 16

    @property
    def accumulation(self) -> int:
        return self.options.integer("gradient_accumulation_steps") or 1

    @property
    def global_batch(self) -> int:
        return self.batch * self.accumulation * (self.world or 1)

    @property
    def workers(self) -> int:
        return self.options.integer("dataloader_num_workers") or 0

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run, None when the number of rows is not known."""
        limit = self.options.integer("max_train_steps")
        if limit is not None:
            return limit
        if self.data is None or not self.data.rows:
            return None
        epochs = self.options.integer("num_train_epochs") or 100
        return epochs * max(1, math.ceil(self.data.rows / self.global_batch))

    @property
    def short(self) -> bool:
        """Too short for one-time costs such as compilation to pay off."""
        return self.steps is not None and self.steps <= 200

    @property
    def random_sizes(self) -> bool:
        names = ("random_hw_adapt", "random_ratio_crop", "training_with_video_token_length", "random_frame_crop")
        return any(self.options.on(name) for name in names)

    @property
    def fixed_shape(self) -> bool:
        """All batches have one shape: no random sizes, and one size asked for or plain square crops."""
        return not self.random_sizes and (self.options.given("fix_sample_size") or not self.options.on("enable_bucket"))

    @property
    def cached(self) -> bool:
        return self.options.on("cache_latents") or self.calls("ImageVideoSafetensorsDataset")

    @property
    def text_cached(self) -> bool:
        return self.options.on("cache_text") or self.calls("ImageVideoSafetensorsDataset")

    @property
    def seen_once(self) -> bool:
        """Every sample is read at most once, so that a cache saves nothing."""
        if self.data is None or not self.data.rows or self.steps is None:
            return False
        return self.steps * self.global_batch <= self.data.rows

    # -- memory -----------------------------------------------------------------------------------------------------
    @property
    def memory_guess(self) -> float | None:
        """GB per device by the checklist's table, scaled by frames and area. The planner computes; this only sorts."""
        if self.params is None:
            return None
        if self.full:
            row = "full_offload" if self.distribution.offload else "full_fsdp" if self.sharded else "full"
        else:
            row = "lora_zero2" if self.zero >= 2 else "lora"
        table = MEMORY_TABLE[row]
        nearest = min(table, key=lambda size: abs(size - self.params))
        weights = min(2 * self.params, 0.7 * table[nearest])
        activations = table[nearest] * self.params / nearest - weights
        scale = max(self.frames, 1) / 49 * (self.size / 512) ** 2
        return weights + max(activations, 2.0) * scale

    @property
    def tight(self) -> bool:
        """Memory is short: a small card, or less than a quarter to spare by the table."""
        if self.goal == "memory":
            return True
        if self.memory is None:
            return self.big and self.full
        guess = self.memory_guess
        return self.memory <= 24 or (guess is not None and self.memory < 1.25 * guess)

    # -- what is there ----------------------------------------------------------------------------------------------
    def has(self, package: str) -> bool | None:
        """Whether a package can be imported where the training runs; None when that machine was not looked at."""
        if package.replace("_", "-") in self.requirements or package in self.requirements:
            return True
        return None if self.packages is None else package in self.packages

    def accepts(self, flag: str) -> bool:
        """Whether the script that will run takes a flag."""
        if self.target == "own":
            return flag in known_flags(self.script_id)
        return flag in upstream_flags(self.script_id)

    def calls(self, *names: str) -> bool:
        """Whether the script's own code calls one of the names (``torch.compile``, ``apply_checkpointing``)."""
        if self.code is None:
            return False
        return any(call == name or call.endswith("." + name) for call in self.code.calls for name in names)

    @property
    def attention(self) -> str:
        """``VIDEOX_ATTENTION_TYPE`` as set for the launch."""
        return self.launch.environment.get("VIDEOX_ATTENTION_TYPE", "").upper()

    @property
    def flash(self) -> bool | None:
        """Whether a FlashAttention package is there; None when unknown."""
        found = [self.has("flash_attn"), self.has("flash_attn_interface")]
        return True if True in found else None if None in found else False


def installed_packages() -> frozenset[str]:
    """Which of the optional packages this interpreter can find; nothing is imported."""
    return frozenset(name for name in PACKAGES if importlib.util.find_spec(name) is not None)


@dataclass(frozen=True)
class Surroundings:
    """What the user says about the machine, or what was detected. See :class:`Facts`."""

    gpu: Gpu | None = None
    gpu_count: int | None = None
    packages: frozenset[str] | None = None
    target: str = "auto"
    goal: str = "balanced"
    host_ram: float | None = None


def facts_from_launch(launch: Launch, project: Project, around: Surroundings) -> Facts:
    """Facts of a launch found in a text; files it names are read where they are within reach."""

    def read(name: str) -> str | None:
        return project.read(name, near=launch.path)

    distribution = read_distribution(launch.launcher, launch.launcher_options, launch.options, read)
    target = around.target
    if target == "auto":
        target = "upstream" if project.scripts_found and not project.own else "own"
    facts = Facts(
        launch,
        distribution,
        gpu=around.gpu,
        gpu_count=around.gpu_count,
        code=project.code(launch.script, near=launch.path) if launch.script else None,
        packages=around.packages,
        requirements=frozenset(project.requirements),
        target=target,
        goal=around.goal,
        host_ram=around.host_ram,
    )
    _read_inputs(facts, project)
    return facts


def facts_from_config(config: ConfigFile, around: Surroundings) -> Facts:
    """Facts of a DeepSpeed or accelerate file given alone."""
    launch = Launch(path=config.path)
    distribution = Distribution()
    if config.kind == "deepspeed":
        apply_deepspeed(config.data, distribution)
    else:
        distribution = read_accelerate(config.data)
    return Facts(launch, distribution, gpu=around.gpu, gpu_count=around.gpu_count, goal=around.goal,
                 target="own" if around.target == "auto" else around.target)  # fmt: skip


def facts_from_namespace(
    args: argparse.Namespace,
    *,
    script_id: str,
    explicit: Iterable[str],
    distribution: Distribution | None = None,
    gpu: Gpu | None = None,
    world: int = 1,
    environment: dict[str, str] | None = None,
    data: DataFacts | None = None,
) -> Facts:
    """Facts of a running script, for the live audit.

    Args:
        args: the parsed command line.
        explicit: destinations given on the command line.
        world: number of processes.
        environment: environment variables of the run.
    """
    flags = known_flags(script_id)
    options = Options.from_namespace(args, flags=flags, explicit=explicit)
    launch = Launch("accelerate", Options(), f"scripts/{script_id}.py", script_id, options, environment or {})
    facts = Facts(launch, distribution or Distribution(precision=getattr(args, "mixed_precision", None)), gpu=gpu,
                  gpu_count=world, data=data, packages=installed_packages())  # fmt: skip
    return facts


def _read_inputs(facts: Facts, project: Project) -> None:
    """Metadata and the checkpoint's config.json, where they are within reach."""
    launch, options = facts.launch, facts.options
    meta = options.text("train_data_meta")
    path = project.find(meta, near=launch.path) if meta else None
    if path is not None and path.is_file():
        folder = options.text("train_data_dir")
        root = project.find(folder, near=launch.path) if folder else None
        facts.data = read_data(path, root if root is not None and root.is_dir() else None)
    if facts.model_name and not facts.model_name.startswith("$"):
        from optim_patches.audit.weights import read_model

        facts.model_config, facts.model_keys = read_model(project, facts.model_name, launch.path)
