"""Add width, height, frame count and frame rate to an annotation file, so that training opens no file for them.

The same as ``videox-data convert INPUT OUTPUT``, which also reads and writes other formats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from videox_fun.data.data_cli import main as videox_data


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script. Returns the exit code: 1 when files could not be read (their rows are left out)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input_file", required=True, help="Annotation file to read.")
    parser.add_argument("--output_file", required=True, help="Annotation file to write; may be the same.")
    parser.add_argument("--data_root", help="Folder of relative paths.")
    args = parser.parse_args(argv)
    folder = ["--train_data_dir", args.data_root] if args.data_root else []
    return videox_data(["convert", args.input_file, args.output_file, *folder])


if __name__ == "__main__":
    sys.exit(main())
