"""The shell reader: what launch scripts use is understood, what is hostile is survived, nothing is executed."""

from __future__ import annotations

import shlex
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optim_patches.audit.edits import apply_edits, drop, launcher, put, spread, unified_diff
from optim_patches.audit.flagtable import any_upstream_flag, known_flags, script_ids, upstream_flags
from optim_patches.audit.launch import Launch, find_launches, normalize_script
from optim_patches.audit.shell import parse_shell

SCRIPT = "scripts/wan2.1_fun/train_lora.py"


def words(text: str) -> list[str]:
    (command,) = parse_shell(text).commands
    return [word.text for word in command.words]


def one(text: str, **kwargs) -> Launch:
    launches, _, _ = find_launches(text, **kwargs)
    assert len(launches) == 1, launches
    return launches[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b  c", ["a", "b", "c"]),
        ("a 'b c' \"d e\" f\\ g", ["a", "b c", "d e", "f g"]),
        ("a \\\n  b \\\r\n c", ["a", "b", "c"]),
        ("a b # c d", ["a", "b"]),
        ("a b#c", ["a", "b#c"]),
        ("X=1; a $X ${X} \"${X}y\" '$X'", ["a", "1", "1", "1y", "$X"]),
        ("a ${X:-d e} ${X:-'d e'} ${Y-z}", ["a", "d", "e", "d e", "z"]),
        ("X=q; a ${X:+set} ${Y:+unset}end", ["a", "set", "end"]),
        ("a ${X:=v} $X", ["a", "v", "v"]),
        ("X=a; X=$X/b; X+=/c; cmd $X", ["cmd", "a/b/c"]),
        ("X='--r 8 --b'; cmd $X \"$X\"", ["cmd", "--r", "8", "--b", "--r 8 --b"]),
        ("A=(--r 8 'x y')\nA+=(--z)\ncmd \"${A[@]}\"", ["cmd", "--r", "8", "x y", "--z"]),
        ("cmd x > out.log 2>&1 &", ["cmd", "x"]),
        ("cmd x >>out 2>/dev/null < in", ["cmd", "x"]),
        ("cmd <(sort a) b", ["cmd", "b"]),
        ("if true; then cmd a; fi", ["true"]),
        ("nohup cmd a", ["cmd", "a"]),
        ("cmd --x=\"a\"'b'c", ["cmd", "--x=abc"]),
        ("cmd \"a\\\"b\\$c\"", ["cmd", 'a"b$c']),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    commands = parse_shell(text).commands
    assert [word.text for word in commands[0 if "then" in text else -1].words] == expected


@pytest.mark.parametrize("text", ["$(rm -rf x)", "`rm -rf x`", "$((1+2))", "${X%.py}", "$UNSET", "${U:?no}", '"$@"'])
def test_what_only_a_shell_knows_stays_as_typed(text: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    option = one(f"accelerate launch {SCRIPT} --rank={text}").options.get("rank")
    assert option.opaque and option.values[0] in (text, text.strip('"'))
    assert (tmp_path / "x").is_dir()


def test_heredocs_and_echoes_are_no_launches() -> None:
    text = f"cat <<'EOF'\naccelerate launch {SCRIPT} --rank 1\nEOF\necho accelerate launch {SCRIPT}\n"
    assert find_launches(text)[0] == []


def test_several_launches_with_their_variables_and_lines() -> None:
    text = (
        "#!/bin/bash\nexport MODEL=m/Wan-14B VIDEOX_ATTENTION_TYPE=SAGE_ATTENTION\nfor LR in 1e-4 1e-5; do\n"
        f"accelerate launch --num_processes 2 {SCRIPT} --learning_rate $LR --pretrained_model_name_or_path=$MODEL\n"
        f"done\nCUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 {SCRIPT} --rank 4 &&"
        f" python -u {SCRIPT} --rank 5\n"
        f"deepspeed --num_gpus 4 {SCRIPT} --deepspeed ds.json\n"
        f"python3 -m accelerate.commands.launch {SCRIPT} --rank 6\n"
    )
    launches, problems, unset = find_launches(text)
    assert [launch.launcher for launch in launches] == ["accelerate", "torchrun", "python", "deepspeed", "accelerate"]
    assert [launch.line for launch in launches] == [4, 6, 6, 7, 8]
    assert launches[0].options.text("pretrained_model_name_or_path") == "m/Wan-14B"
    assert launches[0].options.number("learning_rate") == 1e-4
    assert launches[0].environment["VIDEOX_ATTENTION_TYPE"] == "SAGE_ATTENTION"
    assert launches[1].environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert launches[1].launcher_options.integer("nproc_per_node") == 2
    assert not problems and not unset


def test_sourced_variables() -> None:
    files = {"env.sh": "export RANK_SIZE=16\nsource env.sh\n"}  # a file that sources itself must end
    text = f"source env.sh\naccelerate launch {SCRIPT} --rank $RANK_SIZE --train_batch_size=1"
    assert one(text, source=files.get).options.integer("rank") == 16


def test_problems_are_sentences_with_lines() -> None:
    _, problems, _ = find_launches(f'echo a\naccelerate launch {SCRIPT} --output_dir="out\n')
    assert [(problem.line, '"' in problem.text.en) for problem in problems] == [(2, True)]
    launches, problems, _ = find_launches(f"accelerate launch {SCRIPT} --rank 1 \\ \n  --seed 2\n")
    assert "blanks follow the backslash" in problems[0].text.en
    assert launches[0].options.integer("seed") == 2
    _, problems, _ = find_launches(f"accelerate launch {SCRIPT} --rank 1\r\n")
    assert "CRLF" in problems[0].text.en and launches[0].options.integer("rank") == 1


@pytest.mark.parametrize(
    ("script", "path", "expected"),
    [
        ("/abs/repo/scripts/wan2.2_fun/train_control.py", "", "wan2.2_fun/train_control"),
        ("scripts/ltx2.3/train.py", "", "ltx2.3/train"),
        ("train_lora.py", "repo/scripts/wan2.1/train_lora.sh", "wan2.1/train_lora"),
        ("train_lora.py", "run.sh", "train_lora"),
        ("C:\\x\\scripts\\flux\\train.py", "", "flux/train"),
    ],
)
def test_script_names(script: str, path: str, expected: str) -> None:
    assert normalize_script(script, path) == expected


def test_argparse_rules() -> None:
    options = one(
        f"accelerate launch {SCRIPT} --ran=8 --rank 16 --validation_prompts 'a b' c --vae_mini_batch=2 "
        "--learning_rate -1 --gradient_checkp --fix_sample_size 64 32 --unheard_of v --network_al 4"
    ).options
    assert options.integer("rank") == 16  # --ran is ambiguous (rank, random_...), the exact name counts
    assert not options.get("ran").known
    assert options.values("validation_prompts") == ("a b", "c")
    assert options.number("learning_rate") == -1.0
    assert options.on("gradient_checkpointing") and options.integer("network_alpha") == 4
    assert options.values("fix_sample_size") == ("64", "32")
    assert not options.get("unheard_of").known and options.values("unheard_of") == ("v",)
    assert options.integer("lr_warmup_steps") == 500 and not options.given("lr_warmup_steps")


HOSTILE = {
    "binary": "\x00\x01\x02" * 2000,
    "parentheses": "$(" * 200_000,
    "braces": "${" * 200_000,
    "defaults": "${a:-" * 50_000,
    "quotes": "'\"`" * 100_000,
    "doubling": "A=x\n" + "A=$A$A\n" * 5000 + f"accelerate launch {SCRIPT} --rank $A",
    "arrays": "A=(x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60 + f'accelerate launch {SCRIPT} "${{A[@]}}"',
    "continuations": "\\\n" * 100_000,
    "heredocs": "<<E\n" * 20_000,
    "cycle": f"A=$B\nB=$A\nA=$B\naccelerate launch {SCRIPT} --rank $A",
    "operators": ";|&<>()" * 50_000,
    "words": "a " * 100_000,
    "nested": "$(" * 5000 + ")" * 5000,
    "assignment": "A=" * 100_000,
    "long": f"accelerate launch {SCRIPT} " + "--rank 1 " * 20_000,
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_text_ends_in_time(name: str) -> None:
    start = time.perf_counter()
    launches, problems, _ = find_launches(HOSTILE[name])
    assert time.perf_counter() - start < 20
    assert len(problems) <= 10
    assert len(launches) == (1 if "accelerate" in HOSTILE[name] else 0)


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet="ab=$(){}[]'\"\\`;|&<>#\n\r\t -@*^:+?1A", max_size=60))
def test_any_text_is_survived(text: str) -> None:
    script = parse_shell(text)
    for command in script.commands:
        assert command.words
        for word in command.words:
            assert 0 <= word.start <= word.end <= len(text)
    find_launches(f"accelerate launch {SCRIPT} {text}")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(alphabet="abc '\"\\$`;|&<>(){}#*?\t\n-=", min_size=1, max_size=12), min_size=1, max_size=6))
def test_quoted_words_come_back(values: list[str]) -> None:
    text = "cmd " + " ".join(shlex.quote(value) for value in values)
    (command,) = parse_shell(text).commands
    assert [word.text for word in command.words] == ["cmd", *values]
    for word, value in zip(command.words[1:], values, strict=True):
        assert text[word.start : word.end] == shlex.quote(value)


FLAGS = [flag for flag in upstream_flags("wan2.1_fun/train_lora").values() if flag.arity in (0, 1)]
FLAG = st.sampled_from(FLAGS)
VALUE = st.text(alphabet="abc0129._/ -", min_size=1, max_size=8).map(str.strip).filter(lambda v: v and v[0] != "-")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(FLAG, VALUE, st.booleans(), st.booleans()), max_size=8, unique_by=lambda item: item[0].name))
def test_options_of_any_command(given_flags) -> None:
    parts = []
    for flag, value, equals, broken in given_flags:
        glue = " \\\n  " if broken else " "
        shown = "" if flag.arity == 0 else ("=" if equals else " ") + shlex.quote(value)
        parts.append(f"{glue}--{flag.name}{shown}")
    options = one(f"accelerate launch {SCRIPT}{''.join(parts)} --train_data_meta m").options
    for flag, value, _, _ in given_flags:
        if flag.name != "train_data_meta":
            assert options.on(flag.name) if flag.arity == 0 else options.text(flag.name) == value
    assert all(option.known for option in options.items)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(FLAG, VALUE, st.booleans()), min_size=1, max_size=6, unique_by=lambda item: item[0].name),
    st.data(),
)
def test_edits_do_what_they_say_and_nothing_else(given_flags, data) -> None:
    broken = data.draw(st.booleans())
    glue = " \\\n  " if broken else " "
    parts = [
        f"--{f.name}" if f.arity == 0 else f"--{f.name}{'=' if e else ' '}{shlex.quote(v)}" for f, v, e in given_flags
    ]
    text = f"# intro\naccelerate launch --num_processes 2 {SCRIPT}{glue}{glue.join(parts)}\necho done\n"
    before = one(text)
    victim = data.draw(st.sampled_from(given_flags))[0]
    changed = data.draw(FLAG.filter(lambda flag: flag.name != victim.name))
    value = data.draw(VALUE) if changed.arity else None
    edits = [drop(victim.name), put(changed.name, value), launcher("mixed_precision", "bf16")]
    text_after = apply_edits(text, [(before, edits)]).text
    after = one(text_after)
    assert not after.options.given(victim.name)
    assert after.options.on(changed.name) if value is None else after.options.text(changed.name) == value
    assert after.launcher_options.text("mixed_precision") == "bf16"
    assert after.launcher_options.integer("num_processes") == 2
    for flag, old, _ in given_flags:
        if flag.name not in (victim.name, changed.name):
            assert after.options.given(flag.name)
            assert flag.arity == 0 or after.options.text(flag.name) == old
    assert text_after.startswith("# intro\n") and text_after.endswith("\necho done\n")
    again = apply_edits(text_after, [(after, edits)]).text
    assert one(again).options.items.__len__() == len(after.options.items)


def test_edits_keep_the_style_of_the_file() -> None:
    text = f'accelerate launch {SCRIPT} \\\r\n  --rank="8" \\\r\n  --low_vram\r\n'
    launch = one(text)
    after = apply_edits(text, [(launch, [put("rank", 64), put("seed", 1), drop("low_vram"), put("allow_tf32")])]).text
    assert after == f'accelerate launch {SCRIPT} \\\r\n  --rank="64" \\\r\n  --seed=1 \\\r\n  --allow_tf32\r\n'
    spaced = f"accelerate launch {SCRIPT} --rank 8 --seed 1"
    assert apply_edits(spaced, [(one(spaced), [put("output_dir", "a b")])]).text.endswith("--seed 1 --output_dir 'a b'")
    assert "+  --seed" not in unified_diff(text, text, name="x")
    assert spread("a --b 1 --c=2 -d") == "a \\\n  --b 1 \\\n  --c=2 \\\n  -d"


def test_flag_table_against_the_recorded_command_lines(goldens) -> None:
    import json

    recorded = json.loads((goldens.parent / "spec" / "upstream_flags.json").read_text(encoding="utf-8"))
    kinds = {"int": "i", "float": "f", "str": "s"}
    checked = 0
    for name, flags in recorded.items():
        script = name.removeprefix("scripts/").removesuffix(".py")
        if "/" not in script:
            continue
        table = upstream_flags(script)
        assert {f"--{flag}" for flag in table} == set(flags), script
        for flag, facts in flags.items():
            row, nargs = table[flag[2:]], facts.get("nargs")
            kind = "b" if facts.get("action") == "store_true" else kinds.get(facts.get("type"), "s")
            assert row.kind == {None: kind, "+": f"+{kind}", 2: "2i"}[nargs], (script, flag)
            default = facts.get("default")
            if kind in ("i", "f") and nargs is None and default is not None:
                assert float(row.default) == float(default), (script, flag)
            elif isinstance(default, str) and len(default) < 60:
                assert row.default == default, (script, flag)
            checked += 1
    assert len(script_ids()) == 65 and checked > 5000


def test_flag_table_knows_the_four_scripts_of_the_test_data(data_dir) -> None:
    import json

    recorded = json.loads((data_dir / "upstream_flags.json").read_text(encoding="utf-8"))
    for name, flags in recorded.items():
        script = name.removeprefix("scripts/").removesuffix(".py")
        assert {f"--{flag}" for flag in upstream_flags(script)} == set(flags)


def test_own_parser_flags_are_known() -> None:
    """Whatever this project's parsers take, the audit knows."""
    from videox_fun.training.flags import build_parser
    from videox_fun.training.specs import SCRIPTS

    for spec in SCRIPTS.values():
        taken = {action.dest for action in build_parser(spec)._actions if action.option_strings} - {"help"}
        assert taken <= set(known_flags(spec.id)), spec.id
    assert "compile" in known_flags("unheard/of") and set(any_upstream_flag()) <= set(known_flags("unheard/of"))
