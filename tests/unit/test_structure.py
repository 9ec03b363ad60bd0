"""The shape of the project: who imports whom, sizes, what stays out of it, and the tree in the README."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from optim_patches.registry import PATCHES
from videox_fun.training.specs import SCRIPTS

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES, MAX_RECIPE_LINES, MAX_FUNCTION_LINES = 500, 350, 120

# Types that describe a run; whoever is handed one may name them.
SHARED_TYPES = ("videox_fun.training.context", "videox_fun.training.specs")
ALLOWED = {
    "videox_fun.data": (),
    "videox_fun.dist": (),
    "videox_fun.utils": (),
    "videox_fun.models": ("videox_fun.dist", "videox_fun.utils"),
    "videox_fun.pipeline": ("videox_fun.models", "videox_fun.utils"),
    "videox_fun.conditioning": ("videox_fun.data", "videox_fun.models", "videox_fun.utils", *SHARED_TYPES),
    "videox_fun.recipes": ("videox_fun.conditioning", "videox_fun.models", "videox_fun.pipeline", "videox_fun.data",
                           "videox_fun.utils", *SHARED_TYPES),
    # recipes.base is the protocol that the engine calls; a family's module is imported by its name in specs.py.
    "videox_fun.training": ("videox_fun.data", "videox_fun.dist", "videox_fun.utils", "videox_fun.recipes.base",
                            "optim_patches"),
    "optim_patches": ("videox_fun.models", "videox_fun.dist"),
}
OPTIONAL = {"liger_kernel", "triton", "bitsandbytes", "came_pytorch", "flash_attn", "flash_attn_interface",
            "sageattention", "xfuser", "deepspeed", "torchao", "wandb", "skvideo", "transformer_engine", "apex"}
NEVER = {"torchvision", "cv2", "decord"}
FAMILY_NAMES = re.compile(r"\b(wan(?!t|db)|cogvideo|hunyuan|flux|longcat|qwen|ltx)", re.IGNORECASE)


@functools.cache
def project_files() -> tuple[Path, ...]:
    """Files that are, or would be, under version control."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True,
                            check=False)
    assert listed.returncode == 0, "these tests need the repository's git checkout"
    paths = (ROOT / name for name in listed.stdout.decode().split("\0") if name)
    return tuple(sorted(path for path in paths if path.is_file()))


@functools.cache
def sources(*tops: str) -> tuple[Path, ...]:
    return tuple(path for path in project_files()
                 if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in tops)


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def runtime_nodes(path: Path) -> Iterator[ast.AST]:
    """Everything that can run; a block under TYPE_CHECKING only names types."""
    queue: list[ast.AST] = [tree(path)]
    while queue:
        node = queue.pop()
        yield node
        typing_only = isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")
        queue += node.orelse if typing_only else ast.iter_child_nodes(node)


def imported(nodes: Iterator[ast.AST], package: str) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *base.split(".")])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def top_level(path: Path) -> Iterator[ast.AST]:
    """Statements that run on import: not inside functions, not under TYPE_CHECKING."""
    queue: list[ast.AST] = list(tree(path).body)
    while queue:
        node = queue.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING"):
            queue += node.orelse
            continue
        queue += ast.iter_child_nodes(node)


def dotted(node: ast.AST) -> str:
    """``a.b`` of a name or attribute, else an empty string."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def layer(name: str) -> str | None:
    return max((top for top in ALLOWED if name == top or name.startswith(top + ".")), key=len, default=None)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_follow_the_layers() -> None:
    wrong = []
    for path in sources("videox_fun", "optim_patches"):
        name = module_name(path)
        own = layer(name)
        if own is None:
            continue
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for target in imported(runtime_nodes(path), package):
            if target.split(".")[0] not in ("videox_fun", "optim_patches"):
                continue
            allowed = (own, *ALLOWED[own], "videox_fun.__version__")
            if not any(target == top or target.startswith(top + ".") for top in allowed):
                wrong.append(f"{relative(path)} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_training_scripts_only_call_the_entry_point() -> None:
    for spec in SCRIPTS.values():
        path = ROOT / spec.path
        ours = [target for target in imported(ast.walk(tree(path)), "") if target.startswith("videox_fun")]
        assert ours == ["videox_fun.training.entry.main"], spec.path
        assert len(path.read_text().splitlines()) <= 15, spec.path
        assert f'main("{spec.id}")' in path.read_text()


def test_every_training_script_has_a_row() -> None:
    found = {str(path.relative_to(ROOT / "scripts").with_suffix("")) for path in sources("scripts")
             if path.name.startswith("train") and path.parent != ROOT / "scripts"}
    assert found == set(SCRIPTS)


def test_the_engine_names_no_model_family() -> None:
    wrong = [f"{relative(path)}:{number}: {line.strip()}" for path in sources("videox_fun")
             if path.is_relative_to(ROOT / "videox_fun/training") and path.name != "specs.py"
             for number, line in enumerate(path.read_text().splitlines(), 1) if FAMILY_NAMES.search(line)]
    assert not wrong, "\n".join(wrong)


def test_optional_packages_are_imported_late_and_replaced_ones_never() -> None:
    wrong = []
    for path in sources("videox_fun", "optim_patches"):
        top = {target.split(".")[0] for target in imported(top_level(path), module_name(path))}
        anywhere = {target.split(".")[0] for target in imported(ast.walk(tree(path)), module_name(path))}
        kernel = path.is_relative_to(ROOT / "optim_patches/kernels")
        wrong += [f"{relative(path)}: {name} at module top" for name in sorted(top & OPTIONAL)
                  if not (kernel and name == "triton")]
        wrong += [f"{relative(path)}: {name}" for name in sorted(anywhere & NEVER)]
    assert not wrong, "\n".join(wrong)


def test_files_and_functions_stay_short() -> None:
    wrong = []
    for path in sources("videox_fun", "optim_patches", "scripts", "benchmarks", "tests"):
        limit = MAX_RECIPE_LINES if path.is_relative_to(ROOT / "videox_fun/recipes") else MAX_FILE_LINES
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > limit:
            wrong.append(f"{relative(path)}: {lines} lines, at most {limit}")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    wrong.append(f"{relative(path)}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    assert not wrong, "\n".join(wrong)


def test_packages_keep_to_safe_and_quiet_calls() -> None:
    wrong = []
    for path in sources("videox_fun", "optim_patches"):
        for node in ast.walk(tree(path)):
            where = f"{relative(path)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                wrong.append(f"{where}: bare except")
            if not isinstance(node, ast.Call):
                continue
            name = dotted(node.func)
            if name in ("print", "eval", "exec", "pickle.load", "pickle.loads"):
                wrong.append(f"{where}: {name}()")
            if name == "torch.load" and "weights_only=True" not in ast.unparse(node):
                wrong.append(f"{where}: torch.load without weights_only=True")
    assert not wrong, "\n".join(wrong)


def test_modules_have_docstrings_and_packages_an_init() -> None:
    wrong = [relative(path) for path in sources("videox_fun", "optim_patches", "scripts", "benchmarks")
             if not ast.get_docstring(tree(path))]
    wrong += [relative(path.parent) + "/__init__.py" for path in sources("videox_fun", "optim_patches")
              if not (path.parent / "__init__.py").is_file()]
    assert not wrong, "\n".join(wrong)


def test_sources_parse_as_python_310() -> None:
    for path in sources("videox_fun", "optim_patches", "scripts", "benchmarks", "tests"):
        ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=(3, 10))


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


TORCH_FREE = ("videox_fun", "videox_fun.utils", "videox_fun.utils.suggest", "videox_fun.training",
              "videox_fun.training.specs", "videox_fun.training.flag_table", "videox_fun.training.flag_checks",
              "videox_fun.training.flags", "videox_fun.training.entry", "videox_fun.models", "videox_fun.data",
              "optim_patches", "optim_patches.base", "optim_patches.registry")


def test_light_modules_do_not_import_torch() -> None:
    patches = sorted({location.partition(":")[0] for location in PATCHES.values() if isinstance(location, str)})
    code = ("import importlib, sys\n"
            f"for name in {[*TORCH_FREE, *patches]!r}:\n"
            "    importlib.import_module(name)\n"
            "    heavy = [m for m in ('torch', 'numpy', 'transformers', 'diffusers') if m in sys.modules]\n"
            "    assert not heavy, f'{name} imports {heavy}'\n")
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_import_takes_under_half_a_second() -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        assert run_python("import videox_fun").returncode == 0
        times.append(time.perf_counter() - start)
    assert min(times) < 0.5


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_help_answers_within_three_seconds(script: str) -> None:
    times = []
    for _ in range(2):
        start = time.perf_counter()
        result = subprocess.run([sys.executable, SCRIPTS[script].path, "--help"], cwd=ROOT, capture_output=True,
                                text=True, check=False)
        times.append(time.perf_counter() - start)
        assert result.returncode == 0 and "--upstream_compat" in result.stdout, result.stderr
    assert min(times) < 3.0


def test_no_paths_of_one_machine_in_the_project() -> None:
    pattern = re.compile(rb"(?<![\w.~$}-])/(?:" + b"|".join((b"work", b"root", b"home", b"Users")) + rb")/[\w.-]+")
    wrong = []
    for path in project_files():
        content = path.read_bytes()
        if b"\0" in content[:1024]:
            continue
        wrong += [f"{relative(path)}: {match.group().decode(errors='replace')}" for match in pattern.finditer(content)]
    assert not wrong, "\n".join(wrong)


def test_test_data_stays_small() -> None:
    sizes = {relative(path): path.stat().st_size for path in project_files()
             if path.is_relative_to(ROOT / "tests/data")}
    assert max(sizes.values(), default=0) < 1 << 20 and sum(sizes.values()) < 6 << 20, sizes


TREE_LINE = re.compile(r"^(?P<bars>[│├└─ ]*)(?P<name>[\w.{}-]+/?)(?:\s{2,}.*)?$")


def tree_of(readme: Path) -> set[str]:
    """Paths in the first code block that draws a tree: nesting is four columns a level."""
    block = next(block for block in re.findall(r"```[a-z]*\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
                 if "├──" in block)
    paths, stack = set(), []
    for line in block.splitlines():
        match = TREE_LINE.match(line)
        if not match or not match.group("bars"):
            continue
        depth = len(match.group("bars")) // 4
        stack[depth - 1:] = [match.group("name")]
        paths.add("".join(stack))
    return paths


@pytest.mark.parametrize("name", ["README.md", "README_zh.md"])
def test_the_tree_in_the_readme_is_the_tree_on_disk(name: str) -> None:
    drawn = tree_of(ROOT / name)
    files = {relative(path) for path in project_files()}
    folders = {f"{parent}/" for file in files for parent in map(str, Path(file).parents) if parent != "."}
    assert not {path for path in drawn if path not in files | folders}, "drawn, but not on disk"
    inside_data = {folder for folder in folders if folder.startswith("tests/data/") and folder != "tests/data/"}
    missing = {path for path in folders - inside_data if path not in drawn}
    missing |= {file for file in files if "/" not in file and file not in drawn}
    assert not missing, "on disk, but not drawn"


def test_style_is_clean() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", "."]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "No module named ruff" in result.stderr:
        pytest.skip("ruff is not installed")
    assert result.returncode == 0, result.stdout
