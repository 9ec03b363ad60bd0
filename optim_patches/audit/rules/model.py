"""The model against the mode, the script and the weights folder."""

from __future__ import annotations

import re
from collections.abc import Iterator

from optim_patches.audit.edits import drop, put
from optim_patches.audit.facts import Facts
from optim_patches.audit.families import TRANSLATED_CONFIG_KEYS, WAN_CONFIG_KEYS
from optim_patches.audit.project import Project
from optim_patches.audit.rows.h import NOT_DIFFERENTIABLE
from optim_patches.audit.rules import Hit, Rule
from optim_patches.audit.text import Text

T = Text
#: Input channels of Wan models (VAE with 16 and with 48 channels) by what they are conditioned on.
CHANNELS = {"text": (16, 48), "image": (36, 100), "control": (32, 48, 52, 148)}

_TASK_NAME = re.compile(r"control|camera|inp\b|i2v|t2v")
#: Targets from Wan's names or shortened ones; no layer of the other families ends so.
_NO_MATCH = ("q", "k", "v", "o", "ff.0", "ff.2", "ff_context.0", "ff_context.2")


def _wan(f: Facts) -> bool:
    return f.script_id.split("/")[0] in ("wan2.1", "wan2.1_fun", "wan2.2", "wan2.2_fun")


def _wanted(f: Facts) -> str:
    if f.task == "control":
        return "control"
    if f.task in ("plain", "distill"):
        return "text" if f.mode in ("normal", "ti2v") else "image"
    return ""


def _channels(f: Facts, _: Project) -> Iterator[Hit]:
    """The configuration on disk, where it is within reach; else the checkpoint's name."""
    wanted = _wanted(f)
    if not _wan(f) or not wanted:
        return
    if f.model_config is not None:
        number = f.model_config.get("in_dim", f.model_config.get("in_channels"))
        if isinstance(number, int) and number not in CHANNELS[wanted]:
            right = next((name for name, sizes in CHANNELS.items() if number in sizes), "another task")
            text = T("the weights take {0} input channels ({1} model); --train_mode {2} of this script feeds {3}",
                     "权重的输入通道为 {0}（{1} 模型）；该脚本 --train_mode {2} 输入 {3} 通道")  # fmt: skip
            feeds = " or ".join(map(str, CHANNELS[wanted]))
            yield Hit(text.format(number, right, f.mode, feeds), _mode_edit(f, right), "error")
        return
    name = f.model_name.rsplit("/", 1)[-1].lower()
    image = bool(re.search(r"inp\b|i2v|inpaint", name)) and not re.search(r"ti2v", name)
    if wanted == "text" and image and f.mode == "normal":
        text = T("{0} is an image-to-video checkpoint, --train_mode is {1}",
                 "{0} 是图生视频权重，而 --train_mode 为 {1}")
        yield Hit(text.format(name, f.mode))
    elif wanted == "image" and re.search(r"t2v", name) and not image:
        text = T("{0} is a text-to-video checkpoint, --train_mode is {1}", "{0} 是文生视频权重，而 --train_mode 为 {1}")
        yield Hit(text.format(name, f.mode))
    elif (wanted == "control") != bool(re.search(r"control|camera", name)) and _TASK_NAME.search(name):
        text = T("{0} with {1}: check that the weights belong to this task", "{1} 使用 {0}：请确认权重与任务匹配")
        yield Hit(text.format(name, f.script_id))


def _mode_edit(f: Facts, right: str):
    if right == "text":
        return (put("train_mode", "normal"),)
    if right == "image":
        return (put("train_mode", "inpaint" if "fun" in f.script_id else "i2v"),)
    return ()


def _config_keys(f: Facts, _: Project) -> Iterator[Hit]:
    if f.model_config is None or not _wan(f):
        return
    keys = {key for key in f.model_config if not key.startswith("_")}
    if "num_attention_heads" in keys:  # the other published layout; it has names of its own
        return
    extra = sorted(keys - WAN_CONFIG_KEYS - TRANSLATED_CONFIG_KEYS)
    if extra:
        text = T("config.json has keys this class ignores: {0}; the checkpoint is of another version",
                 "config.json 含该类不认识的键：{0}；权重版本可能不符")
        yield Hit(text.format(", ".join(extra)))


def _image_keys(f: Facts, _: Project) -> Iterator[Hit]:
    if f.model_keys is None or not f.script_id.startswith("wan2.1") or _wanted(f) != "image":
        return
    if not any(key.startswith(("img_emb.", "condition_embedder.image")) for key in f.model_keys):
        yield Hit(T("the weights have no image embedding (img_emb.*), which this mode needs: it would start at random",
                    "权重缺少该模式需要的图像嵌入 (img_emb.*)，会从随机值开始"))  # fmt: skip


def _boundary(f: Facts, _: Project) -> Iterator[Hit]:
    kind = f.options.text("boundary_type")
    if kind is None or not f.accepts("boundary_type"):
        return
    path = (f.options.text("transformer_path") or "").lower()
    named = "high" if "high_noise" in path else "low" if "low_noise" in path else ""
    if named and kind != "full" and named != kind:
        text = T("--boundary_type {0} with weights of the {1}-noise expert",
                 "--boundary_type {0} 却使用 {1} 噪声专家的权重")
        yield Hit(text.format(kind, named), (put("boundary_type", named),))
    single = f.params == 5.0 or "animate" in f.script_id
    if f.options.given("boundary_type") and kind != "full" and single:
        text = T("--boundary_type {0}, but this model has one expert", "--boundary_type {0}，但该模型只有一个专家")
        yield Hit(text.format(kind), (put("boundary_type", "full"),))
    elif kind != "full" and not single and f.target == "upstream" and not f.options.on("uniform_sampling"):
        text = T("without --uniform_sampling the {0}-noise expert trains on all noise levels",
                 "未加 --uniform_sampling 时 {0} 噪声专家会在全部噪声水平上训练")
        yield Hit(text.format(kind), (put("uniform_sampling"),))


def _targets(f: Facts, _: Project) -> Iterator[Hit]:
    names = [name.strip() for name in (f.options.text("target_name") or "").split(",") if name.strip()]
    if not names or f.family is None:
        return
    wan = f.family.targets.startswith("q,k,v")
    if wan:
        wrong = [name for name in names if name.startswith(("to_", "ff.", "attn", "add_", "proj_"))]
    else:
        wrong = [name for name in names if name in _NO_MATCH or name.startswith("ffn.")]
    if wrong:
        text = T("{0} match no layer of {1}; use {2}", "{0} 在 {1} 中匹配不到任何层；请用 {2}")
        better = f.family.targets
        yield Hit(text.format(", ".join(wrong), f.family.name, better), (put("target_name", better),))


def _batches(f: Facts, _: Project) -> Iterator[Hit]:
    if f.batch <= 1:
        return
    fix = (put("train_batch_size", 1), put("gradient_accumulation_steps", f.batch * f.accumulation))
    if "vace" in f.script_id:
        yield Hit(T("VACE scripts stop for batches above 1", "VACE 脚本不支持 batch 大于 1"), fix)
    elif f.target == "upstream" and f.task == "distill":
        yield Hit(T("the negative prompt is a batch of 1: larger batches fail",
                    "负提示词的 batch 为 1：更大的 batch 会报错"), fix)
    elif f.target == "upstream" and f.task == "reward":
        yield Hit(T("guidance takes items 0 and 1 of the batch: larger batches train on wrong numbers",
                    "CFG 只取 batch 的第 0、1 项：更大的 batch 结果错误"), fix)


def _reward(f: Facts, _: Project) -> Iterator[Hit]:
    if f.task != "reward":
        return
    name = f.options.text("reward_fn")
    if name in NOT_DIFFERENTIABLE:
        yield Hit(T("{0} has no gradient; it can only evaluate",
                    "{0} 不可微，只能用于评估").format(name), (put("reward_fn", "HPSReward"),))
    if not f.options.given("reward_fn") and f.target == "upstream" and not f.script_id.startswith("cogvideox"):
        yield Hit(T("the default reward aesthetic_loss_fn does not exist",
                    "默认奖励 aesthetic_loss_fn 不存在"), (put("reward_fn", "AestheticReward"),))
    if not f.options.given("prompt_path"):
        yield Hit(T("--prompt_path is missing; its default is no file",
                    "缺少 --prompt_path，其默认值不是文件"), severity="warning")


def _upstream_crashes(f: Facts, _: Project) -> Iterator[Hit]:
    if f.target != "upstream":
        return
    if f.peft and f.options.given("resume_from_checkpoint"):
        yield Hit(T("resuming a PEFT LoRA crashes in these scripts",
                    "该脚本恢复 PEFT LoRA 会崩溃"), (drop("resume_from_checkpoint"),))
    if f.options.given("denoising_step_indices_list"):
        yield Hit(T("--denoising_step_indices_list from the command line becomes text and fails; leave the default",
                    "命令行的 --denoising_step_indices_list 会变成字符串而报错，只有默认值可用"),
                  (drop("denoising_step_indices_list"),))  # fmt: skip
    if f.script_id.startswith("wan2.1_fun/train_control") and f.mode == "control":
        yield Hit(T("--train_mode control (the default) crashes here: no CLIP context is built",
                    "--train_mode control（默认值）会崩溃：没有构造 CLIP 上下文"), (put("train_mode", "control_ref"),))
    if f.options.on("random_frame_crop") or f.options.on("keep_all_node_same_token_length"):
        if not f.script_id.startswith("cogvideox"):
            names = [n for n in ("random_frame_crop", "keep_all_node_same_token_length") if f.options.on(n)]
            text = T("{0} cut clips to the latent frame count: {1} frames become {2}",
                     "{0} 会把视频截到 latent 帧数：{1} 帧变成 {2} 帧")
            cut = (f.frames - 1) // 4 + 1
            flags = " ".join(f"--{n}" for n in names)
            yield Hit(text.format(flags, f.frames, cut), tuple(drop(n) for n in names), "warning")


def _critic(f: Facts, _: Project) -> Iterator[Hit]:
    if f.target == "upstream" and f.options.given("learning_rate_critic") and not f.peft:
        yield Hit(T("--learning_rate_critic has no effect in these scripts: the critic uses --learning_rate",
                    "--learning_rate_critic 不起作用：判别器使用 --learning_rate"), (drop("learning_rate_critic"),))


RULES = (
    Rule("mode-vs-weights", "warning", T("mode and weights", "训练模式与权重不符"), _channels),
    Rule("unknown-config-keys", "error", T("unknown model configuration", "未知的模型配置键"), _config_keys),
    Rule("missing-image-keys", "error", T("image embedding missing", "缺少图像嵌入权重"), _image_keys),
    Rule("boundary-vs-weights", "error", T("noise expert", "噪声专家不符"), _boundary),
    Rule("lora-targets", "warning", T("LoRA targets that match nothing", "匹配不到层的 LoRA 目标"), _targets),
    Rule("batch-above-one", "error", T("batch above 1", "batch 大于 1"), _batches),
    Rule("reward-setup", "error", T("reward training", "奖励训练设置"), _reward),
    Rule("upstream-crash", "error", T("crash in VideoX-Fun's script", "VideoX-Fun 脚本的已知崩溃"), _upstream_crashes),
    Rule("critic-rate", "warning", T("critic's learning rate", "判别器学习率"), _critic),
)
