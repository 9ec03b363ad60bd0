"""Collects what is to be audited: launch scripts, command lines, project folders, configuration files.

A folder counts as a VideoX-Fun project when any of the trigger conditions holds: it imports ``videox_fun``, requires
the package, has a ``videox_fun/`` folder with ``models``, ``pipeline`` and ``data``, configuration files with the
project's parameters, launch commands of its scripts, its ``config/`` folders, or a git remote of that name.
Python files are parsed for the names they call, never imported.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optim_patches.audit.configs import config_kind, load_mapping
from optim_patches.audit.flagtable import SCRIPTS
from optim_patches.audit.launch import Launch, find_launches
from optim_patches.audit.text import Text, same

MAX_BYTES = 1 << 20
MAX_FILES = 4000
MAX_PYTHON = 300
_SKIPPED = frozenset({".git", "node_modules", "__pycache__", ".venv", "venv", "site-packages", "models", "datasets",
                      "output_dir", "outputs", "wandb", "build", "dist", "tests"})  # fmt: skip
_PARAMETERS = ("vae_mini_batch", "video_sample_n_frames", "enable_bucket", "random_hw_adapt")
_SHELL = frozenset({".sh", ".bash", ".zsh", ".bat", ".cmd", ".ps1", ""})
_CONFIG = frozenset({".json", ".yaml", ".yml"})
_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9_.-]+)")


@dataclass
class CodeFacts:
    """Names that a Python file calls, imports and passes as keywords."""

    calls: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)
    keywords: set[str] = field(default_factory=set)


@dataclass
class ConfigFile:
    """A configuration file given or found: ``kind`` is deepspeed, accelerate or model."""

    path: str
    kind: str
    data: dict[str, Any]


@dataclass
class Project:
    """Everything read from the inputs.

    Attributes:
        roots: folders that relative paths may start from.
        own: the folder is a checkout of this project, so its scripts take the optimization flags.
        scripts_found: the folder has its own ``videox_fun`` package, so its scripts are what will run.
    """

    roots: list[Path] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    configs: list[ConfigFile] = field(default_factory=list)
    problems: list[tuple[str, Text]] = field(default_factory=list)
    triggers: list[Text] = field(default_factory=list)
    requirements: set[str] = field(default_factory=set)
    own: bool = False
    scripts_found: bool = False
    files: int = 0
    python_files: int = 0

    def read(self, name: str, *, near: str = "", limit: int = MAX_BYTES) -> str | None:
        """Text of a file named in a command, looked for near the file that names it, in the roots and here."""
        path = self.find(name, near=near)
        if path is None:
            return None
        return read_text(path, limit=limit)[0]

    def find(self, name: str, *, near: str = "") -> Path | None:
        """The first place where a relative path exists."""
        if not name or "\0" in name or len(name) > 4096:
            return None
        bases = [Path(near).parent] if near else []
        for base in [*bases, *self.roots, Path.cwd()]:
            candidate = base / os.path.expanduser(name)
            try:
                if candidate.exists():
                    return candidate
            except OSError:
                return None
        return None

    def code(self, script: str, *, near: str = "") -> CodeFacts | None:
        """Names used in a launch's own script, None when it is not within reach."""
        path = self.find(script, near=near)
        if path is None or path.suffix != ".py":
            return None
        text, _ = read_text(path)
        return parse_code(text) if text is not None else None


def read_text(path: Path, *, limit: int = MAX_BYTES) -> tuple[str | None, Text | None]:
    """Text of a file, or None with the reason: missing, a folder, too large, binary, not readable."""
    try:
        if path.is_dir():
            return None, Text("is a folder", "是一个目录")
        size = path.stat().st_size
        if size > limit:
            megabytes = f"{size / (1 << 20):.1f} MB"
            return None, Text(f"{megabytes} is too large for a launch script or configuration; not read",
                              f"{megabytes}，对启动脚本或配置文件来说过大，未读取")  # fmt: skip
        data = path.read_bytes()
    except FileNotFoundError:
        return None, Text("does not exist", "不存在")
    except OSError as error:
        return None, Text(f"cannot be read: {error.strerror}", f"无法读取：{error.strerror}")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", errors="replace"), None
    if b"\0" in data:
        return None, Text("is a binary file, not a script or configuration", "是二进制文件，不是脚本或配置")
    # newline characters stay as they are: spans and diffs refer to them
    return data.decode("utf-8-sig", errors="replace"), None


def load_project(paths: Iterable[str], *, commands: Iterable[str] = ()) -> Project:
    """Read the inputs of an audit. Nothing raises for what a file holds; trouble lands in ``problems``."""
    project = Project()
    for command in commands:
        _add_shell(project, command, "")
    for name in paths:
        path = Path(name)
        if _exists(path):
            if path.is_dir():
                _add_folder(project, path)
            else:
                _add_file(project, path, named=True)
        elif re.search(r"\s", name.strip()):
            _add_shell(project, name, "")
        else:
            project.problems.append((name, _missing(path)))
    _note_launches(project)
    return project


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _missing(path: Path) -> Text:
    import difflib

    try:
        names = sorted(entry.name for entry in path.parent.iterdir())
    except (OSError, ValueError):
        return Text("does not exist", "不存在")
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    if not near:
        return Text("does not exist", "不存在")
    return Text(f"does not exist; there is {', '.join(near)}", f"不存在；同目录下有 {'、'.join(near)}")


def _add_file(project: Project, path: Path, *, named: bool) -> None:
    text, problem = read_text(path)
    if text is None:
        if named and problem is not None:
            project.problems.append((str(path), problem))
        return
    suffix = path.suffix.lower()
    if suffix in _CONFIG:
        _add_config(project, text, path, named=named)
    elif suffix in (".md", ".markdown"):
        _add_shell(project, _fenced_only(text), str(path), shown=text)
    elif suffix == ".py" and named:
        words = f"python {path}"
        _add_shell(project, words, "")
    else:
        _add_shell(project, text, str(path), quiet=not named)


def _add_shell(project: Project, text: str, path: str, *, quiet: bool = False, shown: str | None = None) -> None:
    if len(text) > MAX_BYTES:
        project.problems.append((path or "command", Text("is too long for a command line", "命令行过长")))
        return

    def source(name: str) -> str | None:
        return project.read(name, near=path)

    launches, problems, unset = find_launches(text, path=path, source=source)
    for launch in launches:
        launch.text = shown if shown is not None else text
    project.launches.extend(launches)
    if quiet and not launches:
        return
    label = path or "command"
    project.problems.extend((f"{label}:{problem.line}", problem.text) for problem in problems[:20])
    used = {name for name in unset if any(f"${name}" in word.text or f"${{{name}" in word.text
                                          for launch in launches for word in launch.words)}  # fmt: skip
    for name in sorted(used)[:20]:
        project.problems.append((f"{label}:{unset[name]}", UNSET.format(name)))
    if not launches:
        project.problems.append((label, NO_LAUNCH))


UNSET = Text(
    "${0} is never set here; its value is not known to this report",
    "此处没有给 ${0} 赋值；报告无法得知其内容",
)
NO_LAUNCH = Text(
    "holds no launch of a training script (accelerate launch, torchrun, deepspeed or python SCRIPT.py)",
    "没有找到训练脚本的启动命令（accelerate launch、torchrun、deepspeed 或 python 脚本.py）",
)


def _fenced_only(text: str) -> str:
    """Markdown with everything outside code fences blanked; lengths and lines stay, so spans remain right."""
    out, inside = [], False
    for line in text.splitlines(keepends=True):
        fence = line.lstrip().startswith("```")
        keep = inside and not fence
        body = line.rstrip("\r\n")
        out.append(line if keep else " " * len(body) + line[len(body) :])
        inside = inside != fence
    return "".join(out)


def _add_config(project: Project, text: str, path: Path, *, named: bool) -> None:
    data, problem = load_mapping(text, str(path))
    if data is None:
        if named and problem is not None:
            project.problems.append((str(path), problem))
        return
    kind = config_kind(data)
    if kind:
        project.configs.append(ConfigFile(str(path), kind, data))
    elif named:
        project.problems.append((str(path), Text("is no accelerate, DeepSpeed or model configuration",
                                                 "不是 accelerate、DeepSpeed 或模型配置文件")))  # fmt: skip
    if any(key in data for key in _PARAMETERS) or data.get("train_mode") in ("normal", "inpaint", "control_ref"):
        project.triggers.append(Text(f"{path.name} has VideoX-Fun parameters", f"{path.name} 含 VideoX-Fun 特有参数"))


def _add_folder(project: Project, root: Path) -> None:
    project.roots.append(root)
    before = len(project.launches)
    _scan_folder(project, root)
    if len(project.launches) == before:
        project.problems.append((str(root), NO_LAUNCH))


def _scan_folder(project: Project, root: Path) -> None:
    package = root / "videox_fun"
    if package.is_dir() and all((package / name).is_dir() for name in ("models", "pipeline", "data")):
        project.triggers.append(Text("videox_fun/ with models, pipeline and data", "存在 videox_fun/ 目录结构"))
    project.scripts_found = project.scripts_found or package.is_dir()
    project.own = project.own or (root / "optim_patches").is_dir()
    for folder in ("config/wan2.1/wan_civitai.yaml", "config/wan2.2"):
        if (root / folder).exists():
            project.triggers.append(same(folder))
    _git_remote(project, root)
    for path in _walk(project, root):
        suffix = path.suffix.lower()
        if suffix == ".py":
            _scan_python(project, path)
        elif path.name.startswith("requirements") or path.name in ("pyproject.toml", "environment.yml"):
            _scan_requirements(project, path)
        elif suffix in _CONFIG and "config" in str(path.parent.relative_to(root)).lower() + path.name.lower():
            _add_file(project, path, named=False)
        elif suffix in _SHELL - {""}:
            _add_file(project, path, named=False)
    if project.files >= MAX_FILES:
        project.problems.append((str(root), Text(f"more than {MAX_FILES} files: the rest was not looked at",
                                                 f"文件超过 {MAX_FILES} 个：其余未扫描")))  # fmt: skip


def _walk(project: Project, root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root, followlinks=False):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED and not f.startswith(".")
                            or (f == "models" and Path(folder).name == "videox_fun"))  # fmt: skip
        for name in sorted(names):
            project.files += 1
            if project.files > MAX_FILES:
                return
            yield Path(folder) / name


def _git_remote(project: Project, root: Path) -> None:
    text, _ = read_text(root / ".git" / "config")
    if text is not None and re.search(r"url\s*=.*VideoX-Fun", text, re.IGNORECASE):
        project.triggers.append(Text("git remote names VideoX-Fun", ".git/config 的远端地址包含 VideoX-Fun"))


def _scan_python(project: Project, path: Path) -> None:
    project.python_files += 1
    if project.python_files > MAX_PYTHON or any(t.en.startswith("imports videox_fun") for t in project.triggers):
        return
    text, _ = read_text(path)
    if text is not None and re.search(r"^\s*(from|import)\s+videox_fun\b", text, re.MULTILINE):
        name = path.name
        project.triggers.append(Text(f"imports videox_fun ({name})", f"代码中 import 了 videox_fun（{name}）"))
    if path.name == "setup.py" and text is not None:
        _requirements(project, re.findall(r"[\"']([A-Za-z0-9_.\-]+)[<>=~!\[\"']", text), path)


def _scan_requirements(project: Project, path: Path) -> None:
    text, _ = read_text(path)
    if text is None:
        return
    lines = re.findall(r"[\"']([A-Za-z0-9_.\-]+)", text) if path.suffix == ".toml" else text.splitlines()
    names = [match.group(1) for line in lines if (match := _REQUIREMENT.match(line.lstrip("- ")))]
    _requirements(project, names, path)


def _requirements(project: Project, names: list[str], path: Path) -> None:
    found = {name.lower().replace("_", "-") for name in names}
    project.requirements |= found
    if "videox-fun" in found:
        project.triggers.append(Text(f"{path.name} requires videox-fun", f"{path.name} 依赖 videox-fun"))


def _note_launches(project: Project) -> None:
    """The trigger conditions that launch commands meet."""
    families = sorted({launch.script_id.split("/")[0] for launch in project.launches} & set(SCRIPTS))
    for family in families:
        project.triggers.append(Text(f"launches scripts/{family}/", f"启动命令包含 scripts/{family}/"))
    if any(launch.options.given("pretrained_model_name_or_path") and launch.options.given("train_mode")
           for launch in project.launches):  # fmt: skip
        text = "--pretrained_model_name_or_path + --train_mode"
        project.triggers.append(same(text))
    project.triggers = list(dict.fromkeys(project.triggers))


def parse_code(text: str) -> CodeFacts | None:
    """Names used in Python source, None when it is not Python. The code is parsed, not run."""
    facts = CodeFacts()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            facts.calls.add(_dotted(node.func))
            facts.keywords.update(keyword.arg for keyword in node.keywords if keyword.arg)
        elif isinstance(node, ast.Import):
            facts.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            facts.imports.add(node.module)
    return facts


def _dotted(node: ast.expr) -> str:
    """The last two parts of a called name: ``torch.compile``, ``apply_checkpointing``."""
    if isinstance(node, ast.Attribute):
        inner = node.value.id if isinstance(node.value, ast.Name) else ""
        return f"{inner}.{node.attr}" if inner else node.attr
    return node.id if isinstance(node, ast.Name) else ""
