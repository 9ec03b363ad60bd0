"""``videox-data``: check a data set, convert it, and prepare clips.

``check`` reports every row's problem and can draw what the trainer will see. ``convert`` reads any of the formats that
training reads and writes another, with sizes, frame counts and rates filled in. ``measure``, ``filter``, ``scenes``,
``split`` and ``caption`` are for raw clips.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from videox_fun.data.storage import DATA_FORMATS


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``videox-data``."""
    parser = argparse.ArgumentParser(prog="videox-data", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    _check_flags(commands.add_parser("check", help="Report every problem of a data set; exit code 1 on errors."))
    convert = _source(commands.add_parser("convert", help="Write a data set in another format, facts filled in."))
    convert.add_argument("target", type=Path, help="A .json, .jsonl or .csv file, or with --to a folder.")
    convert.add_argument("--to", choices=DATA_FORMATS[1:], default="videox", help="Format to write.")
    convert.add_argument("--id_token", help="Word to put in front of every caption.")
    convert.add_argument("--relative_to", help="Write paths of an annotation file relative to this folder.")
    convert.add_argument("--no_probe", action="store_true", help="Open no files; leave rows as they are.")
    convert.add_argument("--shard_mb", type=int, default=512, help="Size of a shard, in MiB.")
    _prepare_flags(commands)
    return parser


def _source(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("source", help="Annotation file, folder, lists or shards.")
    parser.add_argument("--data_format", choices=DATA_FORMATS, default="auto", help="What the source is.")
    parser.add_argument("--train_data_dir", help="Folder of its relative paths.")
    return parser


def _check_flags(parser: argparse.ArgumentParser) -> None:
    _source(parser)
    run = parser.add_argument_group("flags of the run, with the meaning they have there")
    run.add_argument("--kind", choices=("image_video", "control", "vace", "text", "safetensors"),
                     default="image_video", help="Data of the plain, control and VACE scripts.")  # fmt: skip
    run.add_argument("--inpaint", action="store_true", help="The run makes masks (--train_mode inpaint or i2v).")
    for name, default in (("video_sample_size", 512), ("image_sample_size", 512), ("token_sample_size", 512),
                          ("video_sample_stride", 4), ("video_sample_n_frames", 17), ("train_batch_size", 1),
                          ("tokenizer_max_length", 512)):  # fmt: skip
        run.add_argument(f"--{name}", type=int, default=default)
    run.add_argument("--fix_sample_size", type=int, nargs=2)
    run.add_argument("--video_sample_fps", type=float)
    run.add_argument("--id_token")
    for name in ("enable_bucket", "random_ratio_crop", "random_hw_adapt", "training_with_video_token_length"):
        run.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--tokenizer", type=Path, help="Folder of the run's tokenizer, to count tokens of captions.")
    parser.add_argument("--probe_seconds", type=float, help="Open files for at most this long.")
    parser.add_argument("--decode", action="store_true",
                        help="Decode every clip from end to end, in processes apart.")  # fmt: skip
    parser.add_argument("--sheet", type=Path, action="append", default=[], metavar="FILE",
                        help="Draw what is trained, as .png or .html; may be repeated.")  # fmt: skip
    parser.add_argument("--sheet_rows", type=int, default=16, help="Rows of the sheet.")
    parser.add_argument("--json", type=Path, help="Also write all findings to this file.")


def _prepare_flags(commands: Any) -> None:
    measure = _source(commands.add_parser("measure", help="Motion, sharpness, darkness and text share of each clip."))
    measure.add_argument("target", type=Path, help="A .jsonl file; clips that it holds already are skipped.")
    measure.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    chosen = commands.add_parser("filter", help="Keep the rows whose measures lie within limits.")
    chosen.add_argument("source", type=Path, help="The .jsonl file that measure wrote.")
    chosen.add_argument("target", type=Path, help="Annotation file of the rows that are kept.")
    for name in ("motion", "sharpness", "brightness", "seconds"):
        chosen.add_argument(f"--min_{name}", type=float)
        chosen.add_argument(f"--max_{name}", type=float)
    for name in ("black", "text_area"):
        chosen.add_argument(f"--max_{name}", type=float)
    scenes = _source(commands.add_parser("scenes", help="Find the cuts of long videos."))
    scenes.add_argument("target", type=Path, help="A .jsonl file; videos that it holds already are skipped.")
    scenes.add_argument("--detector", choices=("auto", "built-in", "pyscenedetect"), default="auto")
    scenes.add_argument("--threshold", type=float, help="27 for pyscenedetect, 0.35 for the built-in detector.")
    split = commands.add_parser("split", help="Cut videos at the scenes that were found.")
    split.add_argument("source", type=Path, help="The .jsonl file that scenes wrote.")
    split.add_argument("target", type=Path, help="Folder for the clips and their metadata.json.")
    split.add_argument("--min_seconds", type=float, default=3.0, help="Shorter scenes are left out.")
    split.add_argument("--max_seconds", type=float, default=10.0, help="Longer scenes are cut into such parts.")
    caption = _source(commands.add_parser("caption", help="Run a command per clip; what it prints is the caption."))
    caption.add_argument("target", type=Path, help="A .jsonl file; clips that it holds already are skipped.")
    caption.add_argument("--run", required=True, metavar="COMMAND", help="Command line with {file} for the clip.")
    caption.add_argument("--workers", type=int, default=1)
    caption.add_argument("--timeout", type=float, default=600.0, help="Seconds per clip.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    commands = {"check": run_check, "convert": run_convert, "measure": run_measure, "filter": run_filter,
                "scenes": run_scenes, "split": run_split, "caption": run_caption}  # fmt: skip
    try:
        return commands[args.command](args)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"videox-data {args.command}: {error}\n")
        return 2


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def run_check(args: argparse.Namespace) -> int:
    from videox_fun.data.check import check
    from videox_fun.data.contact_sheet import sheet_rows, write_sheet
    from videox_fun.data.convert import replace_text
    from videox_fun.data.module import DataOptions

    options = DataOptions.from_args(args, train_data_meta=args.source, text_drop_ratio=0.0)
    report = check(options, count_tokens=_token_counter(args.tokenizer), max_tokens=args.tokenizer_max_length,
                   probe_seconds=args.probe_seconds, decode=args.decode)  # fmt: skip
    _say("\n".join(report.lines()))
    if args.json is not None:
        replace_text(args.json, json.dumps(report.as_dict(), ensure_ascii=False, indent=1) + "\n")
    if args.sheet and report.module is not None and args.kind not in ("text", "safetensors"):
        rows = list(sheet_rows(report.module, rows=args.sheet_rows, names=report.names))
        for target in args.sheet:
            _say(f"contact sheet of {len(rows)} row(s): {write_sheet(rows, target)}")
    return int(report.errors > 0)


def _token_counter(folder: Path | None) -> Any:
    if folder is None:
        return None
    if not folder.is_dir():
        raise ValueError(f"--tokenizer {folder}: no such folder")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return lambda text: len(tokenizer(text, truncation=False)["input_ids"])


def _read(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of a source, all sound or an error with the list. Captions may be missing: some commands write them."""
    from videox_fun.data.formats import detect_format
    from videox_fun.data.metadata import RowSchema, RowStore, load_rows, scan_folder

    folder = Path(args.source)
    if folder.is_dir() and args.data_format in ("auto", "folder") and detect_format(args.source) == "folder":
        media, _ = scan_folder(folder)
        if not all(path.with_suffix(".txt").is_file() for path in media):
            return list(RowStore({"file_path": str(path.absolute())} for path in media))
    schema = RowSchema(required=("file_path",), optional=(*RowSchema().optional, "text"))
    return list(load_rows(args.source, schema=schema, data_format=args.data_format,
                          id_token=getattr(args, "id_token", None)))  # fmt: skip


def run_convert(args: argparse.Namespace) -> int:
    from videox_fun.data.bucket_sampler import resolve
    from videox_fun.data.convert import fill_facts, write_rows
    from videox_fun.data.storage import is_plain_file

    rows = _read(args)
    failures = {} if args.no_probe else fill_facts(rows, folder=args.train_data_dir)
    for number, reason in failures.items():
        _say(f"row {number + 1} is left out: {reason}")
    rows = [row for number, row in enumerate(rows) if number not in failures]
    without = [number + 1 for number, row in enumerate(rows) if "text" not in row]
    if without and args.to != "videox":
        raise ValueError(f"{len(without)} row(s) have no caption, e.g. row {without[0]}; videox-data caption adds them")
    if args.relative_to and args.to == "videox":
        for row in rows:
            for key in ("file_path", "control_file_path"):
                if row.get(key) and is_plain_file(row[key]):
                    row[key] = os.path.relpath(resolve(row[key], args.train_data_dir), args.relative_to)
    count = write_rows(rows, args.target, data_format=args.to, folder=args.train_data_dir, shard_mb=args.shard_mb)
    _say(f"{count} row(s) written to {args.target} ({args.to}), {len(failures)} left out")
    return int(bool(failures))


def run_measure(args: argparse.Namespace) -> int:
    from videox_fun.data.prepare.measure import measure_rows

    done, failed = measure_rows(_read(args), args.target, folder=args.train_data_dir, workers=args.workers)
    _say(f"{done} clip(s) measured, {failed} unreadable: {args.target}")
    return int(failed > 0)


def run_filter(args: argparse.Namespace) -> int:
    from videox_fun.data.convert import write_rows
    from videox_fun.data.prepare.jsonl import read_lines
    from videox_fun.data.prepare.measure import keep

    limits = {name: value for name, value in vars(args).items() if name.startswith(("min_", "max_"))}
    rows = list(read_lines(args.source))
    kept, dropped = keep(rows, limits)
    write_rows(kept, args.target, data_format="videox")
    _say(f"{len(kept)} of {len(rows)} row(s) kept: {args.target}")
    for reason, count in sorted(dropped.items()):
        _say(f"  {count} dropped: {reason}")
    return 0


def run_scenes(args: argparse.Namespace) -> int:
    from videox_fun.data.prepare.scenes import find_scenes

    done, failed = find_scenes(_read(args), args.target, folder=args.train_data_dir, detector=args.detector,
                               threshold=args.threshold)  # fmt: skip
    _say(f"scenes of {done} video(s) found, {failed} unreadable: {args.target}")
    return int(failed > 0)


def run_split(args: argparse.Namespace) -> int:
    from videox_fun.data.prepare.scenes import split_videos

    count = split_videos(args.source, args.target, min_seconds=args.min_seconds, max_seconds=args.max_seconds)
    _say(f"{count} clip(s): {args.target / 'metadata.json'}; videox-data caption writes their captions")
    return 0


def run_caption(args: argparse.Namespace) -> int:
    from videox_fun.data.prepare.captions import caption_rows

    done, failed = caption_rows(_read(args), args.target, command=args.run, folder=args.train_data_dir,
                                workers=args.workers, timeout=args.timeout)  # fmt: skip
    _say(f"{done} caption(s) written, {failed} failed: {args.target}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
