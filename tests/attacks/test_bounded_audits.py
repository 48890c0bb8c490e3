"""On every hostile repository the audit ends by itself, with a table and exit code 0 or 1, in bounded time and memory.

Each is audited by a process of its own, whose peak memory the kernel tells. The bounds are those of docs/audit.md; the
time is only there to end what would never end.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from publisher.border.safetensors_header import encode_header
from tests.forks import publish_apart

SECONDS, MEBIBYTES = 60, 1024


def edited(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def bare(folder: Path) -> Path:
    """The adapter's two files alone, on the base beside it."""
    for path in folder.iterdir():
        if path.name not in {"adapter_config.json", "adapter_model.safetensors"}:
            path.unlink()
    edited(
        folder / "adapter_config.json", base_model_name_or_path=str(folder.parents[1].resolve() / "base"), revision=None
    )
    return folder / "adapter_config.json"


def catastrophic_target(folder: Path) -> None:
    edited(bare(folder), target_modules="(([a-z._0-9]+)+)+!")


def catastrophic_rank_pattern(folder: Path) -> None:
    edited(bare(folder), rank_pattern={"(([a-z._0-9]+)+)+!": 4})


def catastrophic_exclusion(folder: Path) -> None:
    edited(bare(folder), exclude_modules="(a|a)*(a|a)*(a|a)*b" * 20)


def many_patterns(folder: Path) -> None:
    edited(bare(folder), rank_pattern={f"x{n}.*y": 4 for n in range(200_000)})


def replicated_layers(folder: Path) -> None:
    edited(bare(folder), layer_replication=[[0, 2]] * 200_000)


def huge_base(folder: Path) -> None:
    config = bare(folder)
    shutil.copytree(folder.parents[1] / "base", folder.parents[1] / "huge")
    edited(folder.parents[1] / "huge" / "config.json", num_hidden_layers=10_000_000)
    edited(config, base_model_name_or_path=str(folder.parents[1].resolve() / "huge"))


def wide_base(folder: Path) -> None:
    config = bare(folder)
    shutil.copytree(folder.parents[1] / "base", folder.parents[1] / "wide")
    edited(folder.parents[1] / "wide" / "config.json", vocab_size=2**62, intermediate_size=2**62)
    edited(config, base_model_name_or_path=str(folder.parents[1].resolve() / "wide"))


def huge_numbers(folder: Path) -> None:
    edited(bare(folder), r=10**400, lora_alpha=10**400)


def deep_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"a":' + "[" * 1_000_000 + "]" * 1_000_000 + "}")


def wide_evidence(folder: Path) -> None:
    (folder / "extraction.json").write_text('{"modules": [' + "[]," * 20_000_000 + "[]]}")


def yaml_bomb(folder: Path) -> None:
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (folder / "manifest.yaml").write_text("\n".join(lines) + "\n? *a11\n: y\n? *a11\n: y\n")


def sparse_weights(folder: Path) -> None:
    bare(folder)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    half = 2**35
    shapes = {"A": (4, half // 16), "B": (half // 16, 4)}
    header = encode_header({f"{key}{name}.weight": ("F32", shape) for name, shape in shapes.items()}, metadata=None)
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 2 * half)


def sparse_card(folder: Path) -> None:
    with (folder / "README.md").open("r+b") as file:
        file.truncate(2**40)


def devices_and_fifos(folder: Path) -> None:
    for name in ("extraction.json", "verification.json"):
        (folder / name).unlink()
        (folder / name).symlink_to("/dev/zero")
    (folder / "errors.svg").unlink()
    os.mkfifo(folder / "errors.svg")


def long_line_in_the_card(folder: Path) -> None:
    (folder / "README.md").write_text("| a" * 2_000_000 + "\n")


def numbers_in_the_card(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    (folder / "README.md").write_text(re.sub(r"\n<!-- Rendered.*", "", text) + "1.5 % " * 200_000 + "\n")


HOSTILE = [
    catastrophic_target,
    catastrophic_rank_pattern,
    catastrophic_exclusion,
    many_patterns,
    replicated_layers,
    huge_base,
    wide_base,
    huge_numbers,
    deep_config,
    wide_evidence,
    yaml_bomb,
    sparse_weights,
    sparse_card,
    devices_and_fifos,
    long_line_in_the_card,
    numbers_in_the_card,
]


@pytest.mark.parametrize("spoil", HOSTILE, ids=lambda spoil: spoil.__name__)
def test_the_audit_ends_with_a_table_within_its_bounds(own_tiny_run: Path, spoil: Callable[[Path], None]) -> None:
    spoil(own_tiny_run / "dist" / "m")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(own_tiny_run / "home")}
    # busy machines are slow: this bounds what never ends, docs/audit.md tells what is usual
    done = publish_apart("publish audit dist/m", environment=environment, seconds=4 * SECONDS)
    assert done.answer.returncode in {0, 1}, done.answer.stderr
    assert "Traceback" not in done.answer.stderr
    assert re.search(r"\d+ checks?\b|passed", done.answer.stdout), done.answer.stdout
    assert done.mebibytes < MEBIBYTES
